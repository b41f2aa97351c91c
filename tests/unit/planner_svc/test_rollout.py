from __future__ import annotations

import msgspec

from mesh.messages import AssignSlots, Placement
from mesh.placement import local_slots
from planner_svc.rollout import (
    RESEND_S,
    RETRY_S,
    Assign,
    Commit,
    ModelShape,
    Rollout,
    fits,
)

SHAPE = ModelShape(moe_layers=(1, 2), num_experts=4)


def rollout(**changes: object) -> Rollout:
    values: dict[str, object] = {
        "shape": SHAPE,
        "redundant_slots": 0,
        "wanted_ranks": 2,
        "patience_s": 60.0,
        "stored": None,
        "first_command": 100,
    }
    return Rollout(**(values | changes))  # type: ignore[arg-type]


def assigned(effects: list[Assign | Commit]) -> dict[str, AssignSlots]:
    return {effect.rank: effect.command for effect in effects if isinstance(effect, Assign)}


def committed(effects: list[Assign | Commit]) -> list[Placement]:
    return [effect.placement for effect in effects if isinstance(effect, Commit)]


def settle(state: Rollout, ranks: list[str], now: float = 0.0) -> Placement:
    for rank in ranks:
        state.joined(rank, 0, now)
    commands = assigned(state.due(now))
    for rank in ranks:
        state.acknowledged(rank, commands[rank].command, "", now)
    (placement,) = committed(state.due(now))
    state.check()
    return placement


def test_waits_for_all_wanted_ranks_then_assigns_and_commits_after_every_acknowledgement() -> None:
    state = rollout()
    state.joined("e0", 0, now=0.0)
    assert state.due(1.0) == []
    assert "1 of 2" in state.problem
    state.joined("e1", 0, now=2.0)
    commands = assigned(state.due(2.0))
    assert set(commands) == {"e0", "e1"}
    state.acknowledged("e0", commands["e0"].command, "", 3.0)
    assert committed(state.due(3.0)) == []
    state.acknowledged("e1", commands["e1"].command, "", 4.0)
    (placement,) = committed(state.due(4.0))
    assert state.committed == placement
    assert commands["e0"].slots == local_slots(placement, "e0")
    assert state.due(5.0) == []


def test_patience_ends_and_those_present_share_the_model() -> None:
    state = rollout()
    state.joined("e0", 0, now=10.0)
    assert assigned(state.due(69.9)) == {}
    assert set(assigned(state.due(70.0))) == {"e0"}


def test_too_few_slots_is_a_problem_in_words_not_a_placement() -> None:
    state = rollout()
    state.joined("e0", 1, now=0.0)
    state.joined("e1", 1, now=0.0)
    assert state.due(0.0) == []
    assert "1 + 1 = 2" in state.problem


def test_an_unacknowledged_command_is_repeated_unchanged() -> None:
    state = rollout(wanted_ranks=1)
    state.joined("e0", 0, now=0.0)
    first = assigned(state.due(0.0))["e0"]
    assert state.due(RESEND_S / 2) == []
    assert state.due(RESEND_S) == [Assign("e0", first, again=True)]


def test_a_failed_command_is_reported_and_tried_again_later() -> None:
    state = rollout(wanted_ranks=1)
    state.joined("e0", 0, now=0.0)
    first = assigned(state.due(0.0))["e0"]
    state.acknowledged("e0", first.command, "no memory", 1.0)
    assert state.errors() == {"e0": "no memory"}
    assert state.due(1.0 + RETRY_S / 2) == []
    assert assigned(state.due(1.0 + RETRY_S))["e0"] == first
    state.acknowledged("e0", first.command, "", 12.0)
    assert state.errors() == {}
    assert committed(state.due(12.0))


def test_an_acknowledgement_of_another_command_means_nothing() -> None:
    state = rollout(wanted_ranks=1)
    state.joined("e0", 0, now=0.0)
    state.due(0.0)
    state.acknowledged("e0", 7, "", 0.0)
    state.acknowledged("stranger", 101, "", 0.0)
    assert committed(state.due(0.0)) == []


