"""What every policy promises, whatever it is given."""

from __future__ import annotations

import typing
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.settings import PlannerSettings
from planner_svc.policies.checks import checked, clean, first_slots, held_copies, verify
from planner_svc.policies.problem import EMPTY, Plan, PlanError, Policy, Problem, Topology
from planner_svc.policies.registry import make_policy

POLICIES = typing.get_args(typing.get_type_hints(PlannerSettings)["policy"])
LAYERS, EXPERTS = 2, 8


def policy(name: str) -> Policy:
    return make_policy(PlannerSettings(policy=name))


def topology(*slots: int, nodes: int = 1, speeds: tuple[float, ...] | None = None) -> Topology:
    ranks = len(slots)
    return Topology(
        slots,
        tuple(rank * nodes // ranks for rank in range(ranks)),
        (1.0,) * ranks if speeds is None else speeds,
    )


def problem(window: object = None, slots: Topology | None = None, **more: object) -> Problem:
    if window is None:
        window = np.random.default_rng(3).integers(0, 500, (4, LAYERS, EXPERTS))
    return Problem(
        np.array(window, dtype=float).reshape(-1, LAYERS, EXPERTS),
        slots or topology(3, 3, 3, 3),
        **more,  # type: ignore[arg-type]
    )


def planned(name: str, given: Problem) -> Plan:
    window = given.window.copy()
    previous = None if given.previous is None else given.previous.copy()
    plan = policy(name).plan(given)
    np.testing.assert_array_equal(given.window, window)
    if previous is not None:
        np.testing.assert_array_equal(given.previous, previous)
    verify(plan, given)
    assert plan.expected.shape == given.window.shape[1:]
    assert np.isfinite(plan.expected).all()
    assert (plan.expected >= 0).all()
    return plan


def layer_of(*loads: float) -> object:
    return [[list(loads)] * LAYERS]


EDGES = {
    "no load at all": problem(np.zeros((4, LAYERS, EXPERTS))),
    "no step at all": problem(np.zeros((0, LAYERS, EXPERTS))),
    "experts without load": problem(layer_of(0, 0, 0, 9, 0, 5, 0, 0)),
    "all load on one expert": problem(layer_of(0, 0, 0, 0, 0, 0, 0, 1e9)),
    "counts of 1e12": problem(layer_of(1e12, 3e12, 1, 2, 3, 1e12, 0, 5)),
    "equal loads": problem(layer_of(*[7] * 8)),
    "slots far above experts": problem(slots=topology(12, 12, 12)),
    "one rank": problem(slots=topology(8)),
    "one rank with room": problem(slots=topology(20)),
    "as many slots as experts": problem(slots=topology(2, 2, 2, 2)),
    "one slot a rank": problem(slots=topology(*[1] * 9)),
    "uneven slots": problem(slots=topology(1, 7, 2, 4)),
    "groups that do not divide": problem(slots=topology(4, 4, 4, nodes=3), groups=4),
    "experts that groups do not divide": problem(groups=3),
    "groups on nodes": problem(slots=topology(3, 3, 3, 3, nodes=2), groups=4, group_rule="soft"),
    "a node too small for its groups": problem(
        slots=topology(1, 1, 5, 5, nodes=2), groups=4, group_rule="soft"
    ),
    "dead ranks": problem(slots=topology(0, 6, 0, 6)),
    "a dead node": problem(slots=topology(0, 0, 5, 5, nodes=2), groups=4, group_rule="strict"),
    "unequal speeds": problem(slots=topology(3, 3, 3, 3, speeds=(0.7, 1.0, 1.0, 2.5))),
    "pins": problem(pins={(0, 5): (0, 1, 2), (1, 0): (3,)}),
    "a pin to a dead rank": problem(slots=topology(0, 6, 6), pins={(0, 5): (0,)}),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", POLICIES)
def test_no_input_loses_an_expert_or_wastes_a_slot(name: str, edge: str) -> None:
    fresh = planned(name, EDGES[edge])
    again = planned(name, replace(EDGES[edge], previous=fresh.rows))
    assert again.expected.shape == fresh.expected.shape


@pytest.mark.parametrize("name", POLICIES)
def test_all_load_on_one_expert_gives_it_a_copy_on_each_rank_at_most(name: str) -> None:
    given = problem(layer_of(0, 0, 0, 0, 0, 0, 0, 1e9), topology(4, 4, 4, 4))
    rows = planned(name, given).rows
    copies = held_copies(rows, given.topology.slots, EXPERTS)
    assert copies.max() == 1
    if name in ("mesh", "hierarchical", "global"):
        assert (copies[:, :, 7] == 1).all()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), -5.0])
def test_counts_that_are_none_are_ignored_and_reported(name: str, odd: float) -> None:
    loads = [10.0, 20, 0, 40, 50, 60, 70, 80]
    spoilt = [10.0, 20, odd, 40, 50, 60, 70, 80]
    plan = planned(name, problem(layer_of(*spoilt)))
    assert any("ignored" in note for note in plan.notes), plan.notes
    reference = planned(name, problem(layer_of(*loads)))
    np.testing.assert_array_equal(plan.rows, reference.rows)
    assert reference.notes == ()


@pytest.mark.parametrize("name", POLICIES)
def test_fewer_slots_than_experts_are_refused_with_the_arithmetic(name: str) -> None:
    with pytest.raises(PlanError, match=r"8 experts .* 8 slots; .* 3 \+ 0 \+ 4 = 7"):
        policy(name).plan(problem(slots=topology(3, 0, 4)))


@pytest.mark.parametrize("name", POLICIES)
def test_pins_without_room_are_refused(name: str) -> None:
    pins = {(0, expert): (0, 1) for expert in range(3)}
    given = problem(slots=topology(3, 3, 4), pins=pins)
    with pytest.raises(PlanError, match=r"pinned|loses"):
        verify(policy(name).plan(given), given)


