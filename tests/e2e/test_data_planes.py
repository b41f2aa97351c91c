"""Whole meshes over the data planes that are chosen by name, against transformers."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.meshes import Mesh
from tests.support.oracle import Continuation, Oracle

TOLERANCE = 1e-4
STREAMS = 4
TOKENS = 200
CHECKED = 60
"""Of them, against transformers; in exact mode the others follow from what is equal."""


def complete(mesh: Mesh, stream: int, steps: int) -> dict[str, Any]:
    body = {
        "model": "deepseek", "prompt": prompt_of(stream), "max_tokens": steps, "temperature": 0,
        "logprobs": 1, "ignore_eos": True,
    }  # fmt: skip
    status, answer = mesh.post("/v1/completions", body)
    assert status == 200, answer
    return dict(answer["choices"][0]["logprobs"])


def check(got: dict[str, Any], want: Continuation) -> None:
    assert len(got["token_logprobs"]) >= len(want.tokens)
    for step, token in enumerate(want.tokens):
        assert abs(got["token_logprobs"][step] - float(want.logprobs[step][token])) <= TOLERANCE


def prompt_of(stream: int) -> list[int]:
    return [stream + 8, 40, 90]


@pytest.fixture(scope="module")
def oracle(tiny_deepseek: Path) -> Oracle:
    return Oracle(tiny_deepseek)


def test_over_gloo_tokens_are_right_and_a_killed_worker_costs_none(
    tiny_deepseek: Path, oracle: Oracle
) -> None:
    planes = {"network__data_plane": "gloo", "network__listen": "127.0.0.1"}
    with Mesh(tiny_deepseek, experts=2, model__exact="true", **planes) as mesh:
        router_log = mesh.run_dir / "logs" / "router-0.log"
        assert router_log.read_text().count('"over":"gloo"') == 2
        pid = next(m["pid"] for m in mesh.members("expert") if m["id"] == "expert-1")
        with ThreadPoolExecutor(STREAMS) as pool:
            wanted = list(pool.map(lambda stream: complete(mesh, stream, TOKENS), range(STREAMS)))
            running = [pool.submit(complete, mesh, stream, TOKENS) for stream in range(STREAMS)]
            mesh.wait_for(lambda: running_requests(mesh) == STREAMS, "all to run")
            os.kill(pid, signal.SIGKILL)
            got = [future.result() for future in running]
        check(wanted[0], oracle.greedy(prompt_of(0), CHECKED))
        assert got == wanted
        # The death came while it mattered, and cost the lane of one worker.
        events = [json.loads(line) for line in router_log.read_text().splitlines()]
        assert {e["peer"] for e in events if e["event"] == "lane.lost"} == {"expert-1"}
        mesh.wait_for(lambda: came_back(mesh, pid), "expert-1 to come back")
        mesh.wait_for(
            lambda: router_log.read_text().count('"over":"gloo"') == 3, "a lane to its heir"
        )
        check(complete(mesh, 0, CHECKED), oracle.greedy(prompt_of(0), CHECKED))


def running_requests(mesh: Mesh) -> float:
    _status, page = mesh.get("/metrics")
    name = "moemesh_num_requests_running "
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(name))


def came_back(mesh: Mesh, old_pid: int) -> bool:
    return any(
        member["id"] == "expert-1" and member["pid"] != old_pid and member["state"] == "ready"
        for member in mesh.members("expert")
    )
