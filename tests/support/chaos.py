"""Faults in the processes of a real mesh, what "back to nominal" means, and what may not leak.

``Chaos(mesh)`` sends signals to members by their id, looks at the mesh through the planner, and at
its processes through ``/proc``.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import random
import signal
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from mesh.admin import PlannerAway, PlannerDesk, PlannerRefused
from mesh.links import Net
from mesh.membership import FINAL
from mesh.messages import GetStatus, Member, Placement, PlanDetail, Propose, Status
from mesh.placement import EMPTY
from tests.support.meshes import Mesh

T = TypeVar("T")

STOP_S = 10.0
"""How long a stopped process stands still."""
BACK_S = 15.0
"""After a fault everything is to be as before within this. It is not asserted: two busy cores may
need that long to start a few processes."""
BACK_DEADLINE_S = 90.0
_LOOK_S = 0.1
GROWTH = 1.05
"""Of a process's memory, that is taken for settling and not for a leak."""
_LANE = "memfd:moemesh"


@dataclass(frozen=True)
class Counts:
    """How many processes of each role there are to be, the planner aside."""

    expert: int
    router: int
    gateway: int

    def ids(self) -> set[str]:
        return {"planner"} | {
            f"{role}-{index}" for role, count in asdict(self).items() for index in range(count)
        }


class Chaos:
    """Faults in ``mesh``, which is to have ``counts`` processes."""

    def __init__(self, mesh: Mesh, counts: Counts) -> None:
        self.mesh = mesh
        self.counts = counts
        self._deaths: defaultdict[str, list[float]] = defaultdict(list)

    # ---------------------------------------------------------------- looking

    def ask(self, question: Any, want: type[T]) -> T | None:
        """The planner's answer; None while no planner answers, or when it refuses."""

        async def ask() -> T:
            net = Net()
            try:
                desk = PlannerDesk(net, f"ipc://{self.mesh.run_dir}/planner.sock")
                return await desk.ask(question, want, timeout_s=1.0)
            finally:
                net.close()

        try:
            return asyncio.run(ask())
        except (PlannerAway, PlannerRefused):
            return None

    def status(self) -> Status | None:
        return self.ask(GetStatus(), Status)

    def members(self) -> dict[str, Member]:
        status = self.status()
        return {} if status is None else {m.id: m for m in status.view.members}

    def lacking(self) -> str:
        """What is not as it is to be when nothing is wrong, in words; empty when all is."""
        status = self.status()
        if status is None:
            return "no planner answers"
        living = {m.id: m for m in status.view.members if m.state not in FINAL}
        if living.keys() != self.counts.ids():
            return f"members are {sorted(living)}"
        if unready := {m.id: m.state for m in living.values() if m.state != "ready"}:
            return f"not ready: {unready}"
        if other := [m.id for m in living.values() if m.pid != self.pid(m.id)]:
            return f"{other} were started again"
        if not status.ready or status.alarms:
            return f"not ready: {status.reason}, {status.alarms}"
        if status.phase or status.moving:
            return f"experts move: {status.moving} {status.phase}"
        placement = status.view.placement
        assert placement is not None
        experts = {id_ for id_ in living if id_.startswith("expert")}
        if set(_serving(placement)) != experts:
            return f"experts are on {sorted(_serving(placement))} only"
        routers = [m for m in living.values() if m.role == "router"]
        if any(m.load is None or m.load.epoch != placement.epoch for m in routers):
            return "a router has not switched to the placement in force"
        for index in range(self.counts.gateway):
            if (answer := self.ready(index)) != 200:
                return f"gateway-{index} answers {answer}"
        return ""

    def ready(self, gateway: int) -> int:
        """The status of its ``/ready``; 0 while it does not answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.mesh.port + gateway, timeout=2)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def wait_nominal(self, deadline_s: float = BACK_DEADLINE_S) -> float:
        """Until nothing is lacking; returns the seconds that took."""
        began = time.monotonic()
        while lacking := self.lacking():
            passed = time.monotonic() - began
            if passed > deadline_s:
                raise AssertionError(f"after {passed:.0f} s: {lacking}\n{self.mesh.logs()}")
            time.sleep(_LOOK_S)
        return time.monotonic() - began

    def wait_idle(self, deadline_s: float = 30.0) -> None:
        """Until no router holds anything of a request: sequences, KV blocks, lane slots."""
        end = time.monotonic() + deadline_s
        while True:
            members = self.members().values()
            loads = {m.id: m.load for m in members if m.role == "router" and m.state == "ready"}
            held = {
                id_: load
                for id_, load in loads.items()
                if load is None
                or load.running + load.waiting + load.lane_slots_in_use
                or load.kv_blocks_free != load.kv_blocks_total
            }
            if loads and not held:
                return
            assert time.monotonic() < end, f"routers without requests hold {held}"
            time.sleep(_LOOK_S)

    def holdings(self) -> Holdings:
        """What the mesh holds on this host; all its processes must run."""
        roles: dict[str, Footprint] = {}
        for id_ in self.counts.ids():
            role = id_.partition("-")[0]
            roles[role] = roles.get(role, Footprint()).with_process(self.pid(id_))
        assert self.mesh.process is not None
        children = psutil.Process(self.mesh.process.pid).children(recursive=True)
        names = frozenset(path.name for path in self.mesh.run_dir.iterdir())
        return Holdings(roles, len(children), names)

    def until_no_leaks(self, before: Holdings, deadline_s: float = 30.0) -> str:
        """What the mesh holds more than before, once that has settled; empty for nothing."""
        end = time.monotonic() + deadline_s
        while (found := leaks(before, self.holdings())) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return found

    # ---------------------------------------------------------------- faults

    def pid(self, id_: str) -> int:
        """0 while no process has the id."""
        try:
            text = (self.mesh.run_dir / f"{id_}.pid").read_text().strip()
        except FileNotFoundError:
            return 0
        pid = int(text or 0)
        return pid if _is_named(pid, id_) else 0

    def signal(self, id_: str, number: signal.Signals) -> int:
        """Send it to the member's process; returns its pid, 0 if there is none."""
        pid = self.pid(id_)
        if pid:
            self._deaths[id_].append(time.monotonic())
            os.kill(pid, number)
        return pid

    def victim(self, role: str) -> str:
        """The member of that role that has had least faults lately: the launcher waits ever longer
        before it starts one again that dies often.
        """
        ids = [id_ for id_ in self.counts.ids() if id_.startswith(role)]
        now = time.monotonic()
        return min(ids, key=lambda id_: (sum(now - at < 120 for at in self._deaths[id_]), id_))

    def restarted(self, id_: str, old: int) -> None:
        """Until a process that is not ``old`` has the id."""
        self.mesh.wait_for(
            lambda: self.pid(id_) not in {0, old}, f"{id_} to be started again", BACK_DEADLINE_S
        )

    def rebalance(self, draw: random.Random) -> bool:
        """Order a random placement; False when the planner refuses it now."""
        status = self.status()
        placement = None if status is None else status.view.placement
        if status is None or placement is None:
            return False
        ranks = [m.id for m in status.view.members if m.role == "expert" and m.state == "ready"]
        if not ranks:
            return False
        return self.ask(random_placement(placement, ranks, draw), PlanDetail) is not None


