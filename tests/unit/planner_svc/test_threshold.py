from __future__ import annotations

import numpy as np
import pytest

from planner_svc.policies.problem import EMPTY, PlanError, Problem, Topology
from planner_svc.policies.threshold import Threshold

RANKS = Topology((4, 4, 4), (0, 0, 0), (1.0, 1.0, 1.0))


def plan(
    loads: list[float], held: list[int], topology: Topology = RANKS, **more: object
) -> list[int]:
    given = Problem(
        np.array(loads, dtype=float).reshape(1, 1, -1),
        topology,
        previous=np.array([held]),
        **more,  # type: ignore[arg-type]
    )
    return Threshold(2.0, 0.5).plan(given).rows[0].tolist()


def test_a_hot_expert_gains_a_copy_on_the_idlest_rank_that_lacks_it() -> None:
    held = [0, 1, 2, EMPTY, 3, 4, 5, EMPTY, 6, 7, 8, EMPTY]
    # Mean 40/9; expert 0 is hot. Ranks carry 26, 9, 5.
    loads = [20.0, 3, 3, 3, 3, 3, 2, 2, 1]
    assert plan(loads, held) == [0, 1, 2, EMPTY, 3, 4, 5, EMPTY, 6, 7, 8, 0]


def test_a_cold_expert_loses_the_copy_on_the_busiest_rank_and_never_its_last() -> None:
    held = [0, 1, 2, 8, 3, 4, 5, 8, 6, 7, EMPTY, EMPTY]
    loads = [9.0, 9, 9, 5, 5, 5, 5, 5, 0.5]
    after = plan(loads, held)
    assert after == [0, 1, 2, EMPTY, 3, 4, 5, 8, 6, 7, EMPTY, EMPTY]
    assert plan(loads, after) == after, "expert 8 is as cold as before, and keeps its only copy"


def test_within_the_band_nothing_changes() -> None:
    held = [0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8, EMPTY]
    assert plan([5.0, 5, 6, 8, 4, 5, 8, 5, 4], held) == held


def test_a_hot_expert_takes_the_slot_of_a_copy_that_can_go() -> None:
    # All slots are taken; experts 1 and 2 have two copies each, 1's are the idler.
    topology = Topology((4, 4), (0, 0), (1.0, 1.0))
    held = [0, 1, 2, 3, 1, 2, 4, 5]
    loads = [40.0, 14, 16, 4, 5, 5]
    assert plan(loads, held, topology) == [0, 1, 2, 3, 0, 2, 4, 5]


def test_no_copy_goes_whose_expert_would_become_hot() -> None:
    topology = Topology((3, 3), (0, 0), (1.0, 1.0))
    held = [0, 1, 2, 1, 3, 4]
    # Mean 20. With one copy expert 1 would carry 45, more than 2 x the mean.
    loads = [46.0, 45, 3, 3, 3]
    assert plan(loads, held, topology) == held


def test_one_copy_a_plan_and_at_most_one_a_rank() -> None:
    topology = Topology((4, 4, 4), (0, 0, 0), (1.0, 1.0, 1.0))
    held = [0, 1, 2, 3, 4, 5, EMPTY, EMPTY, 6, 7, EMPTY, EMPTY]
    loads = [1000.0, 0, 0, 0, 0, 0, 0, 0]
    one = plan(loads, held, topology)
    assert one.count(0) == 2
    two = plan(loads, one, topology)
    assert two.count(0) == 3
    assert plan(loads, two, topology) == two


def test_a_slow_rank_counts_as_busier() -> None:
    topology = Topology((4, 4, 4), (0, 0, 0), (1.0, 1.0, 0.1))
    held = [0, 1, 2, EMPTY, 3, 4, 5, EMPTY, 6, 7, 8, EMPTY]
    loads = [20.0, 3, 3, 3, 3, 3, 2, 2, 1]
    assert plan(loads, held, topology)[7] == 0


def test_a_pinned_copy_stays_however_cold() -> None:
    held = [0, 1, 2, 8, 3, 4, 5, 8, 6, 7, EMPTY, EMPTY]
    loads = [9.0, 9, 9, 5, 5, 5, 5, 5, 0.5]
    after = plan(loads, held, pins={(0, 8): (0, 1)})
    assert after == held


def test_without_a_placement_the_first_is_uniform() -> None:
    given = Problem(np.ones((1, 2, 6)), Topology((4, 4), (0, 0), (1.0, 1.0)))
    rows = Threshold(2.0, 0.5).plan(given).rows
    assert (rows != EMPTY).all()


@pytest.mark.parametrize(("hot", "cold"), [(1.0, 0.9), (2.0, -1.0), (float("inf"), 0.5)])
def test_factors_that_would_flap_are_refused(hot: float, cold: float) -> None:
    with pytest.raises(PlanError, match="cold_factor"):
        Threshold(hot, cold)
