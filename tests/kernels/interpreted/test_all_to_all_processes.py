"""Dispatch and combine between real processes on shared memory, and what a killed one costs."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
from typing import Any

import exchange_peer
import pytest
from ep_kernels.shm import memory
from ep_kernels.triton.all_to_all.end import ExchangeShape
from ep_kernels.triton.all_to_all.inbox import Wire

DEADLINE_S = 170.0
"""For the rounds of ``PHASES``; more rounds have more."""
ROUTERS, EXPERTS, RING_SLOTS = 2, 3, 4


PHASES = {
    "exact": (Wire.FP32, Wire.FP32, True, 5, {}),
    "fp8": (Wire.FP8, Wire.BF16, False, 4, {}),
    "killed": (Wire.BF16, Wire.FP32, False, 4, {"expert1": 1, "router0": 2}),
}
"""Wire, back, exact, rounds, who dies in which round."""

LOSS_AFTER_S = 8.0
"""How long a router waits for the rank that was killed."""


def setup_of(phase: Any, held: contextlib.ExitStack) -> dict[str, Any]:
    wire, back, exact, rounds, dies = phase
    shape = ExchangeShape(
        routers=ROUTERS,
        experts=EXPERTS,
        ring_slots=RING_SLOTS,
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


@functools.cache
def results() -> dict[str, dict[str, Any]]:
    """Of one run for all tests. No fixture: those are set up outside the interpreter as well."""
    return run_ranks(PHASES)


def run_ranks(of: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What each rank printed, by phase; a rank that was killed said nothing."""
    seed = int(os.environ.get("MOEMESH_SEED", random.getrandbits(32)))
    print(f"MOEMESH_SEED={seed}")
    usual, rounds = (sum(phase[3] for phase in some.values()) for some in (PHASES, of))
    deadline_s = DEADLINE_S * max(1.0, rounds / usual)
    with contextlib.ExitStack() as held:
        phases = [setup_of(phase, held) for phase in of.values()]
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
            out, _ = process.communicate(timeout=deadline_s)
            if process.returncode != -signal.SIGKILL:
                assert process.returncode == 0, f"{name} failed"
                found[name] = dict(zip(of, json.loads(out), strict=True))
        return {phase: {name: told[phase] for name, told in found.items()} for phase in of}


@pytest.mark.alone
@pytest.mark.parametrize("phase", ["exact", "fp8"])
def test_two_routers_and_three_experts_exchange_hundreds_of_messages(phase: str) -> None:
    assert_complete(results()[phase], RING_SLOTS * PHASES[phase][3])


@pytest.mark.soak
def test_two_routers_and_three_experts_exchange_thousands_of_messages() -> None:
    more = {name: (*PHASES[name][:3], 40, {}) for name in ("exact", "fp8")}
    for result in run_ranks(more).values():
        assert_complete(result, RING_SLOTS * 40)


def assert_complete(of: dict[str, Any], batches: int) -> None:
    for rank, result in of.items():
        lanes = EXPERTS if rank.startswith("router") else ROUTERS
        assert result["lost"] == []
        assert result["messages"] == batches * lanes


@pytest.mark.alone
def test_a_killed_expert_rank_is_lost_to_every_router_and_costs_its_lanes_only() -> None:
    """Every batch was compared, so what the other lanes brought was right all along."""
    assert "expert1" not in results()["killed"]
    survivor = results()["killed"]["router1"]
    rounds, dies = PHASES["killed"][3:]
    assert survivor["lost"] == ["expert1"]
    # It died at a message of that round; the survivor may then have been in the one before.
    others = RING_SLOTS * (EXPERTS - 1) * rounds
    assert others <= survivor["messages"] <= others + RING_SLOTS * (dies["expert1"] + 1)


@pytest.mark.alone
def test_a_killed_router_is_lost_to_every_expert_rank_and_the_other_one_goes_on() -> None:
    assert "router0" not in results()["killed"]
    for rank in ("expert0", "expert2"):
        assert "router0" in results()["killed"][rank]["lost"]
