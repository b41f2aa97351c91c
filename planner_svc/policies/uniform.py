"""Placement without regard to loads: the first one, and the policy that keeps what there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mesh.messages import Placement
from planner_svc.policies.checks import checked, first_slots
from planner_svc.policies.problem import EMPTY, Plan, PlanError, Problem, Rows
from planner_svc.policies.repair import carried, finished

UNLIMITED = 0
"""What a rank offers when it holds as many slots as it is given."""


def slots_per_rank(
    num_experts: int, redundant_slots: int, offered: Sequence[int]
) -> tuple[int, ...]:
    """Share ``num_experts + redundant_slots`` physical slots a layer out over the ranks.

    ``offered[r]`` is the most slots that rank ``r`` holds (``UNLIMITED``: any number). Shares
    differ by one at most unless an offer is smaller. No rank gets more slots than there are
    experts, since a second copy on one rank serves nobody; redundant slots for which there is no
    room are left out. Raises ``PlanError`` when even one copy of each expert does not fit.
    """
    room = [num_experts if offer == UNLIMITED else min(offer, num_experts) for offer in offered]
    if sum(room) < num_experts:
        shown = " + ".join(str(slots) for slots in room) or "0"
        msg = (
            f"{num_experts} experts a layer need {num_experts} slots; {len(room)} expert workers "
            f"offer {shown} = {sum(room)}"
        )
        raise PlanError(msg)
    shares = [0] * len(room)
    remaining = min(num_experts + redundant_slots, sum(room))
    unsettled = list(range(len(room)))
    while unsettled:
        each, extra = divmod(remaining, len(unsettled))
        full = [r for r in unsettled if room[r] <= each]
        for position, r in enumerate(full or unsettled):
            shares[r] = room[r] if full else each + (position < extra)
        remaining -= sum(shares[r] for r in full)
        unsettled = [r for r in unsettled if r not in full] if full else []
    return tuple(shares)


def uniform(
    *,
    epoch: int,
    moe_layers: Sequence[int],
    num_experts: int,
    ranks: Sequence[str],
    shares: Sequence[int],
) -> Placement:
    """Place without knowledge of loads: every expert as often as any other, give or take one.

    ``shares[r]`` slots on ``ranks[r]``, as from ``slots_per_rank``. Which experts get the
    redundant slots rotates from layer to layer. No rank holds an expert twice: experts are dealt
    one after another to the ranks with most open slots, which by the Gale-Ryser theorem always
    works out while no share exceeds ``num_experts``. Raises ``PlanError`` otherwise.
    """
    rows = uniform_rows(len(moe_layers), num_experts, shares)
    return Placement(
        epoch=epoch,
        moe_layers=tuple(moe_layers),
        num_experts=num_experts,
        ranks=tuple(ranks),
        slots_per_rank=tuple(shares),
        physical_to_logical=rows,
    )


def uniform_rows(
    num_layers: int, num_experts: int, shares: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """``[layers][slots]``: the experts of ``uniform``, on ranks without names."""
    total = sum(shares)
    if total < num_experts or max(shares, default=0) > num_experts:
        msg = f"shares {tuple(shares)} do not fit {num_experts} experts a layer"
        raise PlanError(msg)
    base, redundant = divmod(total, num_experts)
    rows: list[tuple[int, ...]] = []
    for index in range(num_layers):
        first = index * redundant % num_experts
        held: list[list[int]] = [[] for _ in shares]
        for offset in range(num_experts):
            copies = base + (offset < redundant)
            # Stable sort: ties go to the lowest rank, so that the outcome is reproducible.
            emptiest = sorted(range(len(shares)), key=lambda r: len(held[r]) - shares[r])
            for rank in emptiest[:copies]:
                held[rank].append((first + offset) % num_experts)
        rows.append(tuple(expert for rank in held for expert in sorted(rank)))
    return tuple(rows)


class Uniform:
    """The policy ``uniform``: the placement in force stays, whatever the loads. Slots without an
    expert (at first all of them) are filled as if all experts had the same load.
    """

    name = "uniform"

    def plan(self, problem: Problem) -> Plan:
        """Raises ``PlanError``."""
        problem, notes = checked(problem)
        return Plan(settled(problem), problem.window.sum(axis=0), notes)


def settled(problem: Problem, *, fill: bool = True) -> Rows:
    """The placement in force made sound, or the first one: ``[layers, slots]``.

    ``problem`` is a checked one. ``fill``: leave no slot ``EMPTY``.
    """
    layers, experts = problem.window.shape[1:]
    held = carried(problem)
    even = dataclasses.replace(problem, window=np.ones((1, layers, experts)))
    if (held == EMPTY).all():
        slots = problem.topology.slots
        starts = first_slots(slots)
        room = [min(count, experts) for count in slots]
        columns = [starts[r] + slot for r, count in enumerate(room) for slot in range(count)]
        held[:, columns] = uniform_rows(layers, experts, room)
    return finished(held, even, fill=fill)
