from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from mesh.messages import AssignSlots, Placement, SlotFault, SlotsReady
from mesh.placement import local_slots, unserved
from planner_svc.moves import (
    Assign,
    Commit,
    Done,
    Failed,
    ModelShape,
    Moved,
    Noted,
    RolloutEffect,
    RolloutRules,
    Target,
    fits,
)
from planner_svc.policies.problem import PlanError
from planner_svc.rank_state import RESEND_S
from planner_svc.rollout import ABSENT_S, MAX_TRIES, RETRY_S, SETTLE_S, Rollout
from planner_svc.urgent import RETRY_S as URGENT_RETRY_S

SHAPE = ModelShape(moe_layers=(1, 2), num_experts=4)
RULES = RolloutRules(
    redundant_slots=0,
    spare_slots=1,
    wanted_ranks=2,
    patience_s=60.0,
    move_slots=8,
    move_bytes_per_s=1000,
    phase_timeout_s=30.0,
)


@dataclass
class Mesh:
    """A roll-out and what came out of it; ranks answer when told to."""

    state: Rollout
    now: float = 0.0
    commands: dict[str, AssignSlots] = field(default_factory=dict)
    """Newest command of each rank."""
    effects: list[RolloutEffect] = field(default_factory=list)
    """Of the latest ``due``."""

    def due(self, seconds: float = 0.0) -> list[RolloutEffect]:
        self.now += seconds
        self.effects = self.state.due(self.now)
        self.state.check()
        for effect in self.effects:
            if isinstance(effect, Assign):
                self.commands[effect.rank] = effect.command
        return self.effects

    def join(self, *ranks: str, offered: int = 0) -> None:
        for rank in ranks:
            self.state.joined(rank, offered, f"at-{rank}", self.now)
            self.state.ready(rank, is_ready=True)
        self.due()

    def kill(self, rank: str) -> None:
        self.state.gone(rank, self.now)
        self.commands.pop(rank, None)
        self.due()

    def answer(self, *ranks: str, fail: tuple[int, ...] = (), error: str = "") -> None:
        """``fail``: experts that ranks cannot load."""
        for rank in ranks:
            command = self.commands[rank]
            faults = [
                SlotFault(layer, slot, expert, "checksum")
                for layer, row in zip(command.moe_layers, command.slots, strict=True)
                for slot, expert in enumerate(row)
                if expert in fail
            ]
            done = SlotsReady(
                id=rank,
                incarnation=1,
                command=command.command,
                epoch=command.epoch,
                error=error,
                faults=tuple(faults),
                loaded=1,
            )
            self.state.acknowledged(done, self.now)
        self.due()

    def settle(self) -> None:
        """Everybody does as told until nothing is left to do."""
        for _ in range(100):
            self.answer(*self.commands)
            if self.state.idle():
                return
        raise AssertionError(f"{self.state.phase} {self.state.alarms}")

    @property
    def assigned(self) -> set[str]:
        return {effect.rank for effect in self.effects if isinstance(effect, Assign)}

    @property
    def commits(self) -> list[Placement]:
        return [effect.placement for effect in self.effects if isinstance(effect, Commit)]

    @property
    def placement(self) -> Placement:
        assert self.state.committed is not None
        return self.state.committed

    def row(self, rank: str, layer: int = 0) -> tuple[int, ...]:
        return local_slots(self.placement, rank)[layer]


def mesh(stored: Placement | None = None, first_command: int = 100, **rules: Any) -> Mesh:
    changed = RolloutRules(**{name: getattr(RULES, name) for name in RULES.__slots__} | rules)
    return Mesh(Rollout(SHAPE, changed, stored=stored, first_command=first_command))


def placed(*ranks: str, **rules: Any) -> Mesh:
    """A mesh whose ranks have loaded the first placement: experts 0 and 2 on the first of two."""
    made = mesh(wanted_ranks=len(ranks), **rules)
    made.join(*ranks)
    made.settle()
    return made


