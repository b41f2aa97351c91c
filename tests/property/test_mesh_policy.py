from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner_svc.policies.mesh import MeshPolicy
from planner_svc.policies.problem import EMPTY, PlanError, Problem, Rows, Topology

LOADS = st.one_of(
    st.sampled_from([0.0, 1.0, 1e12, np.nan, np.inf, -3.0]), st.floats(0, 1e6, allow_nan=False)
)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    ranks, experts, layers = (draw(st.integers(1, limit)) for limit in (9, 20, 2))
    equal = draw(st.booleans())
    slots = (
        [draw(st.integers(1, 2 * experts))] * ranks
        if equal
        else draw(st.lists(st.integers(0, experts + 2), min_size=ranks, max_size=ranks))
    )
    speeds = [1.0] * ranks if equal else [draw(st.sampled_from([1.0, 0.7, 2.0])) for _ in slots]
    window = draw(st.lists(LOADS, min_size=layers * experts, max_size=layers * experts))
    pins = draw(
        st.dictionaries(
            st.tuples(st.integers(0, layers - 1), st.integers(0, experts - 1)),
            st.lists(st.integers(0, ranks - 1), max_size=2).map(tuple),
            max_size=2,
        )
    )
    return {
        "window": np.array(window).reshape(1, layers, experts),
        "topology": Topology(
            slots=tuple(slots),
            nodes=tuple(draw(st.integers(0, 2)) for _ in slots),
            speeds=tuple(speeds),
        ),
        "groups": draw(st.integers(1, 5)),
        "group_rule": draw(st.sampled_from(["off", "soft", "strict"])),
        "pins": pins,
    }


def check(problem: Problem, rows: Rows) -> None:
    slots, experts = problem.topology.slots, problem.window.shape[2]
    assert rows.shape == (problem.window.shape[1], sum(slots))
    for layer, row in enumerate(rows):
        held = [
            [int(e) for e in part if e != EMPTY] for part in np.split(row, np.cumsum(slots)[:-1])
        ]
        assert {e for rank in held for e in rank} == set(range(experts))
        for rank, count in zip(held, slots, strict=True):
            assert len(rank) == len(set(rank))
            if problem.group_rule != "strict":
                assert len(rank) == min(count, experts)
        for (pinned, expert), ranks in problem.pins.items():
            assert pinned != layer or all(expert in held[r] for r in ranks if slots[r])


@settings(max_examples=150, deadline=None)
@given(first=problems(), data=st.data(), averse=st.booleans())
def test_no_expert_is_lost_or_twice_on_a_rank_whatever_happens(
    first: dict[str, Any], data: st.DataObject, averse: bool
) -> None:
    policy = MeshPolicy(forecast=averse, move_averse=averse)
    problem = Problem(**first)
    try:
        rows = policy.plan(problem).rows
    except PlanError:
        assume(False)
        return
    check(problem, rows)
    old = problem.topology.slots
    changed = list(old)
    changed[data.draw(st.integers(0, len(old) - 1))] = data.draw(st.integers(0, max(old) + 2))
    ranks = Topology(tuple(changed), first["topology"].nodes, first["topology"].speeds)
    later = Problem(**{**first, "topology": ranks}, previous=rows, previous_slots=old)
    try:
        new = policy.plan(later).rows
    except PlanError:
        return
    check(later, new)
    before, after = np.cumsum((0, *old)), np.cumsum((0, *changed))
    for was, now in zip(rows, new, strict=True):
        for rank in range(len(old)):
            held = now[after[rank] : after[rank + 1]]
            for place, expert in enumerate(was[before[rank] : before[rank + 1]]):
                if expert != EMPTY and expert in held and place < len(held):
                    assert held[place] == expert
