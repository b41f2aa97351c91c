"""Faults, moves and changes of size at random under load, and then nothing is missing or left over.

``MOEMESH_CHAOS_SECONDS`` and ``MOEMESH_CHAOS_SEED`` say how long ``make chaos`` goes on, and how.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.chaos import Chaos, Counts, go_on
from tests.support.meshes import Mesh
from tests.support.streams import Clients, Reference, asks

COUNTS = Counts(expert=3, router=2, gateway=2)
STREAMS = 32
CANCELLED = 0.1
SECONDS = float(os.environ.get("MOEMESH_CHAOS_SECONDS", "600"))
SEED = int(os.environ.get("MOEMESH_CHAOS_SEED", "1"))
LEAST_WARM_UP_S, MOST_WARM_UP_S = 15.0, 60.0
"""A quarter of the storm between these. Python's heap grows by 1 MiB at a time, ever more rarely:
what is grown after this is a leak.
"""
MOST_STOPPED_S = 8.0
EACH_DEADLINE_S = 180.0
"""For the kinds that have not struck when the storm's time is over."""
ASKS = [
    *asks(3, 20, prompt_tokens=30, max_tokens=100),
    *asks(4, 4, prompt_tokens=500, max_tokens=20),
]
WHAT = ("kill", "kill", "kill", "stop", "leave", "move", "move", "move", "scale")
WHOM = ("expert", "expert", "router", "planner", "gateway")
Strike = tuple[str, str]
EACH: list[Strike] = [
    *itertools.product(("kill", "stop", "leave"), ("expert", "router", "planner", "gateway")),
    ("move", ""),
    ("scale", ""),
]


class Storm:
    """One fault after another, most of them before the last one is got over: each kind once, and
    then as they come.
    """

    def __init__(self, chaos: Chaos, seed: int) -> None:
        self.chaos = chaos
        self.draw = random.Random(seed)
        self.happened: Counter[str] = Counter()
        self.stopped: list[threading.Timer] = []
        self.to_come = self.draw.sample(EACH, len(EACH))

    def rage(self, seconds: float, clients: Clients) -> None:
        """For so long, and until each kind has struck; or until a request has failed."""
        began = time.monotonic()
        while not clients.failures:
            passed = time.monotonic() - began
            if passed > seconds and not self.to_come:
                break
            assert passed < seconds + EACH_DEADLINE_S, f"{self.to_come} never struck"
            self.strike()
            if self.draw.random() < 0.2:
                self.chaos.wait_nominal()
            else:
                time.sleep(self.draw.uniform(0.2, 2.0))  # the next one meets the mesh as it is then
        for timer in self.stopped:
            timer.join()

    def strike(self) -> None:
        what, role = self.draw.choice(WHAT), self.draw.choice(WHOM)
        dealt = self.to_come.pop() if self.to_come else None
        if dealt:
            what, role = dealt
        if what == "move":
            done = self.chaos.rebalance(self.draw)
        elif what == "scale":
            done = self.scale()
        else:
            # Whoever talks to the second gateway may lose a connection, to the first nobody.
            victim = "gateway-1" if role == "gateway" else self.chaos.victim(role)
            done = self.hit(victim, what)
            what = f"{what} {role}"
        self.happened[what if done else f"no {what}"] += 1
        if dealt and not done:  # nobody was there, or the planner was busy: later, then
            self.to_come.insert(0, dealt)

    def hit(self, victim: str, what: str) -> bool:
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}[what]
        pid = self.chaos.signal(victim, number)
        if pid and what == "stop":
            timer = threading.Timer(self.draw.uniform(0.5, MOST_STOPPED_S), go_on, [pid])
            timer.start()
            self.stopped.append(timer)
        return bool(pid)

    def scale(self) -> bool:
        """One expert worker and one router more or less, on a mesh that is whole."""
        self.chaos.wait_nominal()
        expert, router = self.draw.choice([2, 3]), self.draw.choice([1, 2])
        self.chaos.mesh.run("scale", f"experts={expert}", f"routers={router}", timeout_s=300)
        self.chaos.counts = Counts(expert, router, COUNTS.gateway)
        return True


def survive(model: Path, seconds: float, seed: int) -> None:
    with Mesh(
        model,
        experts=COUNTS.expert,
        routers=COUNTS.router,
        mesh__gateways=COUNTS.gateway,
        model__exact="true",
        router__kv_cache_bytes=4_000_000,
        router__expert_timeout_s=120,
        gateway__router_wait_s=120,
        planner__move_bytes_per_s=200_000,
    ) as mesh:
        chaos = Chaos(mesh, COUNTS)
        chaos.wait_nominal()
        reference = Reference(mesh)
        reference.learn(ASKS, STREAMS)
        ports = [mesh.port, mesh.port + 1]
        with Clients(ports, ASKS, STREAMS, reference=reference):
            time.sleep(max(LEAST_WARM_UP_S, min(seconds / 4, MOST_WARM_UP_S)))
        chaos.wait_nominal()
        chaos.wait_idle()
        before = chaos.holdings()

        storm = Storm(chaos, seed)
        with Clients(
            ports, ASKS, STREAMS, reference=reference, cancels=CANCELLED, seed=seed
        ) as clients:
            clients.excused = {mesh.port + 1}
            try:
                storm.rage(seconds, clients)
            finally:
                happened = dict(sorted(storm.happened.items()))
                print(f"\nseed {seed}: {happened}")
        cancelled = sum(answer.cancelled for answer in clients.answers)
        print(
            f"{len(clients.answers)} answers, {cancelled} of them cancelled, "
            f"{len(clients.broken)} connections broken with gateway-1, "
            f"{len(clients.failures)} requests lost or wrong"
        )
        if clients.failures:
            words = f"seed {seed}: {clients.failures[:4]}\n{mesh.logs()}"
            raise AssertionError(words) from clients.failures[0]
        if chaos.counts != COUNTS:
            chaos.wait_nominal()
            mesh.run("scale", f"experts={COUNTS.expert}", f"routers={COUNTS.router}", timeout_s=300)
            chaos.counts = COUNTS
        print(f"whole again after {chaos.wait_nominal():.1f} s")
        chaos.wait_idle()
        leaks_left = chaos.until_no_leaks(before)
        assert not leaks_left, f"seed {seed}: {leaks_left}"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the mesh's processes: without our own settings, which none of them knows.

    oneDNN keeps a compiled product for each of the last 1024 shapes, some 100 kB each: that is more
    than a small leak, and slow to come to an end. So there are limits.
    """
    monkeypatch.delenv("MOEMESH_CHAOS_SECONDS", raising=False)
    monkeypatch.delenv("MOEMESH_CHAOS_SEED", raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "16")


@pytest.mark.alone
def test_nothing_is_lost_wrong_or_left_over_after_a_storm(tiny_deepseek: Path) -> None:
    survive(tiny_deepseek, 20.0, seed=1)


@pytest.mark.soak
def test_nothing_is_lost_wrong_or_left_over_after_a_long_storm(tiny_deepseek: Path) -> None:
    survive(tiny_deepseek, SECONDS, SEED)
