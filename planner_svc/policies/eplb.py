"""DeepSeek's expert-parallel load balancer: its two published policies.

``hierarchical``: the groups of experts are packed on nodes, experts are replicated within their
node, and the physical experts are packed on the node's ranks. ``global``: the same with one group
and one node. As published, hierarchical becomes global when the groups do not divide among the
nodes. Source: the description and example that DeepSeek published with EPLB (2025).

Where the published policies apply (every rank has as many slots and is as fast as any other) the
outcome is theirs, but for two things: a second copy of an expert on one rank changes places with
an expert of like load, and an expert that stays on its rank stays in its slot. They are extended to
ranks that differ: a rank takes as many experts as it has slots, and counts as full as its load
divided by its speed.

``rebalance`` is the published algorithm alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from planner_svc.policies.checks import checked, first_slots
from planner_svc.policies.problem import Loads, Plan, Problem, Rows, Topology
from planner_svc.policies.repair import finished

Floats = npt.NDArray[np.float32]
"""As published, arithmetic is in single precision: equal loads are then told apart alike."""


class Eplb:
    """The policy ``hierarchical`` or ``global``; it keeps no state."""

    def __init__(self, name: Literal["hierarchical", "global"]) -> None:
        self.name: str = name

    def plan(self, problem: Problem) -> Plan:
        """Raises ``PlanError``."""
        problem, notes = checked(problem)
        loads = problem.window.sum(axis=0)
        groups = problem.groups if self.name == "hierarchical" else 1
        rows, divided = rebalance(loads, problem.topology, groups)
        if groups > 1 and not divided:
            notes += (f"{groups} groups do not divide among the nodes: placed as one group",)
        return Plan(finished(rows, problem, near=divided), loads, notes)


def rebalance(loads: Loads, topology: Topology, groups: int) -> tuple[Rows, bool]:
    """``[layers, slots]`` experts for ``loads`` ``[layers, experts]``, and whether the groups were
    kept on nodes.
    """
    weights = loads.astype(np.float32)
    layers, experts = weights.shape
    members: dict[int, list[int]] = {}
    for rank, slots in enumerate(topology.slots):
        if slots:
            members.setdefault(topology.nodes[rank], []).append(rank)
    nodes = list(members.values())
    share = experts // len(nodes)
    fits = all(sum(topology.slots[rank] for rank in ranks) >= share for ranks in nodes)
    divided = groups % len(nodes) == 0 and experts % groups == 0 and fits
    if not divided:
        nodes, groups, share = [[rank for ranks in nodes for rank in ranks]], 1, experts

    # 1. Groups on nodes. ``order[l, n]`` are the experts of node n, group after group.
    grouped = weights.reshape(layers, groups, -1).sum(axis=2)
    strengths = _relative([sum(topology.speeds[rank] for rank in ranks) for ranks in nodes])
    each = groups // len(nodes)
    node_groups = _pack(grouped, [each] * len(nodes), strengths)  # [layers, groups], node by node
    first = node_groups[:, :, None] * (experts // groups) + np.arange(experts // groups)
    order = first.reshape(layers, len(nodes), share)

    rows = np.empty((layers, sum(topology.slots)), dtype=np.int64)
    starts = first_slots(topology.slots)
    for node, ranks in enumerate(nodes):
        # 2. Replicas within the node.
        local = np.take_along_axis(weights, order[:, node], axis=1)  # [layers, share]
        sizes = [topology.slots[rank] for rank in ranks]
        copies, counts = _replicate(local, sum(sizes))  # [layers, node's slots]
        # 3. Physical experts on its ranks.
        per_copy = np.take_along_axis(local / counts, copies, axis=1)
        packed = _pack(per_copy, sizes, _relative([topology.speeds[rank] for rank in ranks]))
        chosen = np.take_along_axis(copies, packed, axis=1)
        placed = np.take_along_axis(order[:, node], chosen, axis=1)
        columns = [slot for rank in ranks for slot in range(starts[rank], starts[rank + 1])]
        rows[:, columns] = placed
    return rows, divided


def _relative(speeds: Sequence[float]) -> Floats:
    """Equal speeds must not round the loads, so the fastest is 1."""
    return np.array(speeds, dtype=np.float32) / np.float32(max(speeds))


def _pack(weights: Floats, capacities: Sequence[int], speeds: Floats) -> Rows:
    """Heaviest first, each to the least loaded pack with room; ``weights`` ``[rows, items]``.

    Returns ``[rows, items]``: the items of the first pack in the order they came, then those of the
    next. The capacities add up to the number of items.
    """
    rows, items = weights.shape
    if all(capacity == 1 for capacity in capacities) and speeds.min() == speeds.max():
        return np.tile(np.arange(items), (rows, 1))
    starts = np.array(first_slots(capacities))
    taken = np.zeros((rows, len(capacities)), dtype=np.int64)
    full = np.array(capacities)
    load = np.zeros((rows, len(capacities)), dtype=np.float32)
    packed = np.empty((rows, items), dtype=np.int64)
    every = np.arange(rows)
    for item in np.argsort(-weights, axis=1, kind="stable").T:
        pack = np.where(taken < full, load / speeds, np.inf).argmin(axis=1)
        packed[every, starts[pack] + taken[every, pack]] = item
        load[every, pack] += weights[every, item]
        taken[every, pack] += 1
    return packed


def _replicate(weights: Floats, slots: int) -> tuple[Rows, Floats]:
    """Each further slot goes to the expert whose copies carry most. ``weights`` ``[rows, experts]``
    -> expert of each slot ``[rows, slots]``, copies of each expert ``[rows, experts]``.
    """
    rows, experts = weights.shape
    copies = np.tile(np.arange(slots), (rows, 1))
    counts = np.ones((rows, experts), dtype=np.float32)
    every = np.arange(rows)
    for slot in range(experts, slots):
        hottest = (weights / counts).argmax(axis=1)
        copies[:, slot] = hottest
        counts[every, hottest] += 1
    return copies, counts
