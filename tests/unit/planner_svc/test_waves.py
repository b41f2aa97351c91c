from __future__ import annotations

import pytest

from planner_svc.waves import (
    Load,
    Step,
    StuckError,
    after,
    missing,
    next_step,
    placement_of,
    resized,
    trimmed,
    wants_of,
)


def one_layer(**slots: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], ...]]:
    return {rank: (row,) for rank, row in slots.items()}


def wanted(**experts: set[int]) -> dict[str, tuple[frozenset[int], ...]]:
    return {rank: (frozenset(names),) for rank, names in experts.items()}


def test_two_ranks_exchange_experts_through_their_spare_slots() -> None:
    layout = one_layer(a=(0, 1, -1), b=(2, 3, -1))
    wants = wanted(a={0, 2}, b={1, 3})
    step = next_step(layout, wants, limit=8)
    assert step == Step(
        (Load(0, "b", 2, 1), Load(0, "a", 2, 2)), one_layer(a=(0, -1, 2), b=(-1, 3, 1))
    )
    assert after(layout, step.loads, wants) == step.layout
    assert next_step(step.layout, wants, limit=8) is None


def test_a_wave_takes_the_lowest_layers_and_no_more_than_its_limit() -> None:
    layout = {"a": ((0, 1, -1), (0, 1, -1)), "b": ((2, 3, -1), (2, 3, -1))}
    wants = {"a": (frozenset({0, 2}),) * 2, "b": (frozenset({1, 3}),) * 2}
    step = next_step(layout, wants, limit=3)
    assert step is not None
    assert [(load.layer, load.rank) for load in step.loads] == [(0, "b"), (0, "a"), (1, "b")]
    assert missing(step.layout, wants) == 1


def test_what_did_not_arrive_keeps_its_old_copy() -> None:
    layout = one_layer(a=(0, 1, -1), b=(2, 3, -1))
    wants = wanted(a={0, 2}, b={1, 3})
    assert after(layout, [Load(0, "a", 2, 2)], wants) == one_layer(a=(0, 1, 2), b=(-1, 3, -1))


def test_a_copy_that_nobody_is_known_to_hold_does_not_count_as_left() -> None:
    layout, wants = one_layer(a=(0, 1), b=(0, -1)), wanted(a={1}, b={0})
    assert after(layout, (), wants) == one_layer(a=(-1, 1), b=(0, -1))
    assert after(layout, (), wants, sure=one_layer(a=(0, 1), b=(-1, -1))) == layout


def test_the_load_comes_first_that_lets_a_full_rank_go_on() -> None:
    layout, wants = one_layer(a=(0,), b=(0, 1, -1), c=(-1,)), wanted(a={1}, b={0, 2}, c={0})
    layout["d"] = ((2,),)
    step = next_step(layout, wants, limit=1)
    assert step is not None
    assert step.loads == (Load(0, "c", 0, 0),)
    assert step.layout["a"] == ((-1,),)


def test_without_a_spare_slot_a_replica_makes_room() -> None:
    layout, wants = one_layer(a=(0, 1), b=(2, 0)), wanted(a={0, 2}, b={1, 0})
    step = next_step(layout, wants, limit=8)
    assert step is not None
    assert step.loads == ()
    assert step.layout == one_layer(a=(-1, 1), b=(2, 0))
    steps = 0
    while (step := next_step(layout, wants, limit=8)) is not None:
        layout = dict(step.layout)
        steps += 1
    assert wants_of(layout) == wants
    assert steps == 4


def test_full_ranks_of_single_copies_cannot_exchange_them() -> None:
    with pytest.raises(StuckError, match="a, b are full"):
        next_step(one_layer(a=(0, 1), b=(2, 3)), wanted(a={0, 2}, b={1, 3}), limit=8)


def test_loads_that_failed_are_left_for_later_and_the_rest_goes_on() -> None:
    layout = one_layer(a=(0, 1, -1), b=(2, 3, -1))
    wants = wanted(a={0, 2}, b={1, 3})
    step = next_step(layout, wants, limit=8, skip={(0, "a", 2)})
    assert step is not None
    assert step.loads == (Load(0, "b", 2, 1),)
    blocked = next_step(layout, wants, limit=8, skip={(0, "a", 2), (0, "b", 1)})
    assert blocked == Step((), layout)


def test_a_load_goes_where_it_is_already_if_that_slot_is_empty() -> None:
    layout, wants = one_layer(a=(0, -1, -1, 5)), wanted(a={0, 1, 2, 5})
    step = next_step(layout, wants, limit=8, prefer={(0, "a", 2): 1, (0, "a", 1): 3})
    assert step is not None
    assert step.layout == one_layer(a=(0, 2, 1, 5))


def test_a_placement_names_only_ranks_that_hold_something() -> None:
    layout = {"e10": ((1,),), "e2": ((0, -1),), "e3": ((-1,),)}
    placement = placement_of(layout, epoch=4, moe_layers=(7,), num_experts=2)
    assert placement.ranks == ("e2", "e10")
    assert placement.slots_per_rank == (2, 1)
    assert placement.physical_to_logical == ((0, -1, 1),)


def test_only_empty_slots_at_the_end_are_trimmed() -> None:
    layout = {"a": ((0, -1, -1), (-1, 1, -1)), "b": ((2, -1, -1), (2, -1, -1))}
    assert trimmed(layout, {"a": 1, "b": 2}) == {
        "a": ((0, -1), (-1, 1)),
        "b": ((2, -1), (2, -1)),
    }
    assert resized(((1,), (2,)), 2) == ((1, -1), (2, -1))
