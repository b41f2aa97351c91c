"""Processes killed under load on a real mesh: every request ends with the reference's tokens."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.meshes import Mesh

STREAMS = 8
# Logged by routers when a lane goes and by gateways when a router does (and its sequences move).
DISTURBANCES = ("lane.closed", "lane.lost", "router.lost", "mesh.became_unready")


@pytest.fixture(scope="module")
def mesh(tiny_deepseek: Path) -> Iterator[Mesh]:
    with Mesh(tiny_deepseek, experts=2, routers=2, model__exact="true") as running:
        yield running


def complete(mesh: Mesh, index: int, max_tokens: int = 250, **more: Any) -> Any:
    status, body = mesh.post(
        "/v1/completions",
        {
            "model": "deepseek", "prompt": [index + 8, 40, 90], "max_tokens": max_tokens,
            "seed": index, "temperature": 0.8, "ignore_eos": True, **more,
        },
    )  # fmt: skip
    assert status == 200, body
    return body["choices"][0]


def test_a_restarted_planner_disturbs_neither_lanes_nor_streams(mesh: Mesh) -> None:
    """The first test: nothing has disturbed the mesh before."""
    streams = 4
    before = {member["id"]: member for member in mesh.status()["members"]}
    with ThreadPoolExecutor(streams) as pool:
        # Long enough that tokens flow before, while and after the planner is away.
        running = [pool.submit(complete, mesh, index, 900) for index in range(streams)]
        mesh.wait_for(lambda: _running(mesh) == streams, "the streams to run")
        os.kill(before["planner"]["pid"], signal.SIGKILL)
        mesh.wait_for(lambda: _settled(mesh, before), "the new planner to know everybody")
        assert any(not one.done() for one in running), "the streams were too short to tell"
        got = [one.result() for one in running]
    # Nor does the launcher tell of processes that it did not start again.
    mesh.wait_for(lambda: "whole again" in _told_since(mesh, "planner was killed"), "the launcher")
    told = _told_since(mesh, "planner was killed")
    assert not re.search(r"^(router|expert)-\d: ", told, re.MULTILINE), told
    after = {member["id"]: member for member in mesh.status()["members"]}
    for id_, member in before.items():
        same = after[id_]["incarnation"] == member["incarnation"]
        assert same == (id_ != "planner"), mesh.logs()
    texts = {path.name: path.read_text() for path in (mesh.run_dir / "logs").glob("*.log")}
    assert any("planner.lost" in text for text in texts.values()), "its loss is logged"
    for name, text in texts.items():
        assert not [event for event in DISTURBANCES if event in text], f"{name}:\n{text}"
    # The same text as on a mesh that nothing happened to.
    with ThreadPoolExecutor(streams) as pool:
        wanted = list(pool.map(lambda index: complete(mesh, index, 900), range(streams // 2)))
    assert [one["text"] for one in got[: len(wanted)]] == [one["text"] for one in wanted]


@pytest.fixture(scope="module")
def wanted(mesh: Mesh) -> list[Any]:
    """What each stream is told while nobody dies."""
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda index: complete(mesh, index, logprobs=1), range(STREAMS)))


@pytest.mark.parametrize("victim", ["expert-1", "router-0"])
def test_a_killed_process_costs_no_request_and_no_token(
    mesh: Mesh, wanted: list[Any], victim: str
) -> None:
    pid = next(m["pid"] for m in mesh.status()["members"] if m["id"] == victim)
    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(complete, mesh, index, logprobs=1) for index in range(STREAMS)]
        mesh.wait_for(lambda: _figure(mesh, "num_requests_running") == STREAMS, "all to run")
        os.kill(pid, signal.SIGKILL)
        got = [future.result() for future in running]
    for one, want in zip(got, wanted, strict=True):
        assert one["text"] == want["text"]
        assert one["logprobs"] == want["logprobs"]
    # The death came while it mattered.
    if victim == "router-0":
        assert _figure(mesh, "requests_moved_total") > 0
    else:
        logs = (mesh.run_dir / "logs").glob("router-*.log")
        assert any("lane.lost" in path.read_text() for path in logs)
    mesh.wait_for(lambda: _came_back(mesh, victim, pid), f"{victim} to come back")


def _figure(mesh: Mesh, name: str) -> float:
    """A gauge of the gateway."""
    _status, page = mesh.get("/metrics")
    return next(
        float(line.split()[1]) for line in page.splitlines() if line.startswith(f"moemesh_{name} ")
    )


def _running(mesh: Mesh) -> int:
    return sum((member["load"] or {}).get("running", 0) for member in mesh.members("router"))


def _settled(mesh: Mesh, before: dict[str, dict[str, Any]]) -> bool:
    """Whether the new planner has said who is in the mesh, and everybody is."""
    if "mesh.found_again" not in (mesh.run_dir / "logs" / "planner.log").read_text():
        return False
    try:
        status = mesh.status()
    except AssertionError:
        return False  # there is no planner
    members = {member["id"]: member for member in status["members"]}
    return (
        members["planner"]["pid"] != before["planner"]["pid"]
        and members.keys() == before.keys()
        and all(member["state"] == "ready" for member in members.values())
    )


def _told_since(mesh: Mesh, words: str) -> str:
    """What the launcher has printed after ``words``."""
    return mesh.log.read_text().partition(words)[2]


def _came_back(mesh: Mesh, victim: str, old_pid: int) -> bool:
    return any(
        member["id"] == victim and member["pid"] != old_pid and member["state"] == "ready"
        for member in mesh.status()["members"]
    )
