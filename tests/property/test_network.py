"""A planner and its members over a network that drops, delays, repeats, reorders and cuts off.

Members here say and believe what ``mesh.member`` makes real ones say and believe; processes die,
hang and are started again, and so is the planner. Nothing here is random but by the seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mesh.membership import FINAL
from mesh.messages import (
    AssignSlots,
    FromPlanner,
    GetView,
    Heartbeat,
    Hello,
    Load,
    MemberState,
    Placement,
    Propose,
    Refused,
    SlotsReady,
    ToPlanner,
    Unknown,
    View,
    Welcome,
)
from mesh.placement import EMPTY, local_slots
from planner_svc.coordinator import Coordinator
from planner_svc.decide import Orders
from planner_svc.effects import Effect, Keep, Publish, Send
from planner_svc.moves import ModelShape
from tests.support.network import Network
from tests.support.planner import DIGEST, coordinator
from tests.support.workers import EXPERTS, LAYERS, Worker

WORKERS = ("expert-0", "expert-1", "expert-2")
ROUTERS = ("router-0", "router-1")
BEAT_S = 0.5
TICK_S = 0.2
TROUBLE_S = 25.0
CALM_S = 120.0
"""How long everything may take to be well again once nothing fails any more."""
BLIND_S = 8.0
"""A planner that has been up for so long knows who is there, and that the dead are dead."""


@dataclass(eq=False)
class Process:
    """A member's process, and its end of the talk with the planner."""

    id: str
    incarnation: int
    worker: Worker | None
    connection: int = 0
    """Of how many it has had; 0 while there is none."""
    welcomed: bool = False
    welcomed_anew: bool = False
    view: View | None = None
    hung: bool = False
    ended: bool = False

    @property
    def peer(self) -> bytes:
        return f"{self.id}/{self.incarnation}/{self.connection}".encode()

    @property
    def state(self) -> MemberState:
        if self.worker is not None:
            return "ready" if self.worker.ready else "loading"
        return "ready" if self.epoch else "loading"

    @property
    def epoch(self) -> int:
        return 0 if self.view is None or self.view.placement is None else self.view.placement.epoch

    def hello(self) -> Hello:
        return Hello(
            id=self.id,
            role="router" if self.worker is None else "expert",
            incarnation=self.incarnation,
            pid=1,
            host="h",
            model_digest=DIGEST,
            bundles="" if self.worker is None else f"ipc:///{self.id}",
            placement=None if self.view is None else self.view.placement,
        )

    def beat(self) -> Heartbeat:
        return Heartbeat(
            id=self.id,
            incarnation=self.incarnation,
            state=self.state,
            load=Load(epoch=self.epoch),
            view_version=0 if self.view is None else self.view.version,
        )


