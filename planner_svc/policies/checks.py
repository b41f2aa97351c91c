"""What goes into a policy is cleaned and checked, and what comes out is verified. Pure.

API
    ``clean(window) -> (window, notes)``      counts that are none are ignored and reported
    ``checked(problem) -> (problem, notes)``  the same problem, cleaned; raises ``PlanError``
    ``verify(plan, problem)``                 raises ``PlanError`` for a plan that must not be used
    ``first_slots(slots)``                    first physical slot of each rank, and the end
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from planner_svc.policies.problem import EMPTY, Loads, Plan, PlanError, Problem, Rows

MAX_TOKENS = 1e15
"""No counter of tokens gets this far; sums of what is below it stay exact enough to compare."""


def clean(window: Loads) -> tuple[Loads, tuple[str, ...]]:
    """``window`` ``[steps, layers, experts]`` with 0 for NaN, infinite, negative and absurdly large
    counts, and how many of each there were, in words. The argument is not changed.
    """
    counts = np.asarray(window, dtype=np.float64)
    odd = {
        "not a number": np.isnan(counts),
        "infinite": np.isinf(counts),
        "negative": np.isfinite(counts) & (counts < 0),
        f"above {MAX_TOKENS:.0e}": np.isfinite(counts) & (counts > MAX_TOKENS),
    }
    found = {name: int(where.sum()) for name, where in odd.items() if where.any()}
    if not found:
        return counts, ()
    notes = tuple(f"{count} counts are {name}; ignored" for name, count in found.items())
    return np.where(np.logical_or.reduce(list(odd.values())), 0.0, counts), notes


def checked(problem: Problem) -> tuple[Problem, tuple[str, ...]]:
    """``problem`` with a clean window, and notes about what was odd.

    Raises ``PlanError`` when its parts contradict each other or when the ranks have too few slots,
    with the arithmetic.
    """
    topology = problem.topology
    ranks = len(topology.slots)
    if problem.window.ndim != 3:
        raise PlanError(f"loads of shape {problem.window.shape}, expected [steps, layers, experts]")
    _, layers, experts = problem.window.shape
    if len(topology.nodes) != ranks or len(topology.speeds) != ranks:
        raise PlanError(
            f"slots of {ranks} ranks, nodes of {len(topology.nodes)}, "
            f"speeds of {len(topology.speeds)}: expected one of each a rank"
        )
    if any(slots < 0 for slots in topology.slots):
        raise PlanError(f"slots {topology.slots}, expected 0 or more a rank")
    if not all(0 < speed < float("inf") for speed in topology.speeds):
        raise PlanError(f"speeds {topology.speeds}, expected more than 0 a rank")
    require_room(experts, topology.slots)
    if problem.groups < 1:
        raise PlanError(f"{problem.groups} expert groups, expected at least 1")
    _check_previous(problem, layers, experts)
    notes = _check_pins(problem, layers, experts)
    window, odd = clean(problem.window)
    return dataclasses.replace(problem, window=window), odd + notes


def require_room(experts: int, slots: Sequence[int]) -> None:
    """Raises ``PlanError`` unless ranks of so many ``slots`` can hold one copy of each expert. A
    rank's slots beyond the number of experts are no room: a second copy there serves nobody.
    """
    room = [min(count, experts) for count in slots]
    if sum(room) < experts or not experts:
        shown = " + ".join(str(count) for count in room) or "0"
        raise PlanError(
            f"{experts} experts a layer need {experts} slots; {len(room)} ranks have "
            f"{shown} = {sum(room)}"
        )


def first_slots(slots: Sequence[int]) -> tuple[int, ...]:
    """``[ranks + 1]``: first physical slot of each rank, then the number of all slots."""
    return tuple(accumulate(slots, initial=0))


def verify(plan: Plan, problem: Problem) -> None:
    """Raises ``PlanError`` when ``plan`` does not fit the topology, loses an expert, has an
    avoidable duplicate or ignores a pin: a policy with such a bug must change nothing.
    """
    _, layers, experts = problem.window.shape
    slots = problem.topology.slots
    rows = np.asarray(plan.rows)
    if rows.shape != (layers, sum(slots)) or not np.issubdtype(rows.dtype, np.integer):
        raise PlanError(
            f"plan of {rows.dtype} {rows.shape}, expected integers ({layers}, {sum(slots)})"
        )
    if rows.min(initial=0) < EMPTY or rows.max(initial=0) >= experts:
        raise PlanError(
            f"plan names experts {rows.min()} to {rows.max()}, expected {EMPTY} to {experts - 1}"
        )
    copies = held_copies(rows, slots, experts)
    lost = np.argwhere(copies.sum(axis=1) == 0)
    if len(lost):
        layer, expert = lost[0]
        raise PlanError(f"plan loses {len(lost)} experts, first expert {expert} of layer {layer}")
    possible = _possible(copies, problem)
    wasted = (copies > 1).any(axis=2) & (possible & (copies == 0)).any(axis=2)
    if wasted.any():
        layer, rank = np.argwhere(wasted)[0]
        raise PlanError(f"plan has an expert of layer {layer} twice on rank {rank}")
    for (layer, expert), ranks in problem.pins.items():
        for rank in ranks:
            if slots[rank] and not copies[layer, rank, expert]:
                raise PlanError(
                    f"plan lacks expert {expert} of layer {layer}, pinned to rank {rank}"
                )


def held_copies(rows: Rows, slots: Sequence[int], experts: int) -> Rows:
    """``[layers, ranks, experts]``: how often a rank holds an expert."""
    layers = len(rows)
    rank_of_slot = np.repeat(np.arange(len(slots)), slots)
    copies = np.zeros((layers, len(slots), experts + 1), dtype=np.int64)
    np.add.at(copies, (np.arange(layers)[:, None], rank_of_slot[None, :], rows), 1)
    return copies[:, :, :experts]  # EMPTY is -1: the last column


def _possible(copies: Rows, problem: Problem) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """``[layers, ranks, experts]``: what a rank might hold. With strict groups only experts of
    groups that are on its node, so that a small node may have to hold one twice.
    """
    if problem.group_rule != "strict" or copies.shape[2] % problem.groups:
        return np.ones(copies.shape, dtype=bool)
    layers, ranks, experts = copies.shape
    nodes = np.array(problem.topology.nodes)
    same_node = nodes[:, None] == nodes[None, :]  # [ranks, ranks]
    grouped = copies.reshape(layers, ranks, problem.groups, -1).sum(axis=3)
    on_node = np.einsum("qr,lrg->lqg", same_node.astype(np.int64), grouped) > 0
    return np.repeat(on_node, experts // problem.groups, axis=2)


def _check_previous(problem: Problem, layers: int, experts: int) -> None:
    if problem.previous is None:
        return
    slots = problem.topology.slots if problem.previous_slots is None else problem.previous_slots
    if len(slots) != len(problem.topology.slots):
        raise PlanError(
            f"the placement in force has {len(slots)} ranks, the topology "
            f"{len(problem.topology.slots)}"
        )
    if problem.previous.shape != (layers, sum(slots)):
        raise PlanError(
            f"the placement in force is {problem.previous.shape}, expected {(layers, sum(slots))}"
        )
    low, high = problem.previous.min(initial=EMPTY), problem.previous.max(initial=EMPTY)
    if low < EMPTY or high >= experts:
        raise PlanError(
            f"the placement in force names experts {low} to {high}, expected {EMPTY} to "
            f"{experts - 1}"
        )


def _check_pins(problem: Problem, layers: int, experts: int) -> tuple[str, ...]:
    slots = problem.topology.slots
    wanted: dict[tuple[int, int], set[int]] = {}
    notes: list[str] = []
    for (layer, expert), ranks in problem.pins.items():
        if not (0 <= layer < layers and 0 <= expert < experts):
            raise PlanError(
                f"expert {expert} of layer {layer} is pinned; expected layers 0 to {layers - 1}, "
                f"experts 0 to {experts - 1}"
            )
        for rank in ranks:
            if not 0 <= rank < len(slots):
                raise PlanError(
                    f"expert {expert} of layer {layer} is pinned to rank {rank}, expected 0 to "
                    f"{len(slots) - 1}"
                )
            if slots[rank]:
                wanted.setdefault((layer, rank), set()).add(expert)
            else:
                notes.append(
                    f"expert {expert} of layer {layer} is pinned to rank {rank}, which has no slots"
                )
    for (layer, rank), pinned in wanted.items():
        if len(pinned) > slots[rank]:
            raise PlanError(
                f"{len(pinned)} experts of layer {layer} are pinned to rank {rank} with "
                f"{slots[rank]} slots"
            )
    return tuple(notes)
