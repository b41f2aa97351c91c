from __future__ import annotations

import numpy as np
import pytest

from mesh.messages import Placement
from planner_svc.balance import LoadReportError, LoadWindow, balancedness, rank_loads


def placement(rows: list[list[int]], slots: tuple[int, ...]) -> Placement:
    return Placement(
        epoch=1,
        moe_layers=tuple(range(len(rows))),
        num_experts=max(max(row) for row in rows) + 1,
        ranks=tuple(f"expert-{r}" for r in range(len(slots))),
        slots_per_rank=slots,
        physical_to_logical=tuple(tuple(row) for row in rows),
    )


def test_reports_add_up_and_leave_the_window_when_old() -> None:
    window = LoadWindow(1, 2, span_s=10.0, buckets=5)
    window.add([[1, 2]], 3, now=0.0)
    window.add([[10, 0]], 10, now=5.0)
    assert window.counts(5.0).tolist() == [[11.0, 2.0]]
    assert window.counts(10.5).tolist() == [[10.0, 0.0]]
    assert window.counts(99.0).tolist() == [[0.0, 0.0]]
    assert window.tokens == 13


@pytest.mark.parametrize(
    "counts", [[[1]], [[1, 2], [3, 4]], [[-1, 2]], [[1, 2], [3]], [], [[10**400, 0]]]
)
def test_a_report_that_does_not_fit_is_refused(counts: list[list[int]]) -> None:
    window = LoadWindow(1, 2)
    with pytest.raises(LoadReportError):
        window.add(counts, 1, now=0.0)
    assert window.counts(0.0).sum() == 0


def test_an_experts_tokens_split_over_its_replicas_and_empty_slots_carry_none() -> None:
    # Expert 0 on both ranks, expert 1 on the first, one spare slot.
    loads = rank_loads(placement([[0, 1, 0, -1]], (2, 2)), np.array([[10.0, 4.0]]))
    assert loads.tolist() == [[9.0, 5.0]]


def test_uneven_ranks_are_told_apart() -> None:
    loads = rank_loads(placement([[0, 1, 2]], (1, 2)), np.array([[5.0, 1.0, 1.0]]))
    assert loads.tolist() == [[5.0, 2.0]]


def test_balancedness_is_mean_over_max_averaged_over_layers_with_tokens() -> None:
    assert balancedness(np.array([[4.0, 4.0]])) == 1.0
    assert balancedness(np.array([[8.0, 0.0]])) == 0.5
    assert balancedness(np.array([[8.0, 0.0], [4.0, 4.0], [0.0, 0.0]])) == 0.75
    assert balancedness(np.zeros((3, 2))) == 1.0
