"""The planner's core under lost, late, repeated and reordered messages, deaths and reconnects."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mesh.messages import (
    AdminRefused,
    AssignSlots,
    GetLoad,
    GetPlan,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    LoadReport,
    Pin,
    Placement,
    PlanDetail,
    Propose,
    Rebalance,
    Record,
    RecordDetail,
    Recorded,
    RecordLoad,
    Refused,
    SetMode,
    SlotFault,
    SlotsReady,
    ToPlanner,
    View,
)
from planner_svc.coordinator import SETTLE_S, Coordinator
from planner_svc.decide import Orders
from planner_svc.effects import Effect, Keep, KeepOrders, Publish, Send, Think
from planner_svc.moves import ModelShape
from planner_svc.worth import Question, think
from tests.support.planner import DIGEST, coordinator, policy

IDS = st.sampled_from(["expert-0", "expert-1", "expert-2", "router-0"])
PAIR = ("expert-0", "expert-1")
ADMIN = st.one_of(
    st.sampled_from([GetLoad(), GetPlan(), Rebalance(), Rebalance(force=True)]),
    st.sampled_from(["off", "advise", "auto"]).map(lambda mode: SetMode(mode=mode)),
    st.sampled_from(["start", "stop", "dump"]).map(lambda action: RecordLoad(action=action)),
    st.builds(
        Pin, layer=st.just(0), expert=st.integers(0, 4),
        ranks=st.sampled_from([(), ("expert-0",), PAIR]),
    ),
    st.builds(
        Propose, ranks=st.permutations(PAIR).map(tuple), slots_per_rank=st.just((2, 3)),
        physical_to_logical=st.permutations([-1, 0, 1, 2, 3]).map(lambda row: (tuple(row),)),
    ),
    st.just(Propose(ranks=("nobody",), slots_per_rank=(4,), physical_to_logical=((0, 1, 2, 3),))),
)  # fmt: skip


@dataclass
class Process:
    id: str
    incarnation: int
    connection: int = 0
    refused: bool = False
    command: AssignSlots | None = None
    record: Record | None = None
    view: View | None = None

    @property
    def epoch(self) -> int:
        placement = None if self.view is None else self.view.placement
        return 0 if placement is None else placement.epoch

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
            model_digest=DIGEST,
            bundles=f"ipc:///{self.id}" if self.id.startswith("expert") else "",
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
        self.orders: Orders | None = None
        self.quiet_until = 0.0
        """The planner knows that the mesh is older than itself and may publish nothing."""
        self.planner = self.start()

    def start(self) -> Coordinator:
        self.starts += 1
        self.question: Question | None = None
        return coordinator(
            ModelShape((0,), 4),
            first=self.starts * 100_000,
            started=self.now,
            stored=self.kept,
            orders=self.orders,
            redundant_slots=1,
            first_placement_wait_s=10.0,
            interval_s=2.0,
            min_window_tokens=4,
            min_gain=0.0,
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
                case KeepOrders(orders=orders):
                    self.orders = orders
                case Think(question=question):
                    assert self.question is None, "one plan at a time"
                    self.question = question
                case Send(peer=peer, message=message):
                    for process in [*self.processes.values(), *self.zombies]:
                        if process.peer != peer:
                            continue
                        match message:
                            case AssignSlots():
                                process.command = message
                            case View():
                                process.view = message
                            case Record():
                                process.record = message
                            case Refused():
                                process.refused = True

    def send(self, process: Process, message: ToPlanner, *, late: bool) -> None:
        if late:
            self.in_flight.append((process.peer, message))
        else:
            self.carry_out(self.planner.received(process.peer, message, self.now))

    @initialize(workers=st.integers(0, 3))
    def a_mesh_may_be_there(self, workers: int) -> None:
        for id_ in ["router-0", "expert-0", "expert-1", "expert-2"][: workers and workers + 1]:
            self.start_process(id_)
        self.all_goes_well(8, (900, 10, 900, 10))

    @rule(rounds=st.integers(1, 20), counts=st.tuples(*[st.integers(0, 1_000)] * 4))
    def all_goes_well(self, rounds: int, counts: tuple[int, ...]) -> None:
        router = self.processes.get("router-0")
        if router is not None:
            who = {"id": router.id, "incarnation": router.incarnation}
            report = LoadReport(**who, counts=(counts,), tokens=sum(counts))
            self.send(router, report, late=False)
        for _ in range(rounds):
            self.workers_do_as_they_are_told()
            self.all_report_their_state()
            self.a_plan_is_made()
            self.now += 0.5
            self.carry_out(self.planner.tick(self.now))

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
            Heartbeat(**who, state=state, load=Load(epoch=process.epoch), view_version=7),
            LoadReport(**who, counts=((40, 2, 3, 4),), tokens=9),
            Goodbye(**who),
        ]
        if process.record is not None:
            messages.append(Recorded(**who, command=process.record.command, recording=True))
        if process.command is not None:
            messages.append(
                SlotsReady(
                    **who,
                    command=process.command.command,
                    epoch=process.command.epoch,
                    error=data.draw(st.sampled_from(["", "", "no memory"])),
                    faults=data.draw(st.sampled_from([(), (SlotFault(0, 0, 0, "checksum"),)])),
                    loaded=1,
                    seconds=0.1,
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

    @rule()
    def all_report_their_state(self) -> None:
        for process in self.processes.values():
            who = {"id": process.id, "incarnation": process.incarnation}
            load = Load(epoch=process.epoch, pairs=5_000, ffn_ns=10**9)
            self.send(process, Heartbeat(**who, state="ready", load=load), late=False)

    @rule()
    def a_plan_is_made(self) -> None:
        if self.question is not None:
            thought, self.question = think(policy(), self.question), None
            self.carry_out(self.planner.thought(thought, 0.01, self.now))

    @rule(message=ADMIN)
    def an_administrator_asks(self, message: ToPlanner) -> None:
        effects = self.planner.received(b"admin", message, self.now)
        self.carry_out(effects)
        answers = [e.message for e in effects if isinstance(e, Send) and e.peer == b"admin"]
        if isinstance(message, Rebalance | RecordLoad):
            assert all(isinstance(a, AdminRefused | PlanDetail | RecordDetail) for a in answers)
        else:
            assert len(answers) == 1

    @rule(id_=IDS, back=st.booleans())
    def connection_closes(self, id_: str, *, back: bool) -> None:
        process = self.processes.get(id_)
        if process is None:
            return
        self.carry_out(self.planner.closed(process.peer, self.now))
        process.connection += 1
        if back:
            self.send(process, process.hello(), late=False)

    @rule(ticks=st.integers(1, 30))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now += self.planner.tick_s
            self.carry_out(self.planner.tick(self.now))

    @rule(file_lost=st.booleans())
    def planner_restarts(self, *, file_lost: bool) -> None:
        self.newest_epoch = 0  # nobody may have been told of the newest placement
        if file_lost:
            self.kept = None
        self.orders = self.orders or Orders()
        self.quiet_until = self.now + SETTLE_S
        self.planner = self.start()
        for process in self.processes.values():
            process.connection += 1
            if not process.refused:
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
    max_examples=40, stateful_step_count=30, deadline=None
)
TestCoordinator = CoordinatorMachine.TestCase
