"""Questions about a ``Placement``, answered without the planner. Pure.

API
    ``fault(placement) -> str``                     why it is malformed; empty when it is sound
    ``rank_offsets(placement)``                     first physical slot of each rank
    ``local_slots(placement, rank)``                ``[moe layers][local slots]`` -> logical expert
    ``replicas(placement)``                         ``[moe layers][logical expert]`` -> places
    ``unserved(placement, live)``                   experts that no live rank holds
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from typing import NamedTuple

from mesh.messages import Placement

EMPTY = -1
"""Logical expert of a spare slot."""


class Place(NamedTuple):
    """One physical expert: the rank that holds it and the slot there."""

    rank: int
    local_slot: int


def fault(placement: Placement) -> str:
    """What makes a placement unusable, in words; empty when nothing does.

    A logical expert without a slot is no fault: it may be between two homes.
    """
    ranks, slots = placement.ranks, placement.slots_per_rank
    if len(ranks) != len(slots):
        return f"{len(ranks)} ranks but slot counts for {len(slots)}"
    if len(set(ranks)) != len(ranks):
        return "a rank is named twice"
    if any(count < 0 for count in slots):
        return "a rank has fewer than 0 slots"
    if len(placement.moe_layers) != len(placement.physical_to_logical):
        return (
            f"{len(placement.moe_layers)} MoE layers but "
            f"{len(placement.physical_to_logical)} rows of slots"
        )
    total = sum(slots)
    for layer, row in zip(placement.moe_layers, placement.physical_to_logical, strict=True):
        if len(row) != total:
            return f"layer {layer} has {len(row)} slots, the ranks have {total}"
        for slot, expert in enumerate(row):
            if not EMPTY <= expert < placement.num_experts:
                return (
                    f"layer {layer} slot {slot} holds expert {expert}, "
                    f"expected -1 to {placement.num_experts - 1}"
                )
    return ""


def rank_offsets(placement: Placement) -> tuple[int, ...]:
    """First physical slot of each rank: ``[ranks]``."""
    return tuple(accumulate(placement.slots_per_rank, initial=0))[:-1]


def local_slots(placement: Placement, rank: str) -> tuple[tuple[int, ...], ...]:
    """What a rank holds: ``[moe layers][local slots]`` logical experts, -1 for empty.

    Raises ``KeyError`` for a member that has no rank in this placement.
    """
    if rank not in placement.ranks:
        raise KeyError(rank)
    index = placement.ranks.index(rank)
    first = rank_offsets(placement)[index]
    last = first + placement.slots_per_rank[index]
    return tuple(row[first:last] for row in placement.physical_to_logical)


def replicas(placement: Placement) -> tuple[tuple[tuple[Place, ...], ...], ...]:
    """Where each logical expert lives: ``[moe layers][num_experts]`` -> places, by rank."""
    places = tuple(
        Place(rank, slot)
        for rank, count in enumerate(placement.slots_per_rank)
        for slot in range(count)
    )  # [physical slots]
    table: list[tuple[tuple[Place, ...], ...]] = []
    for row in placement.physical_to_logical:
        homes: list[list[Place]] = [[] for _ in range(placement.num_experts)]
        for place, expert in zip(places, row, strict=True):
            if expert != EMPTY:
                homes[expert].append(place)
        table.append(tuple(tuple(home) for home in homes))
    return tuple(table)


def unserved(placement: Placement, live: Collection[str]) -> dict[int, tuple[int, ...]]:
    """MoE layer -> logical experts that none of the ``live`` ranks holds; empty when all are."""
    alive = [rank in live for rank in placement.ranks]
    missing: dict[int, tuple[int, ...]] = {}
    for layer, homes in zip(placement.moe_layers, replicas(placement), strict=True):
        gone = tuple(
            expert
            for expert, home in enumerate(homes)
            if not any(alive[place.rank] for place in home)
        )
        if gone:
            missing[layer] = gone
    return missing
