"""What every rank is to hold when ranks have come or gone, with as few moves as it takes. Pure.

API
    ``first(shape, ranks, ...)``            before anything is placed
    ``repaired(layout, sure, room, ...)``   after deaths: a home for every expert that lost its last
    ``shared(layout, room, ...)``           after joins and drains: an even share for each rank

Loads are not looked at: this is what has to happen before anyone knows better. A layer's experts
stay where they are unless their rank holds more than its share or may hold nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from mesh.messages import Placement
from mesh.placement import EMPTY
from planner_svc.moves import ModelShape
from planner_svc.policies.problem import PlanError
from planner_svc.policies.uniform import slots_per_rank, uniform
from planner_svc.waves import (
    Layout,
    Wants,
    layout_of,
    most_filled,
    rank_key,
    resized,
    wants_of,
    with_spare,
)


def first(
    shape: ModelShape,
    most: Mapping[str, int],
    redundant_slots: int,
    spare_slots: int,
    stored: Placement | None,
) -> tuple[Layout, str]:
    """Where experts go at first: as in ``stored`` when exactly its ranks are there and it has as
    many serving slots as are to be shared out, else evenly; and why ``stored`` is not used, in
    words. ``most``: rank -> slots per layer that it offers. Raises ``PlanError`` when these are too
    few.
    """
    ranks = sorted(most, key=rank_key)
    shares = slots_per_rank(shape.num_experts, redundant_slots, [most[rank] for rank in ranks])
    layout, unfit = {}, ""
    if stored is not None:
        layout = layout_of(stored)
        unfit = _unfit(layout, most, sum(shares))
    if stored is None or unfit:
        even = uniform(
            epoch=1,
            moe_layers=shape.moe_layers,
            num_experts=shape.num_experts,
            ranks=ranks,
            shares=shares,
        )
        layout = layout_of(even)
    return {
        rank: resized(
            slots, max(len(slots[0]), with_spare(most_filled(slots), spare_slots, most[rank]))
        )
        for rank, slots in layout.items()
    }, unfit


def _unfit(layout: Layout, most: Mapping[str, int], total: int) -> str:
    """Why the ranks of ``most`` do not begin with ``layout``; empty when they do."""
    if layout.keys() != most.keys():
        return f"it is for {', '.join(layout)}, there are {', '.join(most)}"
    serving = sum(map(most_filled, layout.values()))
    if serving != total:
        return f"it has {serving} serving slots per layer, {total} are to be shared out"
    for rank, slots in layout.items():
        if len(slots[0]) > most[rank]:
            return f"{rank} offers {most[rank]} slots, it needs {len(slots[0])}"
    return ""


def repaired(
    layout: Layout,
    sure: Layout,
    room: Mapping[str, int],
    num_experts: int,
    num_layers: int,
    *,
    last: Mapping[str, int],
    already: Mapping[tuple[int, int], str],
) -> Wants:
    """``layout`` of the live ranks plus a home for each expert that none of them holds: on the rank
    of ``room`` (rank -> most experts per layer) that holds least. Where none has room a replica
    gives way, one that another rank has in ``sure`` too.

    ``last``: rank -> how often it has failed lately; such ranks come last. ``already``: (layer
    index, expert) -> rank that is loading it. Raises ``PlanError``, with the arithmetic, when
    there is no room even so.
    """
    wants = {
        rank: [set(experts) for experts in layers] for rank, layers in wants_of(layout).items()
    }
    for rank in room:
        wants.setdefault(rank, [set() for _ in range(num_layers)])
    for layer in range(num_layers):
        held = {rank: layers[layer] for rank, layers in wants.items()}
        lost = set(range(num_experts)).difference(*held.values())
        if not lost:
            continue
        spared = Counter(
            expert for slots in sure.values() for expert in set(slots[layer]) - {EMPTY}
        )
        for expert in sorted(lost, key=lambda e: ((layer, e) not in already, e)):
            open_ranks = [rank for rank in room if len(held[rank]) < room[rank]]
            if open_ranks:
                home = already.get((layer, expert))
                if home not in open_ranks:
                    home = min(
                        open_ranks, key=lambda r: (last.get(r, 0), len(held[r]), rank_key(r))
                    )
                held[home].add(expert)
                continue
            giving = [
                (-spared[other], rank_key(rank), other, rank)
                for rank in room
                if rank in sure
                for other in held[rank]
                if spared[other] > 1 and other in sure[rank][layer]
            ]
            if not giving:
                offers = " + ".join(str(room[rank]) for rank in sorted(room, key=rank_key)) or "0"
                msg = (
                    f"{len(lost)} of {num_experts} experts in MoE layer index {layer} have no rank;"
                    f" those that are left hold {offers} slots, all in use"
                )
                raise PlanError(msg)
            _, _, other, rank = min(giving)
            spared[other] -= 1
            held[rank].remove(other)
            held[rank].add(expert)
    return _frozen(wants)


def shared(
    layout: Layout, room: Mapping[str, int], num_experts: int, redundant_slots: int
) -> Wants:
    """An even share of ``num_experts + redundant_slots`` copies a layer for each rank of ``room``
    (rank -> most experts per layer), nothing for other ranks of ``layout``.

    Only what ranks hold beyond their share moves, the highest slots first. Copies keep their number
    while it fits; experts with fewest copies are replicated to fill the shares. Raises
    ``PlanError`` when the ranks cannot hold one copy of each.
    """
    num_layers = max((len(slots) for slots in layout.values()), default=0)
    layers = [
        _share(
            {rank: _distinct(slots[layer]) for rank, slots in layout.items()},
            room,
            num_experts,
            redundant_slots,
            first=layer * redundant_slots,
        )
        for layer in range(num_layers)
    ]
    return {rank: tuple(frozenset(held[rank]) for held in layers) for rank in room}


def _share(
    have: Mapping[str, list[int]],
    room: Mapping[str, int],
    num_experts: int,
    redundant_slots: int,
    *,
    first: int,
) -> dict[str, set[int]]:
    """One layer of ``shared``. ``have``: the ranks' experts in the order of their slots."""
    # Those that hold most get what does not divide evenly, so that it need not move.
    order = sorted(room, key=lambda r: (-len(have.get(r, ())), rank_key(r)))
    sizes = slots_per_rank(num_experts, redundant_slots, [room[rank] for rank in order])
    share = dict(zip(order, sizes, strict=True))
    kept = {rank: set(have.get(rank, ())[: share[rank]]) for rank in order}
    copies = Counter(expert for held in kept.values() for expert in held)
    homeless = Counter(expert for held in have.values() for expert in held) - copies
    wanting = [expert for expert in range(num_experts) if not copies[expert]]
    for expert in wanting:
        if not any(len(kept[rank]) < share[rank] for rank in order):
            _drop_replica(kept, copies)
        _give(expert, [rank for rank in order if len(kept[rank]) < share[rank]], kept, share)
        copies[expert] += 1
        homeless[expert] -= 1
    # Then the replicas that were taken off their ranks, then new ones.
    for expert in sorted(homeless.elements()):
        takers = [r for r in order if len(kept[r]) < share[r] and expert not in kept[r]]
        if takers:
            _give(expert, takers, kept, share)
            copies[expert] += 1
    for rank in order:
        while len(kept[rank]) < share[rank]:
            expert = min(
                set(range(num_experts)) - kept[rank],
                key=lambda e: (copies[e], (e - first) % num_experts),
            )
            kept[rank].add(expert)
            copies[expert] += 1
    return kept


def _give(
    expert: int, takers: Iterable[str], kept: dict[str, set[int]], share: Mapping[str, int]
) -> None:
    """To the one that is furthest from its share."""
    taker = min(takers, key=lambda r: (len(kept[r]) - share[r], rank_key(r)))
    kept[taker].add(expert)


def _drop_replica(kept: dict[str, set[int]], copies: Counter[int]) -> None:
    expert = max(copies, key=lambda e: (copies[e], -e))
    assert copies[expert] > 1, "the shares have room for one copy of each expert"
    rank = max((r for r in kept if expert in kept[r]), key=lambda r: (len(kept[r]), rank_key(r)))
    kept[rank].remove(expert)
    copies[expert] -= 1


def _distinct(row: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(expert for expert in row if expert != EMPTY))


def _frozen(wants: Mapping[str, list[set[int]]]) -> Wants:
    return {rank: tuple(map(frozenset, layers)) for rank, layers in wants.items()}
