"""The planner's core under lost, late, repeated and reordered messages, deaths and reconnects."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mesh.membership import Rules
from mesh.messages import (
    AssignSlots,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    LoadReport,
    Member,
    Placement,
    Refused,
    SlotsReady,
    ToPlanner,
    View,
)
from planner_svc.balance import LoadWindow
from planner_svc.coordinator import SETTLE_S, Coordinator, Effect, Identity, Keep, Publish, Send
from planner_svc.rollout import ModelShape, Rollout

IDS = st.sampled_from(["expert-0", "expert-1", "expert-2", "router-0"])


@dataclass
class Process:
    id: str
    incarnation: int
    connection: int = 0
    refused: bool = False
    command: AssignSlots | None = None
    view: View | None = None

    @property
    def peer(self) -> bytes:
        return f"{self.id}/{self.incarnation}/{self.connection}".encode()

    def hello(self) -> Hello:
        return Hello(
            id=self.id,
            role="expert" if self.id.startswith("expert") else "router",
            incarnation=self.incarnation,
            pid=1,
            host="h",
            model_digest="d",
            placement=None if self.view is None else self.view.placement,
        )


class CoordinatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.starts = 0
        self.processes: dict[str, Process] = {}
        self.zombies: list[Process] = []
        self.in_flight: list[tuple[bytes, ToPlanner]] = []
        self.newest_view = 0
        self.newest_epoch = 0
        self.kept: Placement | None = None
        self.quiet_until = 0.0
        """The planner knows that the mesh is older than itself and may publish nothing."""
        self.planner = self.start()

    def start(self) -> Coordinator:
        self.starts += 1
        me = Member(id="planner", role="planner", incarnation=1, pid=1, host="h", state="ready")
        first = self.starts * 100_000
        return Coordinator(
            Identity(mesh="m", model="d", me=me, broadcast="b", heartbeat_ms=500),
            Rules(model_digest="d", suspect_after_s=1.5, dead_after_s=5.0, tick_s=0.5),
            Rollout(
                shape=ModelShape((0,), 4),
                redundant_slots=1,
                wanted_ranks=2,
                patience_s=10.0,
                stored=self.kept,
                first_command=first,
            ),
            LoadWindow(1, 4),
            first_version=first,
            started=self.now,
        )

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Publish(view=view):
                    assert self.now >= self.quiet_until
                    assert view.version > self.newest_view
                    self.newest_view = view.version
                    for process in self.processes.values():
                        process.view = view
                case Keep(placement=placement):
                    assert placement.epoch >= self.newest_epoch
                    self.newest_epoch = placement.epoch
                    self.kept = placement
                case Send(peer=peer, message=message):
                    for process in [*self.processes.values(), *self.zombies]:
                        if process.peer != peer:
                            continue
                        match message:
                            case AssignSlots():
                                process.command = message
                            case View():
                                process.view = message
                            case Refused():
                                process.refused = True

    def send(self, process: Process, message: ToPlanner, *, late: bool) -> None:
        if late:
            self.in_flight.append((process.peer, message))
        else:
            self.carry_out(self.planner.received(process.peer, message, self.now))

    @rule(id_=IDS)
    def start_process(self, id_: str) -> None:
        old = self.processes.get(id_)
        if old is not None:
            self.zombies.append(old)
        incarnation = 1 if old is None else old.incarnation + 1
        new = self.processes[id_] = Process(id_, incarnation)
        self.send(new, new.hello(), late=False)

    @rule(data=st.data(), late=st.booleans())
    def speak(self, data: st.DataObject, *, late: bool) -> None:
        everyone = [*self.processes.values(), *self.zombies]
        if not everyone:
            return
        process = data.draw(st.sampled_from(everyone))
        state = data.draw(st.sampled_from(["joining", "loading", "ready", "draining"]))
        who = {"id": process.id, "incarnation": process.incarnation}
        messages: list[ToPlanner] = [
            process.hello(),
            Heartbeat(**who, state=state, load=Load(), view_version=7),
            LoadReport(**who, counts=((1, 2, 3, 4),), tokens=4),
            Goodbye(**who),
        ]
        if process.command is not None:
            messages.append(
                SlotsReady(
                    **who,
                    command=process.command.command,
                    epoch=process.command.epoch,
                    error=data.draw(st.sampled_from(["", "", "no memory"])),
                )
            )
        self.send(process, data.draw(st.sampled_from(messages)), late=late)

    @rule()
    def workers_do_as_they_are_told(self) -> None:
        for process in self.processes.values():
            if (command := process.command) is not None:
                done = SlotsReady(
                    id=process.id,
                    incarnation=process.incarnation,
                    command=command.command,
                    epoch=command.epoch,
                )
                self.send(process, done, late=False)

    @rule(data=st.data(), keep=st.booleans())
    def a_late_message_arrives(self, data: st.DataObject, *, keep: bool) -> None:
        if not self.in_flight:
            return
        index = data.draw(st.integers(0, len(self.in_flight) - 1))
        peer, message = self.in_flight[index]
        if not keep:
            del self.in_flight[index]
        self.carry_out(self.planner.received(peer, message, self.now))

    @rule(id_=IDS, back=st.booleans())
    def connection_closes(self, id_: str, *, back: bool) -> None:
        process = self.processes.get(id_)
        if process is None:
            return
        self.carry_out(self.planner.closed(process.peer, self.now))
        process.connection += 1
        if back:
            self.send(process, process.hello(), late=False)

    @rule(ticks=st.integers(1, 12))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now += 0.5
            self.carry_out(self.planner.tick(self.now))

    @rule(file_lost=st.booleans())
    def planner_restarts(self, *, file_lost: bool) -> None:
        self.newest_epoch = 0  # nobody may have been told of the newest placement
        if file_lost:
            self.kept = None
        self.quiet_until = self.now + SETTLE_S if self.kept is not None else 0.0
        self.planner = self.start()
        for process in self.processes.values():
            process.connection += 1
            if not process.refused:
                if process.hello().placement is not None:
                    self.quiet_until = self.now + SETTLE_S
                self.send(process, process.hello(), late=False)

    @invariant()
    def everything_holds(self) -> None:
        self.planner.check()
        status = self.planner.status(self.now)
        assert status.ready == (status.reason == "")
        if status.ready:
            assert status.epoch > 0
            members = {m.id: m for m in status.view.members}
            assert members["router-0"].state in {"ready", "draining"}
        for member in status.view.members:
            if member.id in self.processes and member.role != "planner":
                assert member.incarnation <= self.processes[member.id].incarnation


CoordinatorMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestCoordinator = CoordinatorMachine.TestCase
