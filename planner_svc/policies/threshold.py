"""``threshold``: a replica more for a hot expert, one less for a cold one; nothing else moves.

All loads are of one copy of an expert, compared with the layer's mean load of an expert.
"""

from __future__ import annotations

import numpy as np

from planner_svc.policies.checks import checked
from planner_svc.policies.problem import EMPTY, Loads, Plan, PlanError, Problem, Rows
from planner_svc.policies.repair import finished
from planner_svc.policies.uniform import settled


class Threshold:
    """Changes each expert's number of copies by one a plan at most.

    An expert whose copies carry more than ``hot_factor`` x the mean gains a copy on the idlest rank
    below the mean rank load that lacks it. It goes to an empty slot, else takes that of the idlest
    copy that can go without making its own expert hot. An expert with several copies that carry
    less than ``cold_factor`` x the mean loses the one on the busiest rank; the slot stays empty.
    """

    name = "threshold"

    def __init__(self, hot_factor: float, cold_factor: float) -> None:
        """Raises ``PlanError`` for factors by which an expert could gain and lose in turn."""
        if not 0 <= cold_factor <= hot_factor / 2 or hot_factor == float("inf"):
            raise PlanError(
                f"hot_factor {hot_factor} and cold_factor {cold_factor}: expected 0 <= cold_factor "
                "<= hot_factor / 2, or what one plan adds the next one takes away"
            )
        self._hot = hot_factor
        self._cold = cold_factor

    def plan(self, problem: Problem) -> Plan:
        """Raises ``PlanError``."""
        problem, notes = checked(problem)
        loads = problem.window.sum(axis=0)
        rows = settled(problem, fill=False)
        for layer, row in enumerate(rows):
            self._adjust(_Copies(row, loads[layer], layer, problem))
        return Plan(finished(rows, problem, fill=False), loads, notes)

    def _adjust(self, layer: _Copies) -> None:
        mean = float(layer.loads.mean())
        if not mean:
            return
        shares = layer.shares()
        hot = np.flatnonzero(shares > self._hot * mean).tolist()
        cold = np.flatnonzero((shares < self._cold * mean) & (layer.counts > 1)).tolist()
        for expert in cold:
            layer.take_busiest(expert)
        for expert in sorted(hot, key=lambda e: (-shares[e], e)):
            layer.give(expert, self._hot * mean, untouched=set(cold))


class _Copies:
    """One layer's copies and the loads that they carry; ``row`` is changed in place."""

    def __init__(self, row: Rows, loads: Loads, layer: int, problem: Problem) -> None:
        topology = problem.topology
        self.row = row
        self.loads = loads
        self.counts = np.bincount(row[row != EMPTY], minlength=len(loads))
        self._speeds: Loads = np.array(topology.speeds)
        self._even = loads.sum() / sum(
            speed for speed, slots in zip(topology.speeds, topology.slots, strict=True) if slots
        )
        self._ranks = np.repeat(np.arange(len(topology.slots)), topology.slots)  # [slots]
        self._fixed = np.zeros(len(row), dtype=bool)
        for (pinned_layer, expert), ranks in problem.pins.items():
            if pinned_layer == layer:
                self._fixed |= (row == expert) & np.isin(self._ranks, ranks)

    def shares(self) -> Loads:
        """``[experts]`` load of one copy."""
        return self.loads / self.counts

    def take_busiest(self, expert: int) -> None:
        """Empty the slot of the copy on the busiest rank, unless all copies are pinned."""
        slots = np.flatnonzero((self.row == expert) & ~self._fixed)
        if len(slots):
            busiest = self._rank_loads()[self._ranks[slots]].argmax()
            self.row[slots[busiest]] = EMPTY
            self.counts[expert] -= 1

    def give(self, expert: int, limit: float, *, untouched: set[int]) -> None:
        """Add a copy, if a rank can take one without another expert's copies exceeding ``limit``;
        experts ``untouched`` keep the copies they have.
        """
        loads = self._rank_loads()
        for rank in np.argsort(loads, kind="stable"):
            mine = np.flatnonzero(self._ranks == rank)
            held = self.row[mine]
            if loads[rank] >= self._even or not len(mine) or expert in held:
                continue
            slot = self._free_slot(mine, limit, untouched | {expert})
            if slot >= 0:
                if self.row[slot] != EMPTY:
                    self.counts[self.row[slot]] -= 1
                self.row[slot] = expert
                self.counts[expert] += 1
                return

    def _free_slot(self, slots: Rows, limit: float, untouched: set[int]) -> int:
        def idleness(slot: int) -> float:
            expert = int(self.row[slot])
            return -1.0 if expert == EMPTY else float(self.loads[expert] / self.counts[expert])

        def may_go(slot: int) -> bool:
            expert = int(self.row[slot])
            return expert == EMPTY or (
                self.counts[expert] > 1
                and not self._fixed[slot]
                and expert not in untouched
                and self.loads[expert] / (self.counts[expert] - 1) <= limit
            )

        return int(min(filter(may_go, slots.tolist()), key=idleness, default=-1))

    def _rank_loads(self) -> Loads:
        """``[ranks]`` load / speed."""
        filled = self.row != EMPTY
        share = self.loads[self.row[filled]] / self.counts[self.row[filled]]
        loads: Loads = np.zeros(len(self._speeds))
        np.add.at(loads, self._ranks[filled], share)
        return loads / self._speeds