def target(ranks: tuple[str, ...], *rows: tuple[int, ...]) -> Target:
    return Target(ranks, (len(rows[0]) // len(ranks),) * len(ranks), rows, "rebalance")


SWAP = target(("e0", "e1"), (0, 1, 2, 3), (0, 2, 1, 3))
"""Experts 1 and 2 of the first layer change places."""


# ---------------------------------------------------------------- the first placement


def test_waits_for_all_wanted_ranks_then_commits_after_every_acknowledgement() -> None:
    made = mesh()
    made.join("e0")
    assert made.effects == []
    assert "1 of 2" in made.state.problem
    made.join("e1")
    assert made.assigned == {"e0", "e1"}
    assert made.commands["e0"].slots == ((0, 2, -1), (0, 2, -1))
    made.answer("e0")
    assert made.commits == []
    assert (made.state.moved, made.state.to_move) == (4, 8)
    made.answer("e1")
    assert made.commits == [made.placement]
    assert made.placement.epoch == 1
    assert made.placement.physical_to_logical == ((0, 2, -1, 1, 3, -1),) * 2
    assert made.due(5.0) == []
    assert made.state.idle()


def test_patience_ends_and_those_present_share_the_model() -> None:
    made = mesh()
    made.now = 10.0
    made.join("e0")
    assert made.due(59.9) == []
    made.due(0.1)
    assert made.assigned == {"e0"}


def test_too_few_slots_is_a_problem_in_words_not_a_placement() -> None:
    made = mesh()
    made.join("e0", "e1", offered=1)
    assert made.effects == []
    assert "1 + 1 = 2" in made.state.problem


def test_a_rank_that_offers_no_more_gets_no_spare_slot() -> None:
    made = mesh()
    made.state.joined("e0", 2, "", 0.0)
    made.join("e1")
    assert made.commands["e0"].slots == ((0, 2), (0, 2))
    assert made.commands["e1"].slots == ((1, 3, -1), (1, 3, -1))


def test_an_unacknowledged_command_is_repeated_unchanged_and_at_once_after_a_new_hello() -> None:
    made = mesh(wanted_ranks=1)
    made.join("e0")
    first = made.commands["e0"]
    assert made.due(RESEND_S / 2) == []
    assert made.due(RESEND_S / 2) == [Assign("e0", first, again=True)]
    made.join("e0")
    assert made.effects == [Assign("e0", first, again=True)]


def test_a_first_placement_that_fails_is_tried_again() -> None:
    made = mesh(wanted_ranks=1)
    made.join("e0")
    made.answer("e0", error="no memory")
    assert made.state.errors() == {"e0": "no memory"}
    assert made.state.faults[0] == "e0: no memory"
    assert "e0" in made.state.alarms[0]
    assert made.state.retry_in_s(made.now) == URGENT_RETRY_S
    assert made.due(URGENT_RETRY_S / 2) == []
    made.due(URGENT_RETRY_S / 2)
    assert made.assigned == {"e0"}
    made.answer("e0", fail=(3,))
    assert made.commits == []
    made.due(2 * URGENT_RETRY_S)
    made.answer("e0")
    assert made.commits
    assert made.state.alarms == ()
    assert made.state.errors() == {}


def test_a_replica_that_fails_at_first_is_done_without() -> None:
    made = mesh(redundant_slots=1)
    made.join("e0", "e1")
    (twin,) = set(made.commands["e0"].slots[0]) & set(made.commands["e1"].slots[0]) - {-1}
    made.answer("e0", fail=(twin,))
    made.answer("e1")
    assert twin in made.row("e1")
    assert twin not in made.row("e0")


def test_an_acknowledgement_of_another_command_means_nothing() -> None:
    made = mesh(wanted_ranks=1)
    made.join("e0")
    old = SlotsReady(id="e0", incarnation=1, command=7, epoch=1)
    made.state.acknowledged(old, 0.0)
    made.state.acknowledged(msgspec.structs.replace(old, id="stranger", command=101), 0.0)
    assert made.due() == []


def test_a_rank_that_dies_during_the_first_placement_is_waited_for_again() -> None:
    made = mesh()
    made.join("e0", "e1")
    epoch = made.commands["e0"].epoch
    made.kill("e1")
    made.answer("e0")
    assert made.commits == []
    made.join("e1")
    made.answer("e0", "e1")
    assert made.placement.epoch > epoch


def test_the_stored_plan_is_used_again_when_exactly_its_ranks_return() -> None:
    stored = Placement(
        epoch=6,
        moe_layers=(1, 2),
        num_experts=4,
        ranks=("e0", "e1"),
        slots_per_rank=(4, 3),
        physical_to_logical=((0, 1, -1, 2, 3, 0, -1), (3, 2, 1, -1, 0, -1, 2)),
    )
    same = mesh(stored, redundant_slots=1)
    same.join("e0", "e1")
    same.settle()
    assert same.placement == msgspec.structs.replace(stored, epoch=7)
    for fewer, ranks in ((0, ("e0", "e1")), (1, ("e0", "e2"))):
        other = mesh(stored, redundant_slots=fewer)
        other.join(*ranks)
        assert [e.event for e in other.effects if isinstance(e, Noted)] == ["plan.not_used"]
        other.settle()
        assert other.placement.slots_per_rank == ((4, 3) if fewer else (3, 3))
        assert other.placement.epoch == 7


# ---------------------------------------------------------------- waves


def test_a_move_loads_beside_what_serves_and_frees_only_when_routers_have_switched() -> None:
    made = placed("e0", "e1", move_slots=2)
    made.state.router_at("r0", 1)
    made.state.router_at("starting", 0)
    made.state.move_to(SWAP)
    made.due()
    assert made.state.phase == "loading"
    assert made.commands["e0"].slots[0] == (0, 2, 1)
    assert made.commands["e1"].slots[0] == (1, 3, 2)
    (source,) = made.commands["e0"].sources
    assert (source.layer, source.slot) == (1, 2)
    assert (source.peer, source.address, source.peer_slot) == ("e1", "at-e1", 0)
    assert made.commands["e0"].bytes_per_s == 500
    made.answer("e0")
    assert made.commits == []
    made.answer("e1")
    assert Moved(2) in made.effects
    assert made.row("e0") == (0, -1, 1)
    assert made.row("e1") == (-1, 3, 2)
    assert made.placement.epoch == 2
    assert made.state.phase == "committing"
    assert made.assigned == set(), "old copies serve on"
    made.state.router_at("r0", 2)
    made.due()
    assert made.state.phase == "draining"
    assert made.commands["e0"].slots[0] == (0, -1, 1)
    made.answer("e0", "e1")
    assert made.effects == [Done("rebalance")]
    assert made.state.idle()


def test_a_worker_that_has_loaded_but_does_not_serve_yet_is_waited_for() -> None:
    made = placed("e0", "e1")
    made.state.move_to(SWAP)
    made.due()
    made.state.ready("e1", is_ready=False)
    made.answer("e0", "e1")
    assert made.commits == []
    made.state.ready("e1", is_ready=True)
    made.due()
    assert made.commits


def test_a_large_move_goes_by_waves_of_the_allowed_size_and_never_lacks_an_expert() -> None:
    made = placed("e0", "e1", move_slots=3)
    made.state.move_to(target(("e0", "e1"), (1, 3, 0, 2), (1, 3, 0, 2)))
    waves = []
    while not made.state.idle():
        made.due()
        if made.state.phase == "loading":
            held = sum(len(set(row) - {-1}) for c in made.commands.values() for row in c.slots)
            waves.append(held - 8)
        made.answer(*made.commands)
        assert unserved(made.placement, ["e0", "e1"]) == {}
    assert waves == [3, 3, 2]
    assert set(made.row("e0")) == {1, 3, -1}


def test_full_ranks_that_offer_no_spare_slot_cannot_exchange_experts() -> None:
    made = mesh()
    made.join("e0", "e1", offered=2)
    made.settle()
    made.state.move_to(SWAP)
    made.due()
    (failed,) = made.effects
    assert isinstance(failed, Failed)
    assert failed.retry_in_s is None
    assert "e0, e1 are full" in failed.reason
    assert failed.reason in made.state.alarms[0]


def test_a_slot_that_fails_is_left_out_reported_and_tried_again_later() -> None:
    made = placed("e0", "e1")
    made.state.move_to(SWAP)
    made.due()
    made.answer("e0", fail=(1,))
    made.answer("e1")
    (failed,) = [effect for effect in made.effects if isinstance(effect, Failed)]
    assert failed.retry_in_s == RETRY_S
    assert failed.faults == ("e0: layer 1 slot 2 expert 1: checksum",)
    assert made.row("e0") == (0, -1, -1)
    assert made.row("e1") == (1, 3, 2)
    made.answer("e0", "e1")
    assert not made.state.idle()
    assert made.state.retry_in_s(made.now) == RETRY_S
    made.due(RETRY_S)
    made.answer("e0", "e1")
    assert set(made.row("e0")) == {0, 1, -1}
    made.settle()
    assert made.state.alarms == ()


def test_a_target_whose_loads_fail_again_and_again_is_given_up_with_an_alarm() -> None:
    made = placed("e0", "e1")
    made.state.move_to(SWAP)
    outcomes = []
    for _ in range(MAX_TRIES):
        made.due()
        made.answer("e0", fail=(1,))
        made.answer("e1", fail=(2,))
        outcomes += [e.retry_in_s for e in made.effects if isinstance(e, Failed)]
        made.answer("e0", "e1")
        made.due(made.state.retry_in_s(made.now))
    assert outcomes == [RETRY_S * 2**n for n in range(MAX_TRIES - 1)] + [None]
    assert "gave up" in made.state.alarms[0]
    made.settle()
    assert made.row("e0") == (0, 2, -1)
    made.state.move_to(SWAP)
    assert made.state.alarms == ()


def test_a_wave_that_is_not_answered_in_time_is_taken_back() -> None:
    made = placed("e0", "e1")
    before = made.placement
    made.state.move_to(SWAP)
    made.due()
    made.due(RULES.phase_timeout_s)
    (failed,) = [effect for effect in made.effects if isinstance(effect, Failed)]
    assert failed.faults == (
        "e0 did not load its experts in 30 s",
        "e1 did not load its experts in 30 s",
    )
    assert made.placement == before
    assert made.commands["e0"].slots == local_slots(before, "e0")
    made.due(RETRY_S)
    assert made.state.phase == "", "what they hold is not known yet"
    made.answer("e0", "e1")
    assert made.state.phase == "loading"


def test_a_router_that_does_not_switch_delays_only_the_freeing_and_raises_an_alarm() -> None:
    made = placed("e0", "e1")
    made.state.router_at("r0", 1)
    made.state.move_to(SWAP)
    made.due()
    made.answer("e0", "e1")
    made.due(RULES.phase_timeout_s)
    assert "r0 did not take over placement 2" in made.state.alarms[0]
    assert made.commands["e0"].slots[0] == (0, 2, 1)
    made.state.router_gone("r0")
    made.due()
    assert made.state.alarms == ()
    made.settle()


def test_a_target_that_does_not_fit_is_refused_with_the_reason() -> None:
    early = mesh()
    with pytest.raises(PlanError, match="no experts have been placed"):
        early.state.move_to(SWAP)
    made = placed("e0", "e1")
    rows = ((0, 2, 1, 3),) * 2
    for wrong, words in (
        (Target(("e0", "e9"), (2, 2), rows, ""), "e9 cannot hold experts now; accepted: e0, e1"),
        (Target(("e0", "e1"), (2,), rows, ""), "2 ranks but slot counts for 1"),
        (Target(("e0", "e1"), (2, 3), rows, ""), "layer 1 has 4 slots, the ranks have 5"),
        (Target(("e0", "e1"), (2, 2), rows[:1], ""), "2 MoE layers but 1 rows"),
        (Target(("e0", "e1"), (2, 2), ((0, 2, 1, 1),) * 2, ""), r"experts \[3\] of layer 1"),
        (Target(("e0", "e1"), (2, 2), ((0, 2, 1, 4),) * 2, ""), "holds expert 4"),
    ):
        with pytest.raises(PlanError, match=words):
            made.state.move_to(wrong)
    made.kill("e1")
    made.join("e1", offered=2)
    made.settle()
    with pytest.raises(PlanError, match="3 experts in a layer of e1, which offers 2"):
        made.state.move_to(Target(("e0", "e1"), (1, 3), ((0, 1, 2, 3),) * 2, ""))


def test_a_move_that_is_abandoned_is_undone_before_its_commit() -> None:
    made = placed("e0", "e1")
    made.state.move_to(SWAP)
    made.due()
    made.state.abandon()
    made.due()
    assert made.commands["e0"].slots[0] == (0, 2, -1)
    made.settle()
    assert made.placement.epoch == 1


def test_redundant_slots_that_no_worker_can_use_are_an_alarm_until_enough_have_come() -> None:
    made = mesh(redundant_slots=9)
    assert "redundant_slots = 9: 4 are used" in made.state.useless_slots
    assert "2 workers x 4 experts - 4" in made.state.useless_slots
    made.join("e0", "e1")
    made.settle()
    assert made.state.alarms == (made.state.useless_slots,)
    made.join("e2", "e3")
    made.settle()
    assert made.state.alarms == ()
    assert sum(made.placement.slots_per_rank) >= 4 + 9
    assert not mesh(redundant_slots=4).state.useless_slots


# ---------------------------------------------------------------- deaths


def test_a_dead_rank_whose_experts_live_elsewhere_delays_nothing() -> None:
    made = placed("e0", "e1", "e2", redundant_slots=4)
    made.state.move_to(target(("e0", "e1"), (0, 1, 2, 3) * 2, (0, 1, 2, 3) * 2))
    made.due()
    told = dict(made.commands)
    made.kill("e2")
    (placement,) = made.commits
    assert placement.ranks == ("e0", "e1")
    assert made.state.phase == "loading"
    assert made.assigned == set()
    assert made.commands == {rank: told[rank] for rank in ("e0", "e1")}
    made.answer("e0", "e1")
    made.settle()
    assert set(made.row("e0")) >= {0, 1, 2, 3}


def test_lost_experts_are_loaded_by_survivors_at_once_and_without_limits() -> None:
    made = placed("e0", "e1", "e2", move_slots=1)
    made.state.move_to(target(("e0", "e1", "e2"), (1, 0, 2, 3, 0, 2), (0, 1, 2, 3, 0, 1)))
    made.due()
    lost = set(made.row("e0")) - {-1}
    made.kill("e0")
    assert [type(e) for e in made.effects if isinstance(e, Failed)] == [Failed]
    assert made.assigned == {"e1", "e2"}
    loading = [set(made.commands[rank].slots[0]) for rank in ("e1", "e2")]
    assert lost <= set.union(*loading)
    assert all(command.bytes_per_s == 0 for command in made.commands.values())
    assert not any(command.sources for command in made.commands.values())
    made.answer("e1", "e2")
    assert made.placement.ranks == ("e1", "e2")
    assert unserved(made.placement, ["e1", "e2"]) == {}
    made.settle()


def test_survivors_grow_when_their_spare_slots_are_too_few_and_shrink_again() -> None:
    made = placed("e0", "e1")
    made.kill("e1")
    assert made.commands["e0"].slots == ((0, 2, 1, 3, -1),) * 2
    made.answer("e0")
    assert made.placement.slots_per_rank == (5,)
    made.join("e1")
    made.settle()
    assert made.placement.slots_per_rank == (3, 3)
    assert made.placement.physical_to_logical == ((0, 2, -1, 1, 3, -1),) * 2


def test_a_replica_gives_way_where_no_slot_is_free() -> None:
    made = mesh(wanted_ranks=3, redundant_slots=2)
    made.join("e0", "e1", "e2", offered=2)
    made.settle()
    made.kill("e2")
    # The replicas are withdrawn at once; the dead rank is named while it alone held an expert.
    assert made.placement.ranks == ("e0", "e1", "e2")
    assert unserved(made.placement, ["e0", "e1"]) != {}
    made.answer("e0", "e1")
    assert made.placement.ranks == ("e0", "e1")
    assert unserved(made.placement, ["e0", "e1"]) == {}
    made.kill("e1")
    assert "those that are left hold 2 slots" in made.state.problem


def test_experts_without_any_room_wait_for_their_rank_which_takes_its_slots_again() -> None:
    made = mesh()
    made.join("e0", "e1", offered=2)
    made.settle()
    before = made.placement
    made.kill("e1")
    assert made.commits == []
    assert "waiting for e1" in made.state.problem
    made.join("e1", offered=2)
    assert made.commands["e1"].slots == local_slots(before, "e1")
    assert made.commands["e1"].epoch == before.epoch
    made.answer("e1")
    assert made.placement == before
    assert made.state.problem == ""
    assert made.state.idle()


def test_the_only_expert_worker_is_waited_for() -> None:
    made = placed("e0")
    before = made.placement
    made.kill("e0")
    assert "waiting for e0" in made.state.problem
    made.join("e0")
    made.settle()
    assert made.placement == before


def test_a_rank_that_restarts_before_it_is_missed_loads_its_slots_again() -> None:
    made = placed("e0", "e1")
    before = made.placement
    made.state.gone("e1", made.now)
    made.join("e1")
    assert made.commands["e1"].slots == local_slots(before, "e1")
    made.settle()
    assert made.placement == before


def test_a_rank_that_returns_during_the_repair_gets_a_share_afterwards() -> None:
    made = placed("e0", "e1")
    made.kill("e1")
    loading = made.commands["e0"]
    made.join("e1")
    assert made.commands["e0"] == loading
    made.answer("e0")
    assert made.placement.ranks == ("e0",)
    made.settle()
    assert made.placement.ranks == ("e0", "e1")
    assert unserved(made.placement, ["e0", "e1"]) == {}


def test_a_second_death_leaves_alone_what_is_being_loaded() -> None:
    made = placed("e0", "e1", "e2")
    made.kill("e2")
    survivor = "e0" if set(made.commands["e0"].slots[0]) & {3} else "e1"
    loading = set(made.commands[survivor].slots[0])
    made.kill("e1" if survivor == "e0" else "e0")
    assert loading - {-1} <= set(made.commands[survivor].slots[0])
    made.answer(survivor)
    assert unserved(made.placement, [survivor]) == {}


def test_a_repair_that_fails_on_one_survivor_goes_to_another() -> None:
    made = placed("e0", "e1", "e2")
    lost = set(made.row("e2")) - {-1}
    made.kill("e2")
    first = "e0" if lost & set(made.commands["e0"].slots[0]) else "e1"
    other = "e1" if first == "e0" else "e0"
    made.answer(first, other, error="no memory")
    made.due(URGENT_RETRY_S)
    made.answer(first, error="no memory")
    made.answer(other)
    for _ in range(10):
        made.due(10.0)
        made.answer(other)
        if made.state.idle():
            break
        made.answer(first)
    assert unserved(made.placement, ["e0", "e1"]) == {}


def test_a_promised_slot_that_its_rank_cannot_fill_is_withdrawn() -> None:
    made = placed("e0", "e1", redundant_slots=4)
    made.state.gone("e1", made.now)
    made.join("e1")
    made.answer("e1", fail=(0,))
    (placement,) = made.commits
    assert 0 not in local_slots(placement, "e1")[0]
    assert 1 in local_slots(placement, "e1")[0]


# ---------------------------------------------------------------- joins and drains


def test_a_rank_that_joins_gets_an_even_share_with_as_few_moves_as_it_takes() -> None:
    made = placed("e0", "e1")
    made.join("e2")
    assert made.state.to_move == 2
    made.settle()
    for layer in range(2):
        held = {rank: set(made.row(rank, layer)) - {-1} for rank in ("e0", "e1", "e2")}
        assert sorted(map(len, held.values())) == [1, 1, 2]
        assert held["e0"] <= {0, 2}
        assert held["e1"] <= {1, 3}
    ranks, slots = made.state.serving_slots()
    assert (ranks, slots) == (("e0", "e1", "e2"), (2, 1, 1))


def test_a_rank_that_drains_gives_everything_away_first() -> None:
    made = placed("e0", "e1", "e2")
    made.state.drain("e1")
    made.due()
    while not made.state.idle():
        assert unserved(made.placement, made.placement.ranks) == {}
        made.answer(*made.commands)
    assert made.placement.ranks == ("e0", "e2")
    assert made.commands["e1"].slots == ((), ())
    assert made.state.serving_slots()[0] == ("e0", "e2")


def test_a_rank_that_cannot_be_spared_stays_and_an_alarm_says_so() -> None:
    made = mesh()
    made.join("e0", "e1", offered=2)
    made.settle()
    made.state.drain("e1")
    made.due()
    assert "e1 cannot drain" in made.state.alarms[0]
    assert made.placement.ranks == ("e0", "e1")
    assert made.state.idle()
    made.join("e2", offered=2)
    made.settle()
    assert made.placement.ranks == ("e0", "e2")
    assert made.state.alarms == ()


def test_a_join_comes_before_a_target_that_knows_nothing_of_it() -> None:
    made = placed("e0", "e1")
    made.state.move_to(SWAP)
    made.due()
    made.join("e2")
    made.answer("e0", "e1")
    made.answer("e0", "e1", "e2")
    assert [e.retry_in_s for e in made.effects if isinstance(e, Failed)] == [None]
    made.settle()
    assert made.placement.ranks == ("e0", "e1", "e2")


# ---------------------------------------------------------------- a planner that starts again


def restarted(before: Placement, *ranks: str, stored: Placement | None = None) -> Mesh:
    made = mesh(stored, first_command=500)
    made.state.learned(before)
    made.join(*ranks)
    return made


def test_a_restarted_planner_listens_before_it_sends_commands() -> None:
    old = placed("e0", "e1").placement
    newer = msgspec.structs.replace(
        old, epoch=9, physical_to_logical=((0, -1, 2, -1, 3, 1), (0, 1, -1, 2, 3, -1))
    )
    made = restarted(old, "e0", "e1")
    assert made.effects == [Commit(old)]
    made.state.learned(newer)
    made.state.learned(old)
    assert made.due(SETTLE_S / 2) == [Commit(newer)]
    made.due(SETTLE_S)
    assert made.commands["e0"].slots == local_slots(newer, "e0")
    made.settle()
    assert made.placement.epoch == 9


def test_a_rank_that_does_not_come_back_with_the_planner_is_given_up() -> None:
    made = restarted(placed("e0", "e1").placement, "e0")
    made.due(SETTLE_S)
    made.answer("e0")
    assert made.state.committed is not None
    assert made.due(ABSENT_S - SETTLE_S - 0.1) == []
    made.due(0.1)
    made.answer("e0")
    assert made.placement.ranks == ("e0",)
    assert made.placement.epoch == 2


def test_a_learned_placement_whose_ranks_are_gone_is_built_anew_on_those_that_are_there() -> None:
    made = restarted(placed("e0", "e1").placement, "x0", "x1")
    made.due(SETTLE_S)
    made.due(ABSENT_S)
    made.settle()
    assert made.placement.ranks == ("x0", "x1")
    assert unserved(made.placement, ["x0", "x1"]) == {}


def test_a_share_that_died_with_the_planner_is_finished_by_the_next() -> None:
    made = placed("e0", "e1", move_slots=1)
    made.join("e2")
    made.answer("e0", "e1", "e2")
    assert set(made.row("e2", 0)) != set(made.row("e2", 1))
    again = restarted(made.placement, "e0", "e1", "e2")
    again.due(SETTLE_S)
    again.settle()
    assert [len(set(again.row("e2", layer)) - {-1}) for layer in range(2)] == [1, 1]


def test_a_new_placement_gets_a_higher_epoch_than_any_seen() -> None:
    made = mesh()
    made.state.saw_epoch(41)
    made.join("e0", "e1")
    made.settle()
    assert made.placement.epoch == 42


def test_a_placement_that_is_not_of_this_model_is_not_adopted() -> None:
    good = placed("e0", "e1").placement
    replace = msgspec.structs.replace
    for bad in (
        replace(good, moe_layers=(1, 3)),
        replace(good, num_experts=5),
        replace(good, slots_per_rank=(2, 1)),
        replace(good, slots_per_rank=(7, -1)),
        replace(good, ranks=("e0", "e0")),
        replace(good, physical_to_logical=((0, 1, -1, 2, 2, -1),) * 2),
        replace(good, physical_to_logical=((0, 1, -1, 2, 4, -1),) * 2),
        replace(good, epoch=0),
    ):
        assert not fits(bad, SHAPE)
        made = mesh(bad)
        made.state.learned(bad)
        assert made.state.committed is None
        made.join("e0", "e1")
        made.settle()
        assert made.placement.epoch == bad.epoch + 1
