"""The roll-out under any order of joins, deaths, lost and late acknowledgements and restarts."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mesh.messages import AssignSlots, Placement
from mesh.placement import local_slots
from planner_svc.rollout import Assign, Commit, ModelShape, Rollout

RANKS = st.sampled_from(["e0", "e1", "e2", "e3"])
SHAPE = ModelShape(moe_layers=(0, 1), num_experts=5)


class RolloutMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.starts = 0
        self.stored: Placement | None = None
        self.sent: list[tuple[str, AssignSlots]] = []
        self.present: set[str] = set()
        self.held: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()
        """Every (rank, slots) that was ever acknowledged."""
        self.highest_epoch = 0
        self.state = self.start()

    def start(self) -> Rollout:
        self.starts += 1
        return Rollout(
            shape=SHAPE,
            redundant_slots=2,
            wanted_ranks=2,
            patience_s=30.0,
            stored=self.stored,
            first_command=self.starts * 1_000_000,
        )

    def carry_out(self) -> None:
        for effect in self.state.due(self.now):
            match effect:
                case Assign(rank=rank, command=command):
                    self.sent.append((rank, command))
                case Commit(placement):
                    assert placement.epoch >= self.highest_epoch
                    self.highest_epoch = placement.epoch
                    self.stored = placement
        self.state.check()

    @rule(rank=RANKS, offered=st.sampled_from([0, 2, 3, 9]))
    def join(self, rank: str, offered: int) -> None:
        self.present.add(rank)
        self.state.joined(rank, offered, self.now)
        self.carry_out()

    @rule(rank=RANKS)
    def die(self, rank: str) -> None:
        self.present.discard(rank)
        self.state.gone(rank, self.now)
        self.carry_out()

    @rule(data=st.data(), error=st.sampled_from(["", "", "no memory"]))
    def acknowledge_any_command_ever_sent(self, data: st.DataObject, error: str) -> None:
        if not self.sent:
            return
        rank, command = data.draw(st.sampled_from(self.sent))
        if not error:
            self.held.add((rank, command.slots))
        self.state.acknowledged(rank, command.command, error, self.now)
        self.carry_out()

    @rule(seconds=st.sampled_from([0.5, 2.0, 11.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out()

    @rule(tell=st.booleans())
    def planner_restarts(self, *, tell: bool) -> None:
        known = self.state.committed
        self.state = self.start()
        for rank in self.present:
            self.state.joined(rank, 0, self.now)
        if tell and known is not None:
            self.state.learned(known)
        self.carry_out()

    @invariant()
    def nothing_is_committed_before_a_rank_held_it(self) -> None:
        placement = self.state.committed
        if placement is None:
            return
        for rank in placement.ranks:
            assert (rank, local_slots(placement, rank)) in self.held


RolloutMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRollout = RolloutMachine.TestCase
