"""Processes killed under load on a real mesh: every request ends with the reference's tokens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.meshes import Mesh

STREAMS = 8


@pytest.fixture(scope="module")
def mesh(tiny_deepseek: Path) -> Iterator[Mesh]:
    with Mesh(tiny_deepseek, experts=2, routers=2, model__exact="true") as running:
        yield running


def complete(mesh: Mesh, index: int) -> Any:
    status, body = mesh.post(
        "/v1/completions",
        {
            "model": "deepseek", "prompt": [index + 8, 40, 90], "max_tokens": 400, "seed": index,
            "temperature": 0.8, "ignore_eos": True, "logprobs": 1,
        },
    )  # fmt: skip
    assert status == 200, body
    return body["choices"][0]


@pytest.mark.parametrize("victim", ["expert-1", "router-0"])
def test_a_killed_process_costs_no_request_and_no_token(mesh: Mesh, victim: str) -> None:
    pid = next(m["pid"] for m in mesh.status()["members"] if m["id"] == victim)
    with ThreadPoolExecutor(STREAMS) as pool:
        wanted = list(pool.map(lambda index: complete(mesh, index), range(STREAMS)))
        running = [pool.submit(complete, mesh, index) for index in range(STREAMS)]
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


def _came_back(mesh: Mesh, victim: str, old_pid: int) -> bool:
    return any(
        member["id"] == victim and member["pid"] != old_pid and member["state"] == "ready"
        for member in mesh.status()["members"]
    )
