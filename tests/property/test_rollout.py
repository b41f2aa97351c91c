"""The roll-out against workers and routers that die, restart, fail, and lose or repeat messages.

Workers here do what real ones do: they free what they are told to give up, load one expert after
another, keep what is in place, and acknowledge with what failed. Routers use the newest placement
that reached them. The planner restarts with what it wrote to disk and what members tell it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import msgspec
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from mesh.messages import AssignSlots, Placement, SlotFault, SlotsReady
from mesh.placement import EMPTY, local_slots, unserved
from planner_svc.moves import Assign, Commit, Done, Failed, ModelShape, RolloutRules, Target
from planner_svc.policies.problem import PlanError
from planner_svc.rollout import Rollout
from planner_svc.waves import layout_of, wants_of
from tests.support.workers import EXPERTS, LAYERS, Worker

SHAPE = ModelShape(moe_layers=LAYERS, num_experts=EXPERTS)
RANKS = ("e0", "e1", "e2", "e3")
ROUTERS = ("r0", "r1")
MOVE_SLOTS = 2
CALM_S = 300.0
"""How long everything may take to come to rest once nothing fails any more."""

Event = tuple[str, str, int, object]
"""(kind, member, its incarnation, content) on its way to the planner."""


@dataclass
class Router:
    incarnation: int
    placement: Placement | None = None

    @property
    def epoch(self) -> int:
        return 0 if self.placement is None else self.placement.epoch


class CalmMachine(RuleBasedStateMachine):
    """Messages are late, lost, repeated and out of order; workers join, are slow and drain; routers
    come and go; the planner is started again. No worker dies and no load fails.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.starts = 0
        self.numbers = itertools.count(1)
        self.stored: Placement | None = None
        self.workers: dict[str, Worker] = {}
        self.routers: dict[str, Router] = {}
        self.to_planner: list[Event] = []
        self.to_workers: list[tuple[str, int, AssignSlots]] = []
        self.broadcast: Placement | None = None
        self.heard_epoch = 0
        """The highest that the planner can know of."""
        self.history: list[Placement] = []
        self.asked: Target | None = None
        self.left_out: set[str] = set()
        """Ranks for which the last target had nothing."""
        self.rules = RolloutRules(1, 1, 2, 10.0, MOVE_SLOTS, 0, 5.0)
        self.planner = self.start()

    @initialize(
        spare=st.integers(0, 2),
        redundant=st.integers(0, 2),
        rate=st.sampled_from([0, 1, 1000]),
        present=st.lists(st.sampled_from([0, 0, 0, 2, 3, 4]), min_size=1, max_size=4),
        rounds=st.integers(0, 9),
    )
    def begin(self, spare: int, redundant: int, rate: int, present: list[int], rounds: int) -> None:
        self.rules = RolloutRules(
            redundant_slots=redundant,
            spare_slots=spare,
            wanted_ranks=2,
            patience_s=10.0,
            move_slots=MOVE_SLOTS,
            move_bytes_per_s=rate,
            phase_timeout_s=5.0,
        )
        self.planner = self.start()
        for name in ROUTERS[: rounds % 3]:
            self.start_router(name)
        for name, offered in zip(RANKS, present, strict=False):
            self.start_worker(name, offered)
        for _ in range(rounds):
            self.all_goes_well()

    def start(self) -> Rollout:
        self.starts += 1
        return Rollout(
            SHAPE,
            self.rules,
            stored=self.stored,
            first_command=self.starts * 1_000_000,
            again=self.starts > 2,  # the second one only brings other rules
        )

    # ---------------------------------------------------------------- the planner's side

    def carry_out(self) -> None:
        for effect in self.planner.due(self.now):
            match effect:
                case Assign(rank=rank, command=command, again=again):
                    if not again:
                        self.check_command(rank, command)
                    self.to_workers.append((rank, self.workers[rank].incarnation, command))
                case Commit(placement=placement):
                    # What was in force already may be taken up again by a new planner.
                    assert placement.epoch > self.heard_epoch or placement in self.history
                    self.heard_epoch = max(self.heard_epoch, placement.epoch)
                    self.history.append(placement)
                    self.stored = self.broadcast = placement
                case Failed(retry_in_s=None):
                    self.asked = None
                case Done():
                    assert self.asked is not None
                    committed = self.planner.committed
                    assert committed is not None
                    wants = wants_of(layout_of(committed))
                    target = msgspec.structs.replace(
                        committed,
                        ranks=self.asked.ranks,
                        slots_per_rank=self.asked.slots_per_rank,
                        physical_to_logical=self.asked.rows,
                    )
                    wanted = wants_of(layout_of(target))
                    assert wants == {r: rows for r, rows in wanted.items() if any(rows)}
                    self.left_out = {r for r, rows in wanted.items() if not any(rows)}
                    self.asked = None
        self.planner.check()

    def check_command(self, rank: str, command: AssignSlots) -> None:
        worker = self.workers[rank]
        assert all(len(row) == len(command.slots[0]) for row in command.slots)
        assert not worker.offered or len(command.slots[0]) <= worker.offered
        committed = self.planner.committed
        for source in command.sources:
            assert committed is not None
            expert = command.slots[LAYERS.index(source.layer)][source.slot]
            held = local_slots(committed, source.peer)[LAYERS.index(source.layer)]
            assert held[source.peer_slot] == expert
            assert source.peer != rank
            assert source.address == f"tcp://{source.peer}"

    def hear(self, event: Event) -> None:
        kind, name, incarnation, content = event
        member = self.workers.get(name) or self.routers.get(name)
        if member is None or member.incarnation != incarnation:
            return  # the planner fences the dead
        self.planner.heard(name)
        match kind:
            case "hello":
                if isinstance(content, Placement):
                    self.heard_epoch = max(self.heard_epoch, content.epoch)
                    self.planner.learned(content)
                if isinstance(member, Worker):
                    self.planner.joined(name, member.offered, f"tcp://{name}", self.now)
                    if member.draining:
                        self.planner.drain(name)
            case "ready":
                self.planner.ready(name, is_ready=True)
            case "draining":
                self.planner.drain(name)
            case "done":
                assert isinstance(content, SlotsReady)
                self.planner.acknowledged(content, self.now)
            case "epoch":
                assert isinstance(content, int)
                self.heard_epoch = max(self.heard_epoch, content)
                self.planner.saw_epoch(content)
                self.planner.router_at(name, content)
        self.carry_out()

    # ---------------------------------------------------------------- members come and go

    @rule(name=st.sampled_from(RANKS), offered=st.sampled_from([0, 0, 2, 3, 4, 9]))
    def start_worker(self, name: str, offered: int) -> None:
        if name not in self.workers:
            self.workers[name] = Worker(next(self.numbers), offered)
            self.say_hello(name)

    def kill(self, name: str) -> None:
        if self.workers.pop(name, None) is not None:
            self.planner.gone(name, self.now)

    @rule(name=st.sampled_from(ROUTERS))
    def start_router(self, name: str) -> None:
        self.planner.router_gone(name)
        self.routers[name] = Router(next(self.numbers))
        self.carry_out()

    @precondition(lambda self: self.routers)
    @rule(name=st.sampled_from(ROUTERS))
    def kill_router(self, name: str) -> None:
        self.planner.router_gone(name)
        self.routers.pop(name, None)
        self.carry_out()

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def drain_worker(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        self.workers[name].draining = True
        self.post(("draining", name, self.workers[name].incarnation, None))

    @rule(name=st.sampled_from(RANKS))
    def administrator_keeps_worker(self, name: str) -> None:
        if name in self.workers:
            self.workers[name].draining = False
            self.to_planner[:] = [e for e in self.to_planner if e[:2] != ("draining", name)]
            self.planner.stay(name)
            self.carry_out()

    @rule(file_lost=st.booleans())
    def planner_restarts(self, *, file_lost: bool) -> None:
        self.restart(file_lost=file_lost)
        for name in [*self.workers, *self.routers]:
            self.say_hello(name)

    def restart(self, *, file_lost: bool) -> None:
        if file_lost:
            self.stored = None
            self.heard_epoch = 0
        self.to_planner.clear()
        self.broadcast = self.asked = None
        self.planner = self.start()

    def say_hello(self, name: str) -> None:
        worker, router = self.workers.get(name), self.routers.get(name)
        if worker is not None:
            self.hear(("hello", name, worker.incarnation, worker.known))
        elif router is not None:
            self.hear(("hello", name, router.incarnation, router.placement))
            self.hear(("epoch", name, router.incarnation, router.epoch))

    # ---------------------------------------------------------------- messages

    def post(self, event: Event) -> None:
        self.to_planner.append(event)

    @precondition(lambda self: self.to_planner)
    @rule(data=st.data(), keep=st.booleans())
    def planner_hears(self, data: st.DataObject, *, keep: bool) -> None:
        at = data.draw(st.integers(0, len(self.to_planner) - 1))
        self.hear(self.to_planner[at] if keep else self.to_planner.pop(at))

    @precondition(lambda self: self.to_planner or self.to_workers)
    @rule(data=st.data())
    def messages_are_lost(self, data: st.DataObject) -> None:
        for queue in (self.to_planner, self.to_workers):
            if queue:
                queue.pop(data.draw(st.integers(0, len(queue) - 1)))

    @precondition(lambda self: self.to_workers)
    @rule(data=st.data(), keep=st.booleans())
    def worker_hears(self, data: st.DataObject, *, keep: bool) -> None:
        at = data.draw(st.integers(0, len(self.to_workers) - 1))
        name, incarnation, command = self.to_workers[at]
        if not keep:
            del self.to_workers[at]
        if name in self.workers and self.workers[name].incarnation == incarnation:
            self.workers[name].take(command)

    @rule(name=st.sampled_from(RANKS + ROUTERS))
    def says_hello_again(self, name: str) -> None:
        self.say_hello(name)

    # ---------------------------------------------------------------- members at work

    @precondition(lambda self: any(worker.command for worker in self.workers.values()))
    @rule(data=st.data(), loads=st.integers(0, 6))
    def worker_works(self, data: st.DataObject, loads: int) -> None:
        busy = sorted(name for name, worker in self.workers.items() if worker.command)
        self.work(data.draw(st.sampled_from(busy)), loads, "well")

    def work(self, name: str, loads: int, fate: str) -> None:
        worker = self.workers[name]
        command = worker.command
        assert command is not None
        who = {"id": name, "incarnation": worker.incarnation}
        lacking = worker.lacking()
        if fate == "refusal" and lacking:
            worker.refused = True
            done = SlotsReady(
                **who, command=command.command, epoch=command.epoch, error="out of memory"
            )
            self.post(("done", name, worker.incarnation, done))
            return
        for layer, slot, expert in lacking[:loads]:
            if fate == "fault":
                worker.failed[layer, slot] = expert
                fate = "well"
            else:
                worker.slots[layer][slot] = expert
        if not worker.lacking():
            worker.ready = True
            faults = tuple(
                SlotFault(LAYERS[layer], slot, expert, "checksum")
                for (layer, slot), expert in worker.failed.items()
            )
            done = SlotsReady(
                **who,
                command=command.command,
                epoch=command.epoch,
                faults=faults,
                loaded=len(lacking),
            )
            self.post(("done", name, worker.incarnation, done))
            self.post(("ready", name, worker.incarnation, None))

    @rule(name=st.sampled_from(RANKS + ROUTERS))
    def view_arrives(self, name: str) -> None:
        self.give_view(name)

    def give_view(self, name: str) -> None:
        worker, router = self.workers.get(name), self.routers.get(name)
        if self.broadcast is None:
            return
        if worker is not None:
            worker.known = self.broadcast
        elif router is not None:
            first = router.placement is None
            router.placement = self.broadcast
            report = ("epoch", name, router.incarnation, router.epoch)
            # Were its first report late, the planner could not know that it uses slots at all; the
            # check of slots alone is there for that.
            (self.hear if first else self.post)(report)

    @rule(seconds=st.sampled_from([0.5, 0.5, 2.0, 6.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out()

    @precondition(lambda self: self.planner.committed is not None)
    @rule(data=st.data())
    def somebody_asks_for_a_target(self, data: st.DataObject) -> None:
        ranks, slots = self.planner.serving_slots()
        assume(ranks)
        rows = []
        for _ in LAYERS:
            order = data.draw(st.permutations(range(EXPERTS)))
            total = sum(slots)
            extra = [
                data.draw(st.integers(-1, EXPERTS - 1)) for _ in range(max(0, total - EXPERTS))
            ]
            rows.append(tuple(data.draw(st.permutations([*order, *extra]))))
        target = Target(ranks, slots, tuple(rows), "rebalance")
        try:
            self.planner.move_to(target)
        except PlanError:
            pass
        else:
            self.asked = target
        self.carry_out()

    @rule()
    def somebody_stops_it(self) -> None:
        self.planner.abandon()
        self.asked = None
        self.carry_out()

    @rule(rounds=st.integers(1, 8))
    def nothing_happens_for_a_while(self, rounds: int) -> None:
        for _ in range(rounds):
            self.all_goes_well()

    @rule(
        rounds=st.integers(1, 5),
        slow=st.none() | st.sampled_from(RANKS),
        told=st.sampled_from([True, True, False]),
        heard=st.sampled_from([True, True, False]),
        seen=st.sets(st.sampled_from(ROUTERS)),
        seconds=st.sampled_from([0.0, 0.5, 1.0, 6.0]),
    )
    def some_lag_behind(
        self,
        rounds: int,
        slow: str | None,
        *,
        told: bool,
        heard: bool,
        seen: set[str],
        seconds: float,
    ) -> None:
        for _ in range(rounds):
            self.go_on({} if slow is None else {slow: "silence"}, told, heard, seen, seconds)

    def all_goes_well(self) -> None:
        for name, worker in self.workers.items():
            worker.failed.clear()
            self.planner.heard(name)
        self.go_on({}, True, True, {*self.routers, *self.workers}, 0.5)

    def go_on(
        self, fates: dict[str, str], told: bool, heard: bool, seen: set[str], seconds: float
    ) -> None:
        while heard and self.to_planner:
            self.hear(self.to_planner.pop(0))
        while told and self.to_workers:
            name, incarnation, command = self.to_workers.pop(0)
            if name in self.workers and self.workers[name].incarnation == incarnation:
                self.workers[name].take(command)
        for name, worker in self.workers.items():
            fate = fates.get(name, "well")
            if worker.command is not None and fate != "silence":
                self.work(name, 100, fate)
        for name in sorted(seen):
            self.give_view(name)
        self.now += seconds
        self.carry_out()

    # ---------------------------------------------------------------- what must always hold

    def check_promises(self) -> None:
        """Whichever placement a router uses, every slot that it names holds the expert."""
        for router in self.routers.values():
            if router.placement is not None:
                assert not unserved(router.placement, self.workers.keys())
                for rank in router.placement.ranks:
                    self.holds(rank, local_slots(router.placement, rank))

    @invariant()
    def nothing_is_believed_that_is_not_true(self) -> None:
        """What the planner thinks a worker holds, it holds; so whatever stands of the committed
        placement at a worker that has answered is there.
        """
        held = self.planner._held
        for rank, state in held.ranks.items():
            self.holds(rank, state.sure)
            if state.answered:
                self.holds(rank, held.kept().get(rank, ((), ())))

    def holds(self, rank: str, slots: tuple[tuple[int, ...], ...]) -> None:
        held = self.workers[rank].slots
        for layer, row in enumerate(slots):
            for slot, expert in enumerate(row):
                assert expert == EMPTY or held[layer][slot : slot + 1] == [expert], (
                    rank,
                    layer,
                    slot,
                )

    def teardown(self) -> None:
        """Once nothing fails any more, everything comes to rest where it was to go."""
        until, still = self.now + CALM_S, 0
        while self.now < until:
            for name in [*self.workers, *self.routers]:
                self.say_hello(name)
            self.all_goes_well()
            still = still + 1 if self.planner.idle() or self.planner.problem else 0
            if still > (4 if self.planner.idle() else 30):
                break
        self.check_rest()

    def check_rest(self) -> None:
        placement, planner = self.planner.committed, self.planner
        staying = {name: w for name, w in self.workers.items() if not w.draining}
        if placement is None or not self.workers or planner.problem:
            able = staying if placement is None else self.workers
            room = sum(min(EXPERTS, worker.offered or EXPERTS) for worker in able.values())
            assert room < EXPERTS, (planner.problem, planner.phase)
            assert planner.problem
            return
        assert planner.idle(), (planner.phase, planner.alarms)
        assert self.asked is None
        assert not unserved(placement, self.workers.keys())
        for name, worker in self.workers.items():
            slots = local_slots(placement, name) if name in placement.ranks else ((), ())
            assert worker.slots == [list(row) for row in slots]
        if not planner.alarms:
            assert set(placement.ranks) <= staying.keys()
            assert staying.keys() <= set(placement.ranks) | self.left_out


class PromisesMachine(CalmMachine):
    @rule(file_lost=st.booleans())
    def planner_restarts(self, *, file_lost: bool) -> None:
        """One that has lost its file knows what its members do. If the newest placement has reached
        none of them, slots may be free that the one before it names: workers say so to routers.
        """
        newest = max((placement.epoch for placement in self.history), default=0)
        known = [worker.known for worker in self.workers.values()]
        known += [router.placement for router in self.routers.values()]
        told = any(placement is not None and placement.epoch >= newest for placement in known)
        super().planner_restarts(file_lost=file_lost and (told or not newest))

    @invariant()
    def routers_find_what_they_were_promised(self) -> None:
        self.check_promises()


class FaultsMachine(CalmMachine):
    """Besides, workers die and start again or fall silent, loads fail; a new planner may be left
    alone. What is doubted is replaced in a hurry, like what is dead: a router may then find a slot
    empty that its placement names, and is told so.
    """

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def worker_falls_silent(self, data: st.DataObject) -> None:
        """Until the planner hears it again; what it says before may take its time."""
        self.planner.silent(data.draw(st.sampled_from(sorted(self.workers))))
        self.carry_out()

    @rule(name=st.sampled_from(RANKS), offered=st.sampled_from([0, 0, 2, 3, 4, 9]))
    def restart_worker(self, name: str, offered: int) -> None:
        self.kill(name)
        self.start_worker(name, offered)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def kill_worker(self, data: st.DataObject) -> None:
        self.kill(data.draw(st.sampled_from(sorted(self.workers))))
        self.carry_out()

    @rule(file_lost=st.booleans())
    def planner_restarts_unheard(self, *, file_lost: bool) -> None:
        self.restart(file_lost=file_lost)

    @precondition(lambda self: any(worker.command for worker in self.workers.values()))
    @rule(data=st.data(), loads=st.integers(0, 6), fate=st.sampled_from(["fault", "refusal"]))
    def worker_fails(self, data: st.DataObject, loads: int, fate: str) -> None:
        busy = sorted(name for name, worker in self.workers.items() if worker.command)
        self.work(data.draw(st.sampled_from(busy)), loads, fate)

    @rule(
        fates=st.lists(
            st.sampled_from(["well", "well", "fault", "refusal", "silence"]),
            min_size=len(RANKS),
            max_size=len(RANKS),
        ),
        seconds=st.sampled_from([0.0, 0.5, 1.0, 6.0]),
    )
    def much_goes_wrong(self, fates: list[str], seconds: float) -> None:
        self.go_on(dict(zip(RANKS, fates, strict=True)), True, True, set(RANKS), seconds)


PromisesMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestPromises = PromisesMachine.TestCase
FaultsMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestFaults = FaultsMachine.TestCase
