from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner_svc.policies.eplb import Eplb, rebalance
from planner_svc.policies.problem import Problem, Topology

LOADS = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ],
    dtype=float,
)
EXAMPLE = Topology((2,) * 8, (0,) * 4 + (1,) * 4, (1.0,) * 8)


def published(loads: np.ndarray, slots: int, groups: int, nodes: int, ranks: int) -> list[int]:
    """One layer, one item at a time, as the description reads."""

    def pack(weights: list[np.float32], packs: int) -> list[list[int]]:
        room = len(weights) // packs
        if room == 1:
            return [[item] for item in range(packs)]
        held: list[list[int]] = [[] for _ in range(packs)]
        total = [np.float32(0)] * packs
        for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
            pack_ = min((p for p in range(packs) if len(held[p]) < room), key=total.__getitem__)
            held[pack_].append(item)
            total[pack_] += weights[item]
        return held

    weights = [np.float32(load) for load in loads]
    size = len(weights) // groups
    result: list[int] = []
    for on_node in pack(
        [np.float32(sum(weights[g * size : (g + 1) * size])) for g in range(groups)], nodes
    ):
        experts = [group * size + e for group in on_node for e in range(size)]
        count = dict.fromkeys(experts, 1)
        physical = list(experts)
        while len(physical) < slots // nodes:
            physical.append(max(experts, key=lambda e: weights[e] / np.float32(count[e])))
            count[physical[-1]] += 1
        shares = [weights[e] / np.float32(count[e]) for e in physical]
        result += [physical[p] for held in pack(shares, ranks // nodes) for p in held]
    return result


def ranks_of(rows: np.ndarray, slots: tuple[int, ...]) -> list[list[set[int]]]:
    ends = np.cumsum(slots)[:-1]
    return [[set(part.tolist()) for part in np.split(row, ends)] for row in rows]


def test_hierarchical_reproduces_the_published_example() -> None:
    plan = Eplb("hierarchical").plan(Problem(LOADS[None], EXAMPLE, groups=4))
    assert plan.rows.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert plan.notes == ()


def test_global_takes_no_notice_of_groups_and_nodes() -> None:
    wide = Topology((3,) * 4, (0, 0, 1, 1), (1.0,) * 4)
    plan = Eplb("global").plan(Problem(LOADS[None], wide, groups=4))
    assert plan.rows.tolist() == [published(loads, 12, 1, 1, 4) for loads in LOADS]


@settings(max_examples=100, deadline=None)
@given(
    nodes=st.integers(1, 3),
    groups_per_node=st.integers(1, 3),
    group_size=st.integers(1, 5),
    ranks_per_node=st.integers(1, 4),
    redundant=st.integers(0, 6),
    data=st.data(),
)
def test_rebalance_does_what_was_published_step_by_step(
    nodes: int, groups_per_node: int, group_size: int, ranks_per_node: int, redundant: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    groups, ranks = nodes * groups_per_node, nodes * ranks_per_node
    experts = groups * group_size
    slots = -(-experts // ranks) + redundant
    loads = np.array([data.draw(st.lists(st.integers(0, 99), min_size=experts, max_size=experts))])
    topology = Topology((slots,) * ranks, tuple(np.arange(ranks) // ranks_per_node), (1.0,) * ranks)
    rows, kept = rebalance(loads.astype(float), topology, groups)
    assert kept
    assert rows.tolist() == [published(loads[0], slots * ranks, groups, nodes, ranks)]


@pytest.mark.parametrize("groups", [1, 3, 5])
def test_hierarchical_is_global_where_groups_do_not_divide_among_nodes(groups: int) -> None:
    hierarchical = Eplb("hierarchical").plan(Problem(LOADS[None], EXAMPLE, groups=groups))
    assert (
        hierarchical.rows.tolist()
        == Eplb("global").plan(Problem(LOADS[None], EXAMPLE)).rows.tolist()
    )
    assert bool(hierarchical.notes) == (groups > 1)


def test_a_placement_in_force_changes_the_order_within_a_rank_only() -> None:
    grouped = Problem(LOADS[None], EXAMPLE, groups=4)
    fresh = Eplb("hierarchical").plan(grouped).rows
    swapped = fresh.reshape(2, 8, 2)[:, :, ::-1].reshape(2, 16)
    again = Eplb("hierarchical").plan(Problem(LOADS[None], EXAMPLE, previous=swapped, groups=4))
    assert again.rows.tolist() == swapped.tolist()


def test_copies_of_an_expert_part_where_the_published_plan_puts_them_together() -> None:
    loads = np.array([[100.0, 1, 1, 1]])
    topology = Topology((3, 3), (0, 0), (1.0, 1.0))
    plain, _ = rebalance(loads, topology, 1)
    assert Counter(plain[0].tolist())[0] == 3, "two of three copies share a rank"
    plan = Eplb("global").plan(Problem(loads[None], topology))
    assert all(len(held) == 3 for held in ranks_of(plan.rows, topology.slots)[0])


def test_groups_stay_on_one_node_even_where_copies_had_to_part() -> None:
    loads = np.random.default_rng(1).pareto(0.6, (20, 16)) + 1
    topology = Topology((3,) * 8, (0,) * 4 + (1,) * 4, (1.0,) * 8)
    plain, kept = rebalance(loads, topology, 4)
    assert kept
    assert any(len(held) < 3 for row in ranks_of(plain, topology.slots) for held in row)
    rows = Eplb("hierarchical").plan(Problem(loads[None], topology, groups=4)).rows
    for row in rows.reshape(20, 2, 12):  # by node
        left, right = ({int(e) // 4 for e in half} for half in row)
        assert not left & right


def test_ranks_that_differ_get_their_share() -> None:
    loads = np.full((1, 24), 10.0)
    topology = Topology((2, 10, 6, 6), (0,) * 4, (1.0,) * 4)
    rows = Eplb("global").plan(Problem(loads[None], topology)).rows
    assert sorted(rows[0].tolist()) == list(range(24))

    slow = Topology((12, 12), (0, 0), (0.5, 1.0))
    skewed = np.array([np.arange(24, 0, -1.0)])
    rows = Eplb("global").plan(Problem(skewed[None], slow)).rows[0]
    first, second = skewed[0][rows[:12]].sum(), skewed[0][rows[12:]].sum()
    assert first < 0.7 * second
