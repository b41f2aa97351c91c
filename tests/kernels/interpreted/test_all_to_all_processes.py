"""Dispatch and combine between real processes on shared memory, and what a killed one costs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import exchange_peer
import pytest
from ep_kernels.shm import memory
from ep_kernels.triton.all_to_all.end import ExchangeShape
from ep_kernels.triton.all_to_all.inbox import Wire

DEADLINE_S = 170.0
ROUTERS, EXPERTS = 2, 3


PHASES = {
    "exact": (Wire.FP32, Wire.FP32, True, 44, {}),
    "fp8": (Wire.FP8, Wire.BF16, False, 40, {}),
    "killed": (Wire.BF16, Wire.FP32, False, 6, {"expert1": 1, "router0": 3}),
}
"""Wire, back, exact, rounds, who dies in which round."""

LOSS_AFTER_S = 8.0
"""How long a router waits for the rank that was killed."""


def setup_of(name: str, held: contextlib.ExitStack) -> dict[str, Any]:
    wire, back, exact, rounds, dies = PHASES[name]
    shape = ExchangeShape(
        routers=ROUTERS,
        experts=EXPERTS,
        ring_slots=2,
        capacity_tokens=3,
        top_k=2,
        hidden=128 if wire is Wire.FP8 else 20,
        wire=wire,
        back=back,
        exact=exact,
    )
    fds = {
        role: [memory.create(role, layout.total_bytes) for _ in range(count)]
        for role, layout, count in (
            ("router", shape.answers, ROUTERS),
            ("expert", shape.requests, EXPERTS),
        )
    }
    for fd in fds["router"] + fds["expert"]:
        held.callback(os.close, fd)
    return {
        "shape": {name: getattr(shape, name) for name in shape.__dataclass_fields__},
        "fds": fds,
        "rounds": rounds,
        "deadline_s": LOSS_AFTER_S if dies else DEADLINE_S,
        "dies": dies,
    }


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, dict[str, Any]]]:
    """What each rank printed, by phase; None for one that was killed."""
    seed = int(os.environ.get("MOEMESH_SEED", random.getrandbits(32)))
    print(f"MOEMESH_SEED={seed}")
    with contextlib.ExitStack() as held:
        phases = [setup_of(name, held) for name in PHASES]
        fds = [fd for phase in phases for role in phase["fds"].values() for fd in role]
        processes: dict[str, subprocess.Popen[str]] = {}
        for role, count in (("router", ROUTERS), ("expert", EXPERTS)):
            for index in range(count):
                setup = {"role": role, "index": index, "phases": phases, "seed": seed + index}
                process = subprocess.Popen(
                    [sys.executable, exchange_peer.__file__, json.dumps(setup)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    pass_fds=fds,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
                )
                held.callback(process.wait)
                held.callback(process.kill)
                processes[f"{role}{index}"] = process
        found: dict[str, Any] = {}
        for name, process in processes.items():  # routers first: expert ranks serve until asked
            out, _ = process.communicate(timeout=DEADLINE_S)
            if process.returncode != -signal.SIGKILL:
                assert process.returncode == 0, f"{name} failed"
                found[name] = dict(zip(PHASES, json.loads(out), strict=True))
        yield {phase: {name: of.get(phase) for name, of in found.items()} for phase in PHASES}


@pytest.mark.parametrize("phase", ["exact", "fp8"])
def test_two_routers_and_three_experts_exchange_thousands_of_messages(
    results: dict[str, dict[str, Any]], phase: str
) -> None:
    batches = 2 * PHASES[phase][3]
    for rank, result in results[phase].items():
        lanes = EXPERTS if rank.startswith("router") else ROUTERS
        assert result["lost"] == []
        if rank != "router0":
            assert result["messages"] == batches * lanes


def test_a_killed_expert_rank_is_lost_to_every_router_and_costs_its_lanes_only(
    results: dict[str, dict[str, Any]],
) -> None:
    """Every batch was compared, so what the other lanes brought was right all along."""
    assert "expert1" not in results["killed"]
    survivor = results["killed"]["router1"]
    rounds, dies = PHASES["killed"][3:]
    assert survivor["lost"] == ["expert1"]
    assert survivor["messages"] == 2 * (EXPERTS * rounds - (rounds - dies["expert1"]))


def test_a_killed_router_is_lost_to_every_expert_rank_and_the_other_one_goes_on(
    results: dict[str, dict[str, Any]],
) -> None:
    assert "router0" not in results["killed"]
    for rank in ("expert0", "expert2"):
        assert "router0" in results["killed"][rank]["lost"]
