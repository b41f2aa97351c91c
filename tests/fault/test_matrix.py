"""Each kind of process killed, stopped for a while or told to leave, whatever the mesh does then.

No request fails, every token is the reference's, and the mesh is as before soon after. Only who
talks to a gateway that is killed or hangs loses a connection. How long streams stood still is
printed, not asserted: it is a matter of the machine (``pytest -s``). ``make test`` has
``test_deaths`` and the storm of ``test_chaos`` instead.
"""

from __future__ import annotations

import itertools
import random
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.chaos import BACK_S, STOP_S, Chaos, Counts, go_on
from tests.support.meshes import Mesh
from tests.support.streams import Clients, Reference, asks

COUNTS = Counts(expert=3, router=2, gateway=2)
STREAMS = 6
SAY = asks(1, 8, prompt_tokens=10, max_tokens=300)
READ = asks(2, 8, prompt_tokens=700, max_tokens=6)
MOVE_BYTES_PER_S = 60_000
"""A move of some of the tiny model's experts takes a few seconds."""

ROLES = ("expert", "router", "planner", "gateway")
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM")
PHASES = ("idle", "decoding", "prefilling", "rebalancing", "starting")
Cell = tuple[str, str, str]

# By role last, so that no process dies so often that the launcher waits long.
CELLS: list[Cell] = [
    (role, number, phase) for phase, number, role in itertools.product(PHASES, SIGNALS, ROLES)
]


@dataclass
class Bench:
    """A mesh, what it answers when nothing happens to it, and what was measured."""

    chaos: Chaos
    reference: Reference
    draw: random.Random = field(default_factory=lambda: random.Random(7))
    pauses_s: dict[Cell, list[float]] = field(default_factory=dict)
    back_s: dict[Cell, float] = field(default_factory=dict)

    def table(self) -> str:
        lines = ["cell: streams, their longest pause (median, worst), then all as before"]
        for cell, back_s in self.back_s.items():
            pauses = self.pauses_s[cell]
            shown = f"{len(pauses):2d}"
            if pauses:
                shown += f"  {statistics.median(pauses):5.2f} s  {max(pauses):5.2f} s"
            late = f"  later than {BACK_S:.0f} s" if back_s > BACK_S else ""
            lines.append(f"{' '.join(cell):30s} {shown:22s} {back_s:5.1f} s{late}")
        return "\n".join(lines)


@pytest.fixture(scope="module")
def bench(tiny_deepseek: Path) -> Iterator[Bench]:
    with Mesh(
        tiny_deepseek,
        experts=COUNTS.expert,
        routers=COUNTS.router,
        mesh__gateways=COUNTS.gateway,
        model__exact="true",
        router__max_step_tokens=64,
        gateway__router_wait_s=60,
        planner__move_bytes_per_s=MOVE_BYTES_PER_S,
    ) as mesh:
        chaos = Chaos(mesh, COUNTS)
        chaos.wait_nominal()
        reference = Reference(mesh)
        reference.learn([*SAY, *READ], STREAMS)
        bench = Bench(chaos, reference)
        yield bench
        print(f"\n{bench.table()}")


@pytest.mark.soak
@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_no_request_fails(bench: Bench, cell: Cell) -> None:
    role, number, phase = cell
    chaos, mesh = bench.chaos, bench.chaos.mesh
    victim = chaos.victim(role)
    ports = [mesh.port, mesh.port + 1]
    choices = READ if phase == "prefilling" else SAY
    clients = Clients(ports, choices, STREAMS, reference=bench.reference)
    if role == "gateway" and (number != "SIGTERM" or phase == "starting"):
        clients.excused = {mesh.port + int(victim[-1])}
    strike = Strike(chaos, victim, signal.Signals[number])
    if phase == "idle":
        strike.hit()
    with clients:
        if phase != "idle":
            busy = clients.waiting if phase == "prefilling" else clients.flowing
            mesh.wait_for(lambda: busy() >= STREAMS // 2, "the streams to be on their way")
            if phase == "rebalancing":
                mesh.wait_for(lambda: chaos.rebalance(bench.draw), "the planner to take an order")
            elif phase == "starting":
                first = Strike(chaos, victim, signal.SIGKILL)
                first.hit()
                chaos.restarted(victim, first.pid)
            strike.hit()
        bench.back_s[cell] = strike.end()
    bench.pauses_s[cell] = clients.pauses_s(strike.at)
    if clients.failures:
        raise AssertionError(f"{clients.failures[:4]}\n{mesh.logs()}") from clients.failures[0]
    assert len(clients.broken) <= STREAMS
    chaos.wait_idle()


class Strike:
    """One signal to one process."""

    def __init__(self, chaos: Chaos, victim: str, number: signal.Signals) -> None:
        self.chaos, self.victim, self.number = chaos, victim, number
        self.at = 0.0
        self.pid = 0

    def hit(self) -> None:
        self.at = time.monotonic()
        self.pid = self.chaos.signal(self.victim, self.number)
        assert self.pid, f"there is no {self.victim}"

    def end(self) -> float:
        """Until all is as before; how many seconds after the end of the fault."""
        if self.number == signal.SIGSTOP:
            time.sleep(STOP_S)  # that is the fault
            go_on(self.pid)
            return self.chaos.wait_nominal()
        began = time.monotonic()
        self.chaos.restarted(self.victim, self.pid)
        self.chaos.wait_nominal()
        return time.monotonic() - began