class World:
    """The mesh, and what happens to it. Every decision of the planner is checked."""

    def __init__(self, seed: int) -> None:
        self.net = Network(seed)
        self.draw = self.net.draw
        self.calm = False
        self.processes: dict[str, Process] = {}
        self.ended_at: dict[str, float] = {}
        self.kept: Placement | None = None
        self.newest_epoch = self.newest_version = 0
        self.fenced: dict[str, int] = {}
        self.starts = 0
        self.planner: Coordinator | None = None
        self.start_planner()
        for id_ in (*WORKERS, *ROUTERS):
            self.start(id_, 1)
        self.tick()

    # ---------------------------------------------------------------- the planner

    def start_planner(self) -> None:
        self.starts += 1
        self.fenced.clear()
        self.started_at = self.net.now
        self.planner = coordinator(
            ModelShape(LAYERS, EXPERTS),
            first=self.starts * 1_000_000,
            experts=len(WORKERS),
            started=self.net.now,
            stored=self.kept,
            orders=None if self.starts == 1 else Orders(),
            redundant_slots=self.draw.randrange(3) if self.starts == 1 else 1,
            first_placement_wait_s=5.0,
            phase_timeout_s=5.0,
        )
        for process in self.processes.values():
            self.connect(process)

    def kill_planner(self) -> None:
        if self.planner is None:
            return
        self.planner = None
        for process in self.processes.values():
            process.connection, process.welcomed = -abs(process.connection), False
        self.net.at(self.net.now + self.draw.uniform(0.5, 3.0), self.start_planner)

    def tick(self) -> None:
        if self.planner is not None:
            self.carry_out(self.planner.tick(self.net.now))
        self.net.at(self.net.now + TICK_S, self.tick)

    def hear(self, peer: bytes, message: ToPlanner, start: int) -> None:
        if self.planner is not None and start == self.starts:
            self.carry_out(self.planner.received(peer, message, self.net.now))

    def carry_out(self, effects: list[Effect]) -> None:
        planner = self.planner
        assert planner is not None
        planner.check()
        for effect in effects:
            match effect:
                case Keep(placement=placement):
                    assert placement.epoch >= self.newest_epoch, "an epoch went backwards"
                    self.newest_epoch = placement.epoch
                    self.kept = placement
                case Publish(view=view):
                    self.check_view(view)
                    for process in self.processes.values():
                        self.to_member(process, view, broadcast=True)
                case Send(peer=peer, message=message):
                    if isinstance(message, View):
                        self.check_view(message)
                    for process in self.processes.values():
                        if process.peer == peer:
                            self.check_command(process, message)
                            self.to_member(process, message)
        self.check_promises(planner)

    def check_view(self, view: View) -> None:
        assert view.version >= self.newest_version, "views are numbered upwards"
        self.newest_version = view.version
        if view.placement is not None:
            assert view.placement.epoch >= self.newest_epoch, "an epoch went backwards"
        for member in view.members:
            fence = self.fenced.get(member.id, -1)
            if member.state in FINAL:
                self.fenced[member.id] = max(fence, member.incarnation)
            else:
                assert member.incarnation > fence, "the dead do not come back"

    def check_command(self, process: Process, message: FromPlanner) -> None:
        if isinstance(message, AssignSlots):
            assert process.incarnation > self.fenced.get(process.id, -1), "the dead get no orders"

    def check_promises(self, planner: Coordinator) -> None:
        """Unless experts are being repaired, each has a copy where the placement says, or the
        planner has not had the time to learn that it has gone.
        """
        placement, rollout = planner._rollout.committed, planner._rollout
        if placement is None or rollout.why in {"first", "repair"}:
            return
        held = rollout._held
        for index in range(len(LAYERS)):
            served = set()
            for rank in placement.ranks:
                row = local_slots(placement, rank)[index]
                worker = self.processes[rank].worker if rank in self.processes else None
                assert rank not in self.processes or worker is not None
                state = held.ranks.get(rank)
                in_doubt = (
                    state is None
                    or not state.answered
                    or self.net.now - max(self.ended_at.get(rank, -99), self.started_at) < BLIND_S
                )
                for slot, expert in enumerate(row):
                    there = worker is not None and worker.slots[index][slot : slot + 1] == [expert]
                    if expert != EMPTY and (there or in_doubt):
                        served.add(expert)
            assert served == set(range(EXPERTS)), "an expert is promised that nobody holds"

    # ---------------------------------------------------------------- members

    def start(self, id_: str, incarnation: int) -> None:
        worker = Worker(incarnation, 0) if id_ in WORKERS else None
        process = self.processes[id_] = Process(id_, incarnation, worker)
        self.connect(process)
        self.beat(process)
        if worker is not None:
            self.work(process)

    def connect(self, process: Process) -> None:
        """A connection is made when the planner can be reached, or a while later."""
        if process.ended or process.connection > 0:
            return
        if self.planner is not None and process.id not in self.net.cut_off:
            process.connection = abs(process.connection) + 1
            process.welcomed = False
            self.say(process, process.hello())
        else:
            self.net.at(self.net.now + 0.5, lambda: self.connect(process))

    def end(self, process: Process) -> None:
        """It is gone; the launcher starts another one."""
        if process.ended:
            return
        process.ended = True
        self.ended_at[process.id] = self.net.now
        self.disconnect(process, ended=self.draw.random() < 0.5)
        del self.processes[process.id]
        again = self.net.now + self.draw.uniform(0.5, 4.0)
        self.net.at(again, lambda: self.start(process.id, process.incarnation + 1))

    def disconnect(self, process: Process, *, ended: bool = False) -> None:
        peer, start = process.peer, self.starts
        if process.connection <= 0:
            return
        process.connection, process.welcomed = -process.connection, False

        def close() -> None:
            if self.planner is not None and self.starts == start:
                self.carry_out(self.planner.closed(peer, self.net.now, ended=ended))

        # A host that is cut off cannot say that a connection has ended.
        if process.id not in self.net.cut_off:
            self.net.at(self.net.now + 0.02, close)

    def say(self, process: Process, message: ToPlanner) -> None:
        if process.connection > 0:
            peer, start = process.peer, self.starts
            self.net.send(process.id, lambda: self.hear(peer, message, start))

    def beat(self, process: Process) -> None:
        if process.ended:
            return
        if not process.hung:
            self.say(process, process.beat() if process.welcomed else process.hello())
        self.net.at(self.net.now + BEAT_S, lambda: self.beat(process))

    def work(self, process: Process) -> None:
        """Load an expert or two, and say so when all are there."""
        worker = process.worker
        if process.ended or worker is None:
            return
        if worker.command is not None and not process.hung:
            command = worker.command
            lacking = worker.lacking()
            for layer, slot, expert in lacking[: self.draw.randrange(1, 4)]:
                worker.slots[layer][slot] = expert
            if not worker.lacking() and worker.acknowledged_since != command.command:
                worker.ready, worker.acknowledged_since = True, command.command
                self.acknowledge(process, command)
        self.net.at(self.net.now + 0.2, lambda: self.work(process))

    def acknowledge(self, process: Process, command: AssignSlots) -> None:
        done = SlotsReady(
            id=process.id,
            incarnation=process.incarnation,
            command=command.command,
            epoch=command.epoch,
            loaded=1,
        )
        self.say(process, done)

    def to_member(self, process: Process, message: FromPlanner, *, broadcast: bool = False) -> None:
        connection = process.connection

        def deliver() -> None:
            if process.hung:  # it lies in the socket until the process goes on
                self.net.at(self.net.now + 0.1, deliver)
            elif not process.ended and (broadcast or process.connection == connection):
                self.take(process, message, broadcast=broadcast)

        ordered = (process.peer, "command") if isinstance(message, AssignSlots) else None
        self.net.send(process.id, deliver, in_order=ordered)

    def take(self, process: Process, message: FromPlanner, *, broadcast: bool) -> None:
        match message:
            case View():
                known = process.view
                newer = known is None or message.version > known.version
                anew = known is None or message.members[0] != known.members[0]
                if newer or (anew and process.welcomed_anew and not broadcast):
                    assert message.placement is None or message.placement.epoch >= process.epoch
                    process.view = message
                if not broadcast:
                    process.welcomed_anew = False
            case Welcome():
                process.welcomed = process.welcomed_anew = True
                self.say(process, GetView())
                self.say(process, process.beat())
            case Unknown():
                process.welcomed = False
            case Refused(retry=False):
                self.end(process)
            case AssignSlots() if process.worker is not None:
                worker = process.worker
                again = worker.command == message and worker.acknowledged_since == message.command
                worker.take(message)
                if again:
                    self.acknowledge(process, message)

    # ---------------------------------------------------------------- trouble

    def trouble(self) -> None:
        if self.calm:
            return
        draw, net = self.draw, self.net
        victim = self.processes.get(draw.choice((*WORKERS, *WORKERS, *ROUTERS)))
        match draw.choice(("kill", "hang", "cut", "cut", "close", "planner", "order", "order")):
            case "kill" if victim is not None:
                self.end(victim)
            case "hang" if victim is not None:
                victim.hung = True
                net.at(net.now + draw.uniform(0.5, 10.0), lambda: self.wake(victim))
            case "cut":
                names = set(draw.sample((*WORKERS, *ROUTERS), draw.randrange(1, 4)))
                net.cut_off |= names
                net.at(
                    net.now + draw.uniform(0.5, 10.0), lambda: net.cut_off.difference_update(names)
                )
            case "close" if victim is not None:
                self.disconnect(victim)
                self.connect(victim)
            case "planner":
                self.kill_planner()
            case "order" if self.planner is not None:
                self.carry_out(self.planner.received(b"admin", self.order(), net.now))
        net.at(net.now + draw.uniform(0.2, 4.0), self.trouble)

    def wake(self, process: Process) -> None:
        process.hung = False

    def order(self) -> Propose:
        """A placement at random."""
        rows = []
        for _ in LAYERS:
            row = [*range(EXPERTS), self.draw.randrange(EXPERTS)]
            self.draw.shuffle(row)
            rows.append(tuple(row))
        slots = (2,) * len(WORKERS)
        return Propose(ranks=WORKERS, slots_per_rank=slots, physical_to_logical=tuple(rows))

    def heal(self) -> None:
        self.calm = True
        self.net.bad_weather = False
        self.net.cut_off.clear()
        for process in self.processes.values():
            process.hung = False

    def lacking(self) -> str:
        """What is not well, in words."""
        planner = self.planner
        if planner is None or len(self.processes) < len(WORKERS + ROUTERS):
            return "not everyone has been started again"
        view, rollout = planner.view, planner._rollout
        alive = {m.id: m for m in view.members if m.state not in FINAL and m.role != "planner"}
        if alive.keys() != {*WORKERS, *ROUTERS}:
            return f"the view shows {sorted(alive)}"
        for id_, process in self.processes.items():
            if (alive[id_].incarnation, alive[id_].state) != (process.incarnation, "ready"):
                return f"the view shows {alive[id_]}"
            if process.view is None or process.view.version != view.version:
                return f"{id_} has an old view"
        if rollout.why or not rollout.idle() or planner.status(self.net.now).alarms:
            return f"moving: {rollout.why} {rollout.phase} {rollout.alarms}"
        assert view.placement is not None
        for rank in WORKERS:
            worker = self.processes[rank].worker
            assert worker is not None
            if rank not in view.placement.ranks:
                return f"{rank} has no share"
            if worker.slots != [list(row) for row in local_slots(view.placement, rank)]:
                return f"{rank} holds {worker.slots}"
        return ""


def live_through(seed: int) -> World:
    world = World(seed)
    world.net.at(world.draw.uniform(1.0, 6.0), world.trouble)
    world.net.run(TROUBLE_S)
    world.heal()
    until = world.net.now + CALM_S
    while lacking := world.lacking():
        assert world.net.now < until, lacking
        world.net.run(world.net.now + 1.0)
    return world


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_a_mesh_is_well_again_after_any_trouble(first: int) -> None:
    for seed in range(first, first + 30):
        try:
            live_through(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.soak
def test_a_mesh_is_well_again_after_thousands_of_troubles() -> None:
    for seed in range(1_000, 6_000):
        try:
            live_through(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
