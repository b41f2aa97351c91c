from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mesh.messages import LoadReport, Placement
from planner_svc.balance import (
    LoadReportError,
    LoadWindow,
    balancedness,
    layer_balance,
    rank_loads,
    rows_of,
)


def placement(rows: list[list[int]], slots: tuple[int, ...], epoch: int = 1) -> Placement:
    return Placement(
        epoch=epoch,
        moe_layers=tuple(range(len(rows))),
        num_experts=max(max(row) for row in rows) + 1,
        ranks=tuple(f"expert-{r}" for r in range(len(slots))),
        slots_per_rank=slots,
        physical_to_logical=tuple(tuple(row) for row in rows),
    )


def report(counts: Any, tokens: int = 1, **more: Any) -> LoadReport:
    return LoadReport(id="r", incarnation=1, counts=counts, tokens=tokens, **more)


def window(layers: int = 1, experts: int = 2, span_s: float = 10.0, buckets: int = 5) -> LoadWindow:
    return LoadWindow(layers, experts, span_s=span_s, buckets=buckets)


# ---------------------------------------------------------------- the window


def test_steps_show_when_loads_came_and_leave_the_window_when_old() -> None:
    loads = window()
    loads.add(report([[1, 2]], 3), now=0.5)
    loads.add(report([[10, 0]], 10), now=5.0)
    assert loads.series(5.5).tolist() == [[[1, 2]], [[0, 0]], [[10, 0]]]
    assert loads.seen(5.0) == 13
    assert loads.series(10.5).tolist() == [[[10, 0]], [[0, 0]], [[0, 0]]]
    assert loads.seen(10.5) == 10
    assert loads.series(99.0).tolist() == [[[0, 0]]]
    assert loads.seen(99.0) == 0
    assert loads.tokens == 13


def test_a_step_that_has_just_begun_is_no_lull() -> None:
    loads = window()
    loads.add(report([[6, 0]]), now=3.0)
    loads.add(report([[1, 0]]), now=4.1)
    assert loads.series(4.5).tolist() == [[[7, 0]]]
    assert loads.series(5.5).tolist() == [[[6, 0]], [[1, 0]]]


def test_prefill_and_decode_are_told_apart() -> None:
    loads = window()
    loads.add(report([[5, 3]], decode_counts=[[2, 3]]), now=0.0)
    loads.add(report([[1, 1]]), now=2.0)
    assert loads.prefill(2.0).tolist() == [[4, 1]]
    assert loads.decode(2.0).tolist() == [[2, 3]]


def test_rates_come_from_the_time_that_was_seen() -> None:
    loads = window()
    assert loads.covered_s(50.0) == 1.0
    loads.add(report([[1, 0]]), now=53.0)
    assert loads.covered_s(56.0) == 3.0
    loads.add(report([[1, 0]]), now=61.0)
    assert loads.covered_s(62.9) == pytest.approx(8.9)  # since 54 s


def test_what_went_to_ranks_counts_for_the_placement_that_it_went_by() -> None:
    loads, old, new = window(), placement([[0, 1]], (1, 1)), placement([[1, 0]], (1, 1), epoch=2)
    by_old = {"epoch": 1, "ranks": old.ranks, "rank_tokens": ((9, 1),)}
    loads.add(report([[9, 1]], **by_old), now=0.0)
    loads.add(report([[9, 1]], **by_old), now=3.0)
    assert loads.measured(old, 3.0).tolist() == [[18, 2]]
    assert loads.measured(new, 3.0).tolist() == [[0, 0]]
    # Until something has gone by the new one, what its experts got tells.
    assert loads.on_ranks(new, 3.0).tolist() == [[2, 18]]
    loads.add(report([[9, 1]], epoch=2, ranks=new.ranks, rank_tokens=((1, 5),)), now=4.0)
    assert loads.on_ranks(new, 4.0).tolist() == [[1, 5]]


