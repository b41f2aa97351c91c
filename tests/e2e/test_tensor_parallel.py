"""Routers of two processes each: the tokens and log-probabilities of the reference."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mesh.processes import has_ended
from tests.e2e.test_oracle import STEPS, check, complete, prompts
from tests.support.chaos import Chaos, Counts
from tests.support.checkpoints import variant
from tests.support.meshes import MOEMESH, Mesh
from tests.support.oracle import Oracle

STREAMS = 6


@pytest.fixture(scope="module")
def exact_mesh(tiny_deepseek: Path) -> Iterator[Mesh]:
    """Two routers of two processes, so that one can take over from the other."""
    with Mesh(
        tiny_deepseek,
        experts=1,
        routers=2,
        router__tp=2,
        model__exact="true",
        router__micro_batches=3,
        router__capacity_tokens=16,
        router__max_step_tokens=64,
    ) as mesh:
        yield mesh


def test_latent_attention_equals_transformers_alone_and_batched(
    exact_mesh: Mesh, tiny_deepseek: Path
) -> None:
    oracle = Oracle(tiny_deepseek)
    tokenizer = Tokenizer.from_file(str(tiny_deepseek / "tokenizer.json"))
    cases = prompts(380, [1, 20, 130, 300])
    alone = [complete(exact_mesh, prompt) for prompt in cases]
    with ThreadPoolExecutor(len(cases)) as pool:
        together = list(pool.map(lambda prompt: complete(exact_mesh, prompt), cases))
    for prompt, one, many in zip(cases, alone, together, strict=True):
        check(one, oracle.greedy(prompt, STEPS), tokenizer)
        assert one["logprobs"] == many["logprobs"]


@pytest.fixture(scope="module")
def wanted(exact_mesh: Mesh) -> list[dict[str, Any]]:
    """What each stream is told while nobody ends."""
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda index: sample(exact_mesh, index), range(STREAMS)))


@pytest.mark.parametrize(("victim", "number"), [
    ("follower", signal.SIGKILL),
    ("leader", signal.SIGKILL),
    pytest.param("group", signal.SIGTERM, marks=pytest.mark.soak),
], ids=["follower-killed", "leader-killed", "all-told-to-leave"])  # fmt: skip
def test_a_group_that_ends_costs_no_request_and_no_token(
    exact_mesh: Mesh, wanted: list[dict[str, Any]], victim: str, number: signal.Signals
) -> None:
    mesh = exact_mesh
    id_ = "router-1" if victim == "leader" else "router-0"
    pids = group_of(mesh, id_)
    assert len(pids) == 2
    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(sample, mesh, index) for index in range(STREAMS)]
        mesh.wait_for(lambda: figure(mesh, "num_requests_running") == STREAMS, "all to run")
        for pid in {"follower": pids[1:], "leader": pids[:1], "group": pids}[victim]:
            os.kill(pid, number)
        got = [future.result() for future in running]
    assert [one["logprobs"] for one in got] == [want["logprobs"] for want in wanted]
    if number == signal.SIGKILL:
        assert figure(mesh, "requests_moved_total") > 0  # the death came while it mattered
    mesh.wait_for(lambda: all(has_ended(pid) for pid in pids), "the whole group to end")
    if victim == "follower":  # somebody has to take over in the next test
        mesh.wait_for(lambda: is_back(mesh, id_, pids), f"{id_} to come back", 60)


def test_grouped_query_attention_with_preemption_and_prefix_cache(checkpoints: Path) -> None:
    path = variant("mixtral", checkpoints)
    oracle = Oracle(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    cases = prompts(380, [300, 130, 20, 1, 200, 110, 90])
    # One sequence of full length: all prompts fit, but not what they are continued by. 2 layers, 1
    # of 2 key heads.
    block_bytes = 4 * 2 * 16 * 2 * 16
    with Mesh(
        path,
        experts=1,
        router__tp=2,
        router__max_step_tokens=96,
        router__max_running=8,
        router__kv_cache_bytes=block_bytes * 64,
    ) as mesh:
        asked = [*cases, cases[0]]
        with ThreadPoolExecutor(len(asked)) as pool:
            together = list(pool.map(lambda prompt: complete(mesh, prompt), asked))
        for prompt, choice in zip(asked, together, strict=True):
            check(choice, oracle.greedy(prompt, STEPS), tokenizer)
        (router,) = mesh.members("router")
        assert len(router["group"]) == 1
        with urllib.request.urlopen(router["metrics"], timeout=10) as answer:
            page = answer.read().decode()
        counts = dict(line.split() for line in page.splitlines() if not line.startswith("#"))
        assert float(counts["moemesh_num_preemptions_total"]) > 0
        assert float(counts["moemesh_prefix_cache_hits_total"]) > 0
        assert float(counts["moemesh_router_group_wait_seconds_total"]) > 0
        # A follower is missed even while nobody asks it anything.
        os.kill(router["group"][0], signal.SIGKILL)
        mesh.wait_for(lambda: has_ended(router["pid"]), "its leader to end")


def test_a_model_that_cannot_be_divided_is_refused_with_the_arithmetic(
    tiny_deepseek: Path, tmp_path: Path
) -> None:
    fault = "4 attention heads / 3 = 1.333 heads a rank, expected whole"
    settings = ["--set", f"model.path={tiny_deepseek}", "--set", f"mesh.run_dir={tmp_path}/run"]
    up = subprocess.run(
        [MOEMESH, "up", "--tp", "3", *settings],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert up.returncode == 2
    assert f"router.tp = 3 (flag --tp): {fault}" in " ".join(up.stderr.split())


def sample(mesh: Mesh, index: int) -> dict[str, Any]:
    status, body = mesh.post(
        "/v1/completions",
        {
            "model": "deepseek", "prompt": [index + 8, 40, 90], "max_tokens": 200, "seed": index,
            "temperature": 0.8, "ignore_eos": True, "logprobs": 1,
        },
    )  # fmt: skip
    assert status == 200, body
    return dict(body["choices"][0])


def figure(mesh: Mesh, name: str) -> float:
    """A gauge of the gateway."""
    _status, page = mesh.get("/metrics")
    return next(
        float(line.split()[1]) for line in page.splitlines() if line.startswith(f"moemesh_{name} ")
    )


def group_of(mesh: Mesh, id_: str) -> list[int]:
    """Its pids, once it is ready. The mesh serves before its second router does, and on a busy
    machine a router is suspect for a moment, or the planner late to say what it is.
    """
    found: list[int] = []

    def look() -> bool:
        found[:] = pids_of(mesh, id_)
        return bool(found)

    mesh.wait_for(look, f"{id_} to be ready")
    return found


def pids_of(mesh: Mesh, id_: str) -> list[int]:
    """The leader's and its followers', if the router is ready; else none."""
    members = Chaos(mesh, Counts(expert=1, router=2, gateway=1)).members()
    member = members.get(id_)
    return [member.pid, *member.group] if member and member.state == "ready" else []


def is_back(mesh: Mesh, id_: str, old: list[int]) -> bool:
    pids = pids_of(mesh, id_)
    return bool(pids) and not set(pids) & set(old)
