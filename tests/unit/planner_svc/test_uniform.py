from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.messages import Placement
from planner_svc.policies.problem import PlanError
from planner_svc.policies.uniform import UNLIMITED, slots_per_rank, uniform


def place(num_experts: int, offered: list[int], redundant: int = 0, layers: int = 3) -> Placement:
    shares = slots_per_rank(num_experts, redundant, offered)
    ranks = [f"expert-{r}" for r in range(len(offered))]
    return uniform(
        epoch=1, moe_layers=range(layers), num_experts=num_experts, ranks=ranks, shares=shares
    )


def held_by_rank(placement: Placement, layer: int) -> list[list[int]]:
    row, held, first = placement.physical_to_logical[layer], [], 0
    for slots in placement.slots_per_rank:
        held.append(list(row[first : first + slots]))
        first += slots
    return held


def test_slots_divide_as_evenly_as_they_can() -> None:
    assert slots_per_rank(32, 0, [UNLIMITED] * 3) == (11, 11, 10)
    assert slots_per_rank(8, 2, [UNLIMITED] * 3) == (4, 3, 3)


def test_a_small_offer_leaves_more_for_the_others() -> None:
    assert slots_per_rank(32, 0, [4, UNLIMITED, UNLIMITED]) == (4, 14, 14)


def test_redundant_slots_without_room_are_left_out() -> None:
    assert slots_per_rank(8, 100, [UNLIMITED, UNLIMITED]) == (8, 8)
    assert slots_per_rank(8, 4, [5, 5]) == (5, 5)


def test_too_few_slots_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(PlanError, match=r"32 experts .* 10 \+ 12 = 22"):
        slots_per_rank(32, 0, [10, 12])
    with pytest.raises(PlanError, match="0 expert workers"):
        slots_per_rank(32, 0, [])


def test_redundant_copies_leave_the_expected_load_even() -> None:
    placement = place(64, [UNLIMITED] * 8, redundant=8)
    for layer in range(3):
        copies = Counter(placement.physical_to_logical[layer])
        loads = [sum(1 / copies[e] for e in rank) for rank in held_by_rank(placement, layer)]
        assert max(loads) - min(loads) < 1e-9


def test_which_experts_are_replicated_differs_between_layers() -> None:
    placement = place(16, [UNLIMITED] * 4, redundant=2)
    replicated = [
        {e for e, n in Counter(row).items() if n > 1} for row in placement.physical_to_logical
    ]
    assert replicated[0].isdisjoint(replicated[1])


@settings(max_examples=200, deadline=None)
@given(
    num_experts=st.integers(1, 40),
    offered=st.lists(st.integers(0, 50), min_size=1, max_size=9),
    redundant=st.integers(0, 80),
)
def test_any_placement_is_complete_even_and_without_duplicates_on_a_rank(
    num_experts: int, offered: list[int], redundant: int
) -> None:
    try:
        placement = place(num_experts, offered, redundant, layers=2)
    except PlanError:
        assert sum(min(o or num_experts, num_experts) for o in offered) < num_experts
        return
    for share, offer in zip(placement.slots_per_rank, offered, strict=True):
        assert share <= num_experts
        assert offer == UNLIMITED or share <= offer
    for layer, row in enumerate(placement.physical_to_logical):
        copies = Counter(row)
        assert set(copies) == set(range(num_experts))
        assert max(copies.values()) - min(copies.values()) <= 1
        for rank in held_by_rank(placement, layer):
            assert len(rank) == len(set(rank))
    assert place(num_experts, offered, redundant, layers=2) == placement