def test_a_flood_of_epochs_keeps_the_newest_few() -> None:
    loads = window()
    for epoch in range(1, 1000):
        told = {"epoch": epoch, "ranks": ("a",), "rank_tokens": ((epoch,),)}
        loads.add(report([[0, 0]], **told), now=0.0)
    newest = placement([[0, 1]], (2,), epoch=999)
    assert loads.measured(newest, 0.0).tolist() == [[0]]  # other ranks, another placement
    by_rank = loads._steps[0].by_rank
    assert sorted(by_rank) == [(epoch, ("a",)) for epoch in range(996, 1000)]


BAD: list[dict[str, Any]] = [
    {"counts": [[1]]},
    {"counts": [[1, 2], [3, 4]]},
    {"counts": [[-1, 2]]},
    {"counts": [[1, 2], [3]]},
    {"counts": []},
    {"counts": [[10**400, 0]]},
    {"counts": [[float("nan"), 0]]},
    {"counts": [[float("inf"), 0]]},
    {"counts": [[1, 2]], "tokens": -1},
    {"counts": [[1, 2]], "decode_counts": [[1]]},
    {"counts": [[1, 2]], "decode_counts": [[2, 2]]},
    {"counts": [[1, 2]], "decode_counts": [[-1, 0]]},
    {"counts": [[1, 2]], "ranks": ("a",), "rank_tokens": [[1, 2]]},
    {"counts": [[1, 2]], "ranks": ("a",), "rank_tokens": [[-1]]},
]


@pytest.mark.parametrize("wrong", BAD, ids=str)
def test_a_report_that_does_not_fit_is_refused_whole(wrong: dict[str, Any]) -> None:
    loads = window()
    with pytest.raises(LoadReportError):
        loads.add(report(**wrong), now=0.0)
    assert not loads.series(0.0).any()
    assert loads.tokens == 0


# ---------------------------------------------------------------- how evenly


def loads_of(held: Placement, counts: list[list[float]], **how: Any) -> list[list[float]]:
    return rank_loads(rows_of(held), held.slots_per_rank, np.array(counts), **how).tolist()


def test_an_experts_tokens_split_over_its_copies_and_empty_slots_carry_none() -> None:
    # Expert 0 on both ranks, expert 1 on the first, one spare slot.
    assert loads_of(placement([[0, 1, 0, -1]], (2, 2)), [[10, 4]]) == [[9, 5]]


def test_uneven_ranks_are_told_apart() -> None:
    assert loads_of(placement([[0, 1, 2]], (1, 2)), [[5, 1, 1]]) == [[5, 2]]


def test_a_levelled_split_evens_ranks_out_as_far_as_copies_allow() -> None:
    held = placement([[0, 1, 0, 2], [0, 1, 0, 2]], (2, 2))
    first, second = loads_of(held, [[10, 4, 0], [2, 40, 0]], split="level")
    assert first == pytest.approx([7, 7], rel=0.01)
    assert second == pytest.approx([40, 2], rel=0.01)
    assert sum(first) == pytest.approx(14)


def test_a_slow_rank_gets_less_of_a_levelled_split() -> None:
    held = placement([[0, 0]], (1, 1))
    (loads,) = loads_of(held, [[30, 0][:1]], split="level", speeds=(2.0, 1.0))
    assert loads == pytest.approx([20, 10], rel=0.01)


def test_balancedness_is_mean_over_max_averaged_over_layers_with_tokens() -> None:
    assert balancedness(np.array([[4.0, 4.0]])) == 1.0
    assert balancedness(np.array([[8.0, 0.0]])) == 0.5
    assert balancedness(np.array([[8.0, 0.0], [4.0, 4.0], [0.0, 0.0]])) == 0.75
    assert balancedness(np.zeros((3, 2))) == 1.0
    assert layer_balance(np.array([[8.0, 0.0], [0.0, 0.0]])).tolist() == [0.5, 1.0]


def test_ranks_of_unequal_speed_are_balanced_when_they_are_done_together() -> None:
    assert balancedness(np.array([[20.0, 10.0]]), speeds=(2.0, 1.0)) == 1.0
    assert balancedness(np.array([[15.0, 15.0]]), speeds=(2.0, 1.0)) == pytest.approx(2 / 3)