def test_a_rank_that_dies_during_the_rollout_withdraws_the_proposal() -> None:
    state = rollout()
    state.joined("e0", 0, 0.0)
    state.joined("e1", 0, 0.0)
    first = assigned(state.due(0.0))
    state.gone("e1", 1.0)
    state.acknowledged("e0", first["e0"].command, "", 1.0)
    assert committed(state.due(1.0)) == []
    state.joined("e1", 0, 2.0)
    again = assigned(state.due(2.0))
    assert set(again) == {"e0", "e1"}
    assert again["e0"].slots == first["e0"].slots
    assert again["e0"].epoch > first["e0"].epoch
    state.check()


def test_a_rank_that_comes_back_gets_its_slots_again_without_a_new_placement() -> None:
    state = rollout()
    placement = settle(state, ["e0", "e1"])
    state.gone("e1", 5.0)
    assert state.committed == placement
    state.joined("e1", 0, 9.0)
    effects = state.due(9.0)
    assert committed(effects) == []
    assert assigned(effects)["e1"].slots == local_slots(placement, "e1")
    assert assigned(effects)["e1"].epoch == placement.epoch
    assert "e0" not in assigned(effects)


def test_a_later_worker_is_told_to_hold_nothing() -> None:
    state = rollout()
    settle(state, ["e0", "e1"])
    state.joined("e2", 0, 3.0)
    assert assigned(state.due(3.0))["e2"].slots == ((), ())


def test_a_restarted_planner_adopts_the_newest_placement_that_members_know() -> None:
    newest = msgspec.structs.replace(settle(rollout(), ["e0", "e1"]), epoch=9)
    old = msgspec.structs.replace(newest, epoch=8)
    state = rollout(first_command=500)
    state.joined("e0", 0, 0.0)
    state.learned(old)
    assert committed(state.due(0.0)) == [old]
    state.learned(newest)
    assert committed(state.due(0.0)) == [newest]
    state.learned(old)
    assert committed(state.due(0.0)) == []
    assert state.committed == newest


def test_a_new_placement_gets_a_higher_epoch_than_any_seen() -> None:
    state = rollout()
    state.saw_epoch(41)
    assert settle(state, ["e0", "e1"]).epoch == 42


def test_the_stored_plan_is_used_again_when_exactly_its_ranks_return() -> None:
    stored = Placement(
        epoch=6,
        moe_layers=(1, 2),
        num_experts=4,
        ranks=("e0", "e1"),
        slots_per_rank=(3, 2),
        physical_to_logical=((0, 1, 2, 3, 0), (3, 2, 1, 0, -1)),
    )
    same = settle(rollout(stored=stored, redundant_slots=1), ["e0", "e1"])
    assert same == msgspec.structs.replace(stored, epoch=7)
    fewer_slots = settle(rollout(stored=stored), ["e0", "e1"])
    assert fewer_slots.slots_per_rank == (2, 2)
    assert fewer_slots.epoch == 7
    other = settle(rollout(stored=stored, redundant_slots=1, wanted_ranks=3), ["e0", "e1", "e2"])
    assert other.ranks == ("e0", "e1", "e2")
    assert other.epoch == 7


def test_a_placement_that_is_not_of_this_model_is_not_adopted() -> None:
    good = settle(rollout(), ["e0", "e1"])
    replace = msgspec.structs.replace
    for bad in (
        replace(good, moe_layers=(1, 3)),
        replace(good, num_experts=5),
        replace(good, slots_per_rank=(2, 1)),
        replace(good, slots_per_rank=(5, -1)),
        replace(good, ranks=("e0", "e0")),
        replace(good, physical_to_logical=((0, 1, 2, 2),) * 2),
        replace(good, physical_to_logical=((0, 1, 2, 4),) * 2),
        replace(good, epoch=0),
    ):
        assert not fits(bad, SHAPE)
        state = rollout()
        state.learned(bad)
        assert state.committed is None
        assert settle(rollout(stored=bad), ["e0", "e1"]).epoch == bad.epoch + 1