def go_on(pid: int) -> None:
    """Let a stopped process go on, if it still is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _serving(placement: Placement) -> list[str]:
    """Ranks that serve something."""
    found, first = [], 0
    for rank, count in zip(placement.ranks, placement.slots_per_rank, strict=True):
        last = first + count
        if any(e != EMPTY for row in placement.physical_to_logical for e in row[first:last]):
            found.append(rank)
        first = last
    return found


def random_placement(placement: Placement, ranks: list[str], draw: random.Random) -> Propose:
    """One that serves each expert, over all ``ranks``, with a copy or two more for some."""
    experts = placement.num_experts
    each = -(-experts // len(ranks))
    total = each * len(ranks)
    rows = []
    for _ in placement.moe_layers:
        row = [*range(experts), *(draw.randrange(experts) for _ in range(total - experts))]
        draw.shuffle(row)
        rows.append(tuple(row))
    return Propose(
        ranks=tuple(ranks), slots_per_rank=(each,) * len(ranks), physical_to_logical=tuple(rows)
    )


def _is_named(pid: int, id_: str) -> bool:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return id_.encode() in line


# ---------------------------------------------------------------- leaks


@dataclass(frozen=True)
class Footprint:
    """What the largest process of a role holds."""

    files: int = 0
    shared_bytes: int = 0
    resident_bytes: int = 0

    def with_process(self, pid: int) -> Footprint:
        """At least what this living process holds: open files, lanes, and memory of its own."""
        proc = Path(f"/proc/{pid}")
        size, resident, shared = map(int, (proc / "statm").read_text().split()[:3])
        assert size >= resident
        lanes = [line for line in (proc / "maps").read_text().splitlines() if _LANE in line]
        return Footprint(
            max(self.files, len(list((proc / "fd").iterdir()))),
            max(self.shared_bytes, sum(map(_mapped_bytes, lanes))),
            max(self.resident_bytes, (resident - shared) * os.sysconf("SC_PAGE_SIZE")),
        )


@dataclass(frozen=True)
class Holdings:
    """What a mesh holds on its host."""

    roles: dict[str, Footprint]
    processes: int
    files: frozenset[str]
    """In its run directory."""


def leaks(before: Holdings, after: Holdings) -> str:
    """What there is more of, in words; empty when there is nothing."""
    found = []
    for role, now in after.roles.items():
        then = before.roles[role]
        if now.files > then.files:
            found.append(f"{role}: {now.files} open files, {then.files} before")
        if now.shared_bytes > then.shared_bytes:
            found.append(f"{role}: {now.shared_bytes} bytes of lanes, {then.shared_bytes} before")
        if now.resident_bytes > GROWTH * then.resident_bytes:
            found.append(f"{role}: {now.resident_bytes} bytes, {then.resident_bytes} before")
    if after.processes != before.processes:
        found.append(f"{after.processes} processes, {before.processes} before")
    if after.files != before.files:
        found.append(f"files {sorted(after.files ^ before.files)} have come or gone")
    return "; ".join(found)


def _mapped_bytes(line: str) -> int:
    low, high = line.split(maxsplit=1)[0].split("-")
    return int(high, 16) - int(low, 16)