@pytest.mark.parametrize("name", POLICIES)
def test_experts_of_a_dead_rank_are_placed_on_those_that_are_left(name: str) -> None:
    whole = planned(name, problem(slots=topology(2, 2, 2, 2))).rows
    left = problem(slots=topology(0, 3, 3, 3), previous=whole, previous_slots=(2, 2, 2, 2))
    planned(name, left)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    ranks = draw(st.integers(1, 6))
    slots = draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))
    while sum(min(count, experts) for count in slots) < experts:
        slots[draw(st.integers(0, ranks - 1))] += 1 + experts // 2
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    window = rng.zipf(1.5, (draw(st.integers(1, 3)), layers, experts)).clip(0, 10**6)
    window[rng.random(window.shape) < draw(st.floats(0, 1))] = 0
    before = draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))
    previous = rng.integers(EMPTY, experts, (layers, sum(before)))
    pins = {}
    if draw(st.booleans()):
        rank = int(np.argmax(slots))
        pins[0, draw(st.integers(0, experts - 1))] = (rank,)
    return Problem(
        window.astype(float),
        Topology(
            tuple(slots),
            tuple(draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))),
            tuple(draw(st.lists(st.floats(0.2, 4), min_size=ranks, max_size=ranks))),
        ),
        previous=previous if draw(st.booleans()) else None,
        previous_slots=tuple(before),
        groups=draw(st.sampled_from([g for g in range(1, experts + 1) if experts % g == 0])),
        group_rule=draw(st.sampled_from(["strict", "soft", "off"])),
        pins=pins,
    )


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=150, deadline=None)
@given(given_problem=problems())
def test_any_plan_is_sound_reproducible_and_moves_no_expert_within_its_rank(
    name: str, given_problem: Problem
) -> None:
    try:
        plan = planned(name, given_problem)
    except PlanError:
        if not given_problem.pins:  # nothing else is impossible here
            raise
        return
    np.testing.assert_array_equal(plan.rows, planned(name, given_problem).rows)
    if given_problem.previous is None or given_problem.previous_slots is None:
        return
    starts = first_slots(given_problem.topology.slots)
    before = first_slots(given_problem.previous_slots)
    for (new, end), (old, old_end) in zip(pairwise(starts), pairwise(before), strict=True):
        width = min(end - new, old_end - old)
        for layer in range(len(plan.rows)):
            mine = plan.rows[layer, new:end].tolist()
            held = given_problem.previous[layer, old : old + width].tolist()
            for slot, expert in enumerate(held):
                if expert != EMPTY and expert in mine:
                    assert expert in (mine[slot], *held[:slot])


def test_cleaning_counts_each_oddity_and_leaves_the_rest() -> None:
    window = np.array([[[1.0, np.nan, -2, np.inf, 3e15, 4]]])
    cleaned, notes = clean(window)
    assert cleaned.tolist() == [[[1, 0, 0, 0, 0, 4]]]
    assert len(notes) == 4
    assert np.isnan(window[0, 0, 1]), "the caller's array is left alone"


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([[0, 1, 2, 3]], "expected integers"),
        ([[0, 1, 2, 2], [0, 1, 2, 3]], "loses 1 experts, first expert 3 of layer 0"),
        ([[0, 1, 2, 3], [0, 1, 2, 4]], "names experts 0 to 4"),
        ([[0, 1, 2, 3], [-2, 1, 2, 3]], "names experts -2"),
    ],
)
def test_a_wrong_plan_is_not_accepted(rows: list[list[int]], fault: str) -> None:
    given = Problem(np.ones((1, 2, 4)), topology(2, 2))
    with pytest.raises(PlanError, match=fault):
        verify(Plan(np.array(rows), np.ones((2, 4))), given)


def test_an_avoidable_duplicate_and_a_missing_pin_are_not_accepted() -> None:
    given = Problem(np.ones((1, 1, 4)), topology(3, 3), pins={(0, 2): (0,)})
    with pytest.raises(PlanError, match="twice on rank 1"):
        verify(Plan(np.array([[0, 1, 2, 3, 3, 0]]), np.ones((1, 4))), given)
    with pytest.raises(PlanError, match="expert 2 of layer 0, pinned to rank 0"):
        verify(Plan(np.array([[0, 1, 3, 3, 2, 0]]), np.ones((1, 4))), given)
    verify(Plan(np.array([[0, 1, 2, 3, EMPTY, 0]]), np.ones((1, 4))), given)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"previous": np.zeros((1, 5), dtype=np.int64)}, r"\(1, 5\), expected \(2, 12\)"),
        ({"previous": np.full((2, 12), 8)}, "experts -1 to 8, expected -1 to 7"),
        ({"previous_slots": (6, 6), "previous": np.zeros((2, 12), dtype=np.int64)}, "2 ranks"),
        ({"topology": Topology((12,), (0, 0), (1.0,))}, "nodes of 2"),
        ({"topology": Topology((12,), (0,), (float("nan"),))}, "speeds"),
        ({"topology": Topology((12, -1), (0, 0), (1.0, 1.0))}, "0 or more"),
        ({"window": np.zeros((2, 8))}, "steps, layers, experts"),
        ({"groups": 0}, "at least 1"),
        ({"pins": {(2, 0): (0,)}}, "layers 0 to 1"),
        ({"pins": {(0, 0): (4,)}}, "rank 4, expected 0 to 3"),
    ],
)
def test_contradictory_problems_are_refused(change: dict[str, object], fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        checked(replace(problem(), **change))  # type: ignore[arg-type]
