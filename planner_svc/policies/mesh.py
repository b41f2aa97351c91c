"""The default policy: even loads in the next window for few moves."""

from __future__ import annotations

from collections import Counter

import numpy as np

from planner_svc.policies.forecast import Forecast
from planner_svc.policies.native import Solver
from planner_svc.policies.problem import Loads, Plan, PlanError, Problem

TOLERANCE = 9e-4
"""Excess of the fullest rank over the mean at which a plan made anew is good enough."""
KEEP_TOLERANCE = 0.012
"""The same when moves are to be few."""
PRICE = 0.004
"""Least excess, in mean rank loads, that a fetched expert has to remove."""
JOINED = 0.3
EVEN = 0.2
"""In small meshes, where joining all ranks through shared experts costs evenness: what a load that
the routers of a part of the ranks cannot shift elsewhere counts, against the same load of one rank
when tokens split evenly over replicas. Less when planning anew for one window."""
STEPS = 400
"""Most changes of the local search in a layer."""


class MeshPolicy:
    """Exact min-max replica counts, packing that joins all ranks through shared experts, then local
    search; with ``move_averse`` from the placement in force, each change against its price. With
    ``forecast`` for the loads that the next window is expected to bring.
    """

    name = "mesh"

    def __init__(self, forecast: bool = True, move_averse: bool = True) -> None:
        self._solver = Solver()
        self._forecast = Forecast() if forecast else None
        self._move_averse = move_averse

    def plan(self, problem: Problem) -> Plan:
        """Raises ``PlanError``."""
        notes: list[str] = []
        window = _clean(problem.window, notes)
        loads = self._forecast.next(window) if self._forecast else window.sum(axis=0)
        experts = loads.shape[1]
        _check_room(problem, experts)
        previous = problem.previous
        rule, groups = problem.group_rule, problem.groups
        if rule != "off" and (groups < 2 or experts % groups):
            if groups > 1:
                notes.append(f"{experts} experts do not divide into {groups} groups: no group rule")
            rule, groups = "off", 1
        rows, relaxed = self._solver.plan(
            loads,
            problem.topology,
            previous=previous,
            previous_slots=problem.previous_slots or problem.topology.slots,
            keep=self._move_averse and previous is not None,
            groups=groups,
            rule=rule,
            pins=_pins(problem, notes),
            tolerance=KEEP_TOLERANCE if self._move_averse and previous is not None else TOLERANCE,
            price=PRICE,
            joined=JOINED if self._move_averse else EVEN,
            steps=STEPS,
        )
        if relaxed:
            notes.append(f"no room for whole groups on a node in {relaxed} layers: no group rule")
        return Plan(rows=rows, expected=loads, notes=tuple(notes))


def _clean(window: Loads, notes: list[str]) -> Loads:
    """The window without what cannot be a count; ``notes`` says how many there were."""
    window = np.asarray(window, np.float64)
    if np.isfinite(window.sum()) and window.min(initial=0.0) >= 0:
        return window
    good = np.isfinite(window) & (window >= 0)
    bad = window[~good]
    notes.append(
        f"ignored {int(np.isnan(bad).sum())} NaN, {int(np.isinf(bad).sum())} infinite and "
        f"{int((np.isfinite(bad)).sum())} negative counts"
    )
    return np.where(good, window, 0.0)


def _check_room(problem: Problem, experts: int) -> None:
    useful = [min(slots, experts) for slots in problem.topology.slots]
    if sum(useful) < experts:
        shown = " + ".join(map(str, useful)) or "0"
        msg = (
            f"{experts} experts a layer need {experts} slots; the ranks have {shown} = "
            f"{sum(useful)}"
        )
        raise PlanError(msg)


def _pins(problem: Problem, notes: list[str]) -> np.ndarray:
    """``[pins, 3]`` (layer, expert, rank), those on ranks without slots left out and noted."""
    slots = problem.topology.slots
    pins: list[tuple[int, int, int]] = []
    used: dict[tuple[int, int], int] = {}
    layers, experts = problem.window.shape[1:]
    for (layer, expert), ranks in problem.pins.items():
        for rank in sorted(set(ranks)):
            if not (0 <= layer < layers and 0 <= expert < experts and 0 <= rank < len(slots)):
                msg = (
                    f"pin of layer {layer}, expert {expert} to rank {rank}: there are {layers} "
                    f"layers, {experts} experts, {len(slots)} ranks"
                )
                raise PlanError(msg)
            if not slots[rank]:
                notes.append(
                    f"rank {rank} has no slots: expert {expert} of layer {layer} not pinned"
                )
                continue
            used[layer, rank] = used.get((layer, rank), 0) + 1
            if used[layer, rank] > slots[rank]:
                msg = (
                    f"rank {rank} has {slots[rank]} slots, {used[layer, rank]} experts are pinned "
                    "to it"
                )
                raise PlanError(msg)
            pins.append((layer, expert, rank))
    room = sum(min(count, experts) for count in slots)
    for layer in {layer for layer, _, _ in pins}:
        copies = Counter(expert for pinned, expert, _ in pins if pinned == layer)
        needed = experts - len(copies) + copies.total()
        if needed > room:
            msg = (
                f"layer {layer}: {copies.total()} pinned copies and {experts - len(copies)} other "
                f"experts need {needed} slots; the ranks have {room}"
            )
            raise PlanError(msg)
    return np.array(pins, np.int32).reshape(-1, 3)
