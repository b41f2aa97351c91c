"""The planner is killed under load and started again by the launcher: nobody else notices."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.meshes import Mesh

STREAMS = 6
# Logged by routers when a lane goes and by gateways when a router does (and its sequences move).
DISTURBANCES = ("lane.closed", "lane.lost", "router.lost", "mesh.became_unready")


def complete(mesh: Mesh, index: int, max_tokens: int) -> Any:
    status, body = mesh.post(
        "/v1/completions",
        {
            "model": "deepseek", "prompt": [index + 8, 40, 90], "max_tokens": max_tokens,
            "seed": index, "temperature": 0.8, "ignore_eos": True,
        },
    )  # fmt: skip
    assert status == 200, body
    return body["choices"][0]


def test_a_restarted_planner_disturbs_neither_lanes_nor_streams(tiny_deepseek: Path) -> None:
    with Mesh(tiny_deepseek, experts=2, routers=2, model__exact="true") as mesh:
        before = {member["id"]: member for member in mesh.status()["members"]}
        with ThreadPoolExecutor(STREAMS) as pool:
            # Long enough that tokens flow before, while and after the planner is away.
            running = [pool.submit(complete, mesh, index, 900) for index in range(STREAMS)]
            mesh.wait_for(lambda: _running(mesh) == STREAMS, "the streams to run")
            os.kill(before["planner"]["pid"], signal.SIGKILL)
            mesh.wait_for(lambda: _settled(mesh, before), "the new planner to know everybody")
            assert any(not one.done() for one in running), "the streams were too short to tell"
            got = [one.result() for one in running]
        after = {member["id"]: member for member in mesh.status()["members"]}
        for id_, member in before.items():
            same = after[id_]["incarnation"] == member["incarnation"]
            assert same == (id_ != "planner"), mesh.logs()
        texts = {path.name: path.read_text() for path in (mesh.run_dir / "logs").glob("*.log")}
        assert any("planner.lost" in text for text in texts.values()), "its loss is logged"
        for name, text in texts.items():
            assert not [event for event in DISTURBANCES if event in text], f"{name}:\n{text}"
        # The same text as on a mesh that nothing happened to.
        with ThreadPoolExecutor(STREAMS) as pool:
            wanted = list(pool.map(lambda index: complete(mesh, index, 900), range(STREAMS // 2)))
        assert [one["text"] for one in got[: len(wanted)]] == [one["text"] for one in wanted]


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
