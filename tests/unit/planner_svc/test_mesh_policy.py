from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from planner_svc.policies.mesh import MeshPolicy
from planner_svc.policies.problem import EMPTY, Loads, PlanError, Problem, Rows, Topology

RANKS, SLOTS, EXPERTS, LAYERS = 8, 9, 64, 4


def topology(
    slots: list[int] | None = None, speeds: list[float] | None = None, nodes: int = 2
) -> Topology:
    slots = slots or [SLOTS] * RANKS
    per_node = -(-len(slots) // nodes)
    return Topology(
        slots=tuple(slots),
        nodes=tuple(rank // per_node for rank in range(len(slots))),
        speeds=tuple(speeds or [1.0] * len(slots)),
    )


def traffic(
    seed: int = 0, skew: float = 0.7, experts: int = EXPERTS, layers: int = LAYERS
) -> Loads:
    """One window, [3 steps, layers, experts], of a log-normal popularity."""
    rng = np.random.default_rng(seed)
    popularity = np.exp(rng.normal(0, skew, (layers, experts)))
    return rng.poisson(1000 * popularity, (3, layers, experts)).astype(np.float64)


def by_rank(row: Rows, slots: tuple[int, ...]) -> list[list[int]]:
    ends = np.cumsum(slots)[:-1]
    return [[int(e) for e in part if e != EMPTY] for part in np.split(row, ends)]


def rank_times(rows: Rows, loads: Loads, ranks: Topology) -> Loads:
    """[layers, ranks with slots] load over speed, an expert's load shared evenly by its copies."""
    times = np.zeros((len(rows), len(ranks.slots)))
    for layer, row in enumerate(rows):
        copies = np.bincount(row[row != EMPTY], minlength=loads.shape[1])
        for rank, held in enumerate(by_rank(row, ranks.slots)):
            times[layer, rank] = (loads[layer, held] / copies[held]).sum() / ranks.speeds[rank]
    return times[:, np.array(ranks.slots) > 0]


def balance(rows: Rows, loads: Loads, ranks: Topology) -> float:
    """Time if perfectly shared by speed over the slowest rank's time, mean over layers."""
    speed = sum(s for s, slots in zip(ranks.speeds, ranks.slots, strict=True) if slots)
    worst = rank_times(rows, loads, ranks).max(axis=1)
    return float((loads.sum(axis=1) / speed / worst).mean())


def moved(old: Rows, old_ranks: Topology, new: Rows, new_ranks: Topology) -> int:
    return sum(
        len(set(after) - set(before))
        for a, b in zip(old, new, strict=True)
        for before, after in zip(
            by_rank(a, old_ranks.slots), by_rank(b, new_ranks.slots), strict=True
        )
    )


def fresh(window: Loads, ranks: Topology, **more: Any) -> Rows:
    problem = Problem(window=window, topology=ranks, **more)
    return MeshPolicy(forecast=False, move_averse=False).plan(problem).rows


def assert_sound(rows: Rows, ranks: Topology, experts: int) -> None:
    """Nothing lost, nothing twice on a rank, no slot empty that could hold a copy."""
    for row in rows:
        held = by_rank(row, ranks.slots)
        assert {e for rank in held for e in rank} == set(range(experts))
        for rank, slots in zip(held, ranks.slots, strict=True):
            assert len(rank) == len(set(rank)) == min(slots, experts)


def test_a_fresh_plan_is_within_a_thousandth_of_even() -> None:
    window = traffic()
    rows = fresh(window, topology())
    assert_sound(rows, topology(), EXPERTS)
    assert balance(rows, window.sum(axis=0), topology()) > 0.999


def test_with_two_slots_a_rank_hot_experts_meet_cold_ones() -> None:
    """Min-max replica counts alone reach .94 here."""
    ranks = topology([2] * 64, nodes=8)
    window = traffic(layers=8)
    rows = fresh(window, ranks)
    assert_sound(rows, ranks, EXPERTS)
    assert balance(rows, window.sum(axis=0), ranks) > 0.965


def joined_with_first(row: Rows, ranks: Topology) -> set[int]:
    """Ranks that a chain of shared experts joins with rank 0."""
    reached, held = {0}, by_rank(row, ranks.slots)
    for _ in held:
        experts = {e for rank in reached for e in held[rank]}
        reached = {rank for rank in range(len(held)) if experts & set(held[rank])}
    return reached


@pytest.mark.parametrize("slots", [[SLOTS] * RANKS, [5] * 16])
def test_shared_experts_join_all_ranks(slots: list[int]) -> None:
    ranks = topology(slots)
    for row in fresh(traffic(layers=8), ranks):
        assert joined_with_first(row, ranks) == set(range(len(slots)))


def test_of_placements_that_are_as_even_a_small_mesh_gets_one_that_joins_its_ranks() -> None:
    ranks = topology([2] * 8, nodes=1)
    rows = fresh(np.full((1, 4, 8), 1000.0), ranks)
    assert balance(rows, np.full((4, 8), 1000.0), ranks) == pytest.approx(1)
    for row in rows:
        assert joined_with_first(row, ranks) == set(range(8))


def test_a_small_mesh_is_nearly_as_even_as_any_placement_makes_it() -> None:
    """The best is found by trying all numbers of copies: largest with smallest is then best."""
    ranks = topology([2] * 6, nodes=1)
    window = traffic(seed=3, skew=0.3, experts=6, layers=16)
    rows = fresh(window, ranks)
    assert_sound(rows, ranks, 6)
    loads = window.sum(axis=0)
    best = []
    for load in loads:
        tops = []
        for copies in itertools.product(range(1, 7), repeat=6):
            if sum(copies) == 12:
                shares = np.sort(np.repeat(load / np.array(copies), copies))
                tops.append((shares[:6] + shares[:5:-1]).max())
        best.append(load.sum() / 6 / min(tops))
    assert balance(rows, loads, ranks) > np.mean(best) - 0.02


def test_the_old_placement_is_kept_when_the_load_has_not_changed() -> None:
    policy, window = MeshPolicy(), traffic()
    first = policy.plan(Problem(window=window, topology=topology())).rows
    again = policy.plan(Problem(window=window, topology=topology(), previous=first)).rows
    assert (again == first).all()


def test_chance_moves_next_to_nothing() -> None:
    rng = np.random.default_rng(1)
    popularity = traffic(seed=5).sum(axis=0)
    policy, previous, fetched = MeshPolicy(), None, 0
    for _ in range(6):
        window = rng.poisson(popularity / 6, (6, LAYERS, EXPERTS)).astype(np.float64)
        rows = policy.plan(Problem(window=window, topology=topology(), previous=previous)).rows
        fetched += 0 if previous is None else moved(previous, topology(), rows, topology())
        previous = rows
    assert fetched <= 0.01 * 5 * LAYERS * RANKS * SLOTS


def test_a_drift_is_followed_with_few_moves() -> None:
    before = traffic(seed=1)
    after = before * np.exp(np.random.default_rng(2).normal(0, 0.15, before.shape[1:]))
    policy = MeshPolicy()
    old = policy.plan(Problem(window=before, topology=topology())).rows
    new = policy.plan(Problem(window=after, topology=topology(), previous=old)).rows
    loads = after.sum(axis=0)
    assert balance(old, loads, topology()) < 0.95
    assert balance(new, loads, topology()) > 0.98
    assert moved(old, topology(), new, topology()) < 0.15 * old.size


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_is_never_worse_than_what_is_in_force(seed: int) -> None:
    old = fresh(traffic(seed), topology())
    window = traffic(seed + 100)
    policy = MeshPolicy(forecast=False)
    new = policy.plan(Problem(window=window, topology=topology(), previous=old)).rows
    loads = window.sum(axis=0)
    worst = [rank_times(rows, loads, topology()).max(axis=1) for rows in (old, new)]
    assert (worst[1] <= worst[0] * (1 + 1e-9)).all()


def test_what_stays_on_its_rank_stays_in_its_slot() -> None:
    old = fresh(traffic(0), topology())
    new = fresh(traffic(1), topology(), previous=old)
    for layer in range(LAYERS):
        for slot, expert in enumerate(old[layer]):
            rank = slot // SLOTS
            if expert in new[layer, rank * SLOTS : (rank + 1) * SLOTS]:
                assert new[layer, slot] == expert


def test_a_dead_rank_costs_few_moves() -> None:
    window, policy = traffic(), MeshPolicy()
    whole, hurt = topology(), topology([SLOTS] * 3 + [0] + [SLOTS + 1] * 4)
    old = policy.plan(Problem(window=window, topology=whole)).rows
    new = policy.plan(
        Problem(window=window, topology=hurt, previous=old, previous_slots=whole.slots)
    ).rows
    assert_sound(new, hurt, EXPERTS)
    assert balance(new, window.sum(axis=0), hurt) > 0.98
    anew = moved(old, whole, fresh(window, hurt), hurt)
    assert moved(old, whole, new, hurt) < 0.3 * anew


def test_slow_ranks_get_less() -> None:
    ranks = topology(speeds=[1.0, 0.7, 1.0, 1.0, 0.7, 1.0, 1.0, 1.0])
    window = traffic()
    assert balance(fresh(window, ranks), window.sum(axis=0), ranks) > 0.995


def test_ranks_with_more_memory_hold_more() -> None:
    ranks = topology([7, 11, 9, 9, 8, 12, 9, 9])
    window = traffic()
    rows = fresh(window, ranks)
    assert_sound(rows, ranks, EXPERTS)
    assert balance(rows, window.sum(axis=0), ranks) > 0.98


def nodes_of_experts(rows: Rows, ranks: Topology) -> list[list[set[int]]]:
    """[layers][experts] nodes that hold the expert, by layer."""
    return [
        [
            {ranks.nodes[rank] for rank, held in enumerate(by_rank(row, ranks.slots)) if e in held}
            for e in range(EXPERTS)
        ]
        for row in rows
    ]


@pytest.mark.parametrize("rule", ["strict", "soft"])
@pytest.mark.parametrize("warm", [False, True])
def test_groups_stay_on_nodes(rule: Any, warm: bool) -> None:
    groups, size = 4, EXPERTS // 4
    policy = MeshPolicy(forecast=False)
    rows = policy.plan(
        Problem(window=traffic(0), topology=topology(), groups=groups, group_rule=rule)
    ).rows
    if warm:
        rows = policy.plan(
            Problem(
                window=traffic(1),
                topology=topology(),
                previous=rows,
                groups=groups,
                group_rule=rule,
            )
        ).rows
    assert_sound(rows, topology(), EXPERTS)
    for nodes in nodes_of_experts(rows, topology()):
        for group in range(groups):
            members = nodes[group * size : (group + 1) * size]
            assert set.intersection(*members)
            if rule == "strict":
                assert len(set.union(*members)) == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_soft_rule_sends_few_copies_off_their_node(seed: int) -> None:
    """One group is so hot that with strict groups its node is a tenth above its part."""
    window = traffic(seed, skew=0.5, layers=8)
    window[..., : EXPERTS // 4] *= 2
    rule: dict[str, Any] = {"groups": 4}
    strict = fresh(window, topology(), group_rule="strict", **rule)
    soft = fresh(window, topology(), group_rule="soft", **rule)
    loads = window.sum(axis=0)
    assert balance(strict, loads, topology()) < 0.93
    assert balance(soft, loads, topology()) > 0.965
    for layer in nodes_of_experts(soft, topology()):
        assert sum(len(nodes) - 1 for nodes in layer) <= 4


def test_a_group_rule_without_room_is_left_out_and_said() -> None:
    problem = Problem(window=traffic(), topology=topology(nodes=8), groups=2, group_rule="strict")
    plan = MeshPolicy().plan(problem)
    assert_sound(plan.rows, topology(), EXPERTS)
    assert "group rule" in plan.notes[0]


def test_pinned_experts_are_where_they_must_be() -> None:
    pins = {(0, 5): (1, 2, 7), (2, 63): (0,)}
    policy, window = MeshPolicy(), traffic()
    old = policy.plan(Problem(window=window, topology=topology())).rows
    for previous in (None, old):
        rows = policy.plan(
            Problem(window=window, topology=topology(), previous=previous, pins=pins)
        ).rows
        assert_sound(rows, topology(), EXPERTS)
        for (layer, expert), ranks in pins.items():
            held = by_rank(rows[layer], topology().slots)
            assert all(expert in held[rank] for rank in ranks)


def test_more_pins_than_slots_are_refused_with_the_arithmetic() -> None:
    ranks = topology([2, 2], nodes=1)
    with pytest.raises(PlanError, match=r"2 pinned copies and 3 other experts need 5 .* have 4"):
        MeshPolicy().plan(Problem(window=np.ones((1, 1, 4)), topology=ranks, pins={(0, 0): (0, 1)}))
    with pytest.raises(PlanError, match="rank 0 has 1 slots, 2 experts are pinned"):
        MeshPolicy().plan(
            Problem(
                window=np.ones((1, 1, 2)),
                topology=topology([1, 3], nodes=1),
                pins={(0, 0): (0,), (0, 1): (0,)},
            )
        )


def test_fewer_slots_than_experts_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(PlanError, match=r"64 experts .* 9 \+ 9 \+ 0 = 18"):
        MeshPolicy().plan(Problem(window=traffic(), topology=topology([9, 9, 0], nodes=1)))


def test_what_is_no_count_is_ignored_and_said() -> None:
    window = traffic()
    good = fresh(window, topology())
    window = np.concatenate([window, np.zeros((1, *window.shape[1:]))])
    window[3, 0, :3] = np.nan, -np.inf, np.inf
    window[3, 1, 5] = -7
    plan = MeshPolicy(forecast=False).plan(Problem(window=window, topology=topology()))
    assert (plan.rows == good).all()
    assert plan.notes == ("ignored 1 NaN, 2 infinite and 1 negative counts",)


def test_all_load_on_one_expert_is_shared_by_all_ranks() -> None:
    window = np.zeros((2, 1, EXPERTS))
    window[:, 0, 17] = 1e12
    rows = fresh(window, topology())
    assert_sound(rows, topology(), EXPERTS)
    assert balance(rows, window.sum(axis=0), topology()) > 0.999999


@pytest.mark.parametrize("value", [0.0, 1.0, 1e12])
def test_equal_loads_share_out_evenly(value: float) -> None:
    ranks = topology([8] * RANKS)
    rows = fresh(np.full((2, 2, EXPERTS), value), ranks)
    assert_sound(rows, ranks, EXPERTS)
    assert balance(rows, np.ones((2, EXPERTS)), ranks) == 1.0


def test_slots_beyond_a_copy_on_every_rank_stay_empty() -> None:
    ranks = topology([7, 3], nodes=1)
    rows = fresh(np.ones((1, 1, 4)), ranks)
    assert_sound(rows, ranks, 4)
    assert (rows == EMPTY).sum() == 3


def swing() -> tuple[Loads, Loads]:
    day = traffic(0)
    return day, day * np.exp(np.random.default_rng(3).normal(0, 0.3, day.shape[1:]))


def shares(loads: Loads) -> Loads:
    return loads / loads.sum(axis=1, keepdims=True)


def test_loads_that_alternate_are_foreseen() -> None:
    day, night = swing()
    policy = MeshPolicy()
    for _ in range(4):
        policy.plan(Problem(window=day, topology=topology()))
        expected = policy.plan(Problem(window=night, topology=topology())).expected
    assert np.allclose(shares(expected), shares(day.sum(axis=0)))


def test_after_an_abrupt_shift_only_the_newest_window_counts() -> None:
    day, night = swing()
    other = traffic(2)
    policy = MeshPolicy()
    for window in (day, night, day, night, day, other):
        expected = policy.plan(Problem(window=window, topology=topology())).expected
    assert np.allclose(expected, other.sum(axis=0))
