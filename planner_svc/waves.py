"""From what the ranks hold to what they are to hold, in small safe steps. Pure.

API
    ``layout_of(placement)``, ``placement_of(layout, ...)``     between the two forms
    ``next_step(layout, wants, room, limit)``                    the loads of the next wave
    ``after(layout, loads, wants)``                              what is held once they are done
    ``trimmed(layout, keep)``                                    without slots that nobody needs

A wave fills empty slots while everything else goes on serving, and then gives up copies that are
not wanted where they are. Rules that hold for every step:

- a load goes into an empty slot, so an expert that stays on its rank stays in its slot;
- a copy is given up only while another remains, and normally only while as many remain as are
  wanted in the end.

Why it ends. Let *missing* be the wanted copies that are not there and *surplus* the copies that are
not wanted there. A step with loads makes missing smaller and never surplus larger; a step without
loads gives up surplus copies. If a layer allows neither, every rank that misses something is full,
and each of its surplus copies is an expert's last or counted upon. Then, in this order:

1. A surplus copy with another copy left is given up: surplus gets smaller.
2. Otherwise each surplus copy on these ranks is the last of its expert, which is wanted (and
   missing) on another of them. Counting slots shows that none of them has a slot beyond what it
   is to hold: with one spare slot per rank this cannot happen. A wanted copy that is not the last
   of its expert is given up: missing grows by one, but the slot goes to an expert whose surplus
   copy is then given up (such loads come first), so that surplus gets smaller in the next step.
3. Otherwise the ranks are full to the last slot with experts that exist once, and must exchange
   them: ``StuckError``. Only a further slot somewhere helps.

So ``(surplus, missing)`` falls lexicographically, but for the one step of 2 that pays for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mesh.messages import Placement
from mesh.placement import EMPTY, local_slots

Slots = tuple[tuple[int, ...], ...]
"""``[moe layers][local slots]`` logical experts of one rank, ``EMPTY`` where there is none."""
Layout = Mapping[str, Slots]
"""What every rank holds."""
Wants = Mapping[str, tuple[frozenset[int], ...]]
"""Rank -> ``[moe layers]`` the experts that it is to hold in the end."""
_Row = dict[str, list[int]]
"""One layer of a layout: rank -> its slots."""


class Load(NamedTuple):
    """One expert that is to be loaded into an empty slot."""

    layer: int
    """Index into the model's MoE layers."""
    rank: str
    slot: int
    expert: int


@dataclass(frozen=True, slots=True)
class Step:
    """The next wave: what to load, and what is held once that is done."""

    loads: tuple[Load, ...]
    layout: Layout


class StuckError(Exception):
    """The target cannot be reached without an expert losing its last copy on the way."""


def rank_key(rank: str) -> tuple[int, str]:
    """Order of ranks: expert-2 before expert-10."""
    return (len(rank), rank)


# ---------------------------------------------------------------- forms


def layout_of(placement: Placement) -> dict[str, Slots]:
    """What each rank of ``placement`` holds."""
    return {rank: local_slots(placement, rank) for rank in placement.ranks}


def placement_of(
    layout: Layout, *, epoch: int, moe_layers: tuple[int, ...], num_experts: int
) -> Placement:
    """Ranks in order; those that hold nothing at all are left out."""
    ranks = sorted((rank for rank in layout if holds_any(layout[rank])), key=rank_key)
    return Placement(
        epoch=epoch,
        moe_layers=moe_layers,
        num_experts=num_experts,
        ranks=tuple(ranks),
        slots_per_rank=tuple(len(layout[rank][0]) for rank in ranks),
        physical_to_logical=tuple(
            tuple(expert for rank in ranks for expert in layout[rank][layer])
            for layer in range(len(moe_layers))
        ),
    )


def holds_any(slots: Slots) -> bool:
    """Whether any slot holds an expert."""
    return any(expert != EMPTY for row in slots for expert in row)


def num_slots(layout: Layout, rank: str) -> int:
    """Slots per layer of a rank; 0 when ``layout`` does not name it."""
    slots = layout.get(rank)
    return len(slots[0]) if slots else 0


def most_filled(slots: Slots) -> int:
    """Experts in the layer that has most."""
    return max((len(row) - row.count(EMPTY) for row in slots), default=0)


def with_spare(serving: int, spare: int, most: int) -> int:
    """``serving`` slots and ``spare`` ones, as far as ``most`` allows."""
    return max(serving, min(serving + spare, most))


def wants_of(layout: Layout) -> Wants:
    """What the ranks hold, as what they are to hold."""
    return {
        rank: tuple(frozenset(row) - {EMPTY} for row in slots) for rank, slots in layout.items()
    }


def resized(slots: Slots, count: int) -> Slots:
    """With ``count`` slots per layer; what no longer fits is cut off."""
    return tuple(row[:count] + (EMPTY,) * (count - len(row)) for row in slots)


def with_loads(layout: Layout, loads: Collection[Load]) -> dict[str, Slots]:
    """``layout`` once every load is in its slot."""
    result = dict(layout)
    for rank in {load.rank for load in loads}:
        rows = [list(row) for row in layout[rank]]
        for load in loads:
            if load.rank == rank:
                rows[load.layer][load.slot] = load.expert
        result[rank] = tuple(map(tuple, rows))
    return result


def missing(layout: Layout, wants: Wants) -> int:
    """Copies that are yet to be loaded."""
    return sum(
        len(experts.difference(layout[rank][layer] if rank in layout else ()))
        for rank, layers in wants.items()
        for layer, experts in enumerate(layers)
    )


# ---------------------------------------------------------------- steps


def next_step(
    layout: Layout,
    wants: Wants,
    limit: int,
    *,
    skip: Collection[tuple[int, str, int]] = (),
    prefer: Mapping[tuple[int, str, int], int] | None = None,
) -> Step | None:
    """The next wave of at most ``limit`` loads on the way from ``layout`` to ``wants``, lowest
    layers first; None once nothing is left to do.

    ``layout`` holds every rank of ``wants``, with as many slots as the rank may use on the way.
    Loads ``(layer, rank, expert)`` in ``skip`` are left for later: when nothing else can be done,
    the step is empty and its layout is ``layout``. ``prefer`` names the slot that a load is to go
    to if it is empty. Raises ``StuckError``.
    """
    num_layers = max((len(slots) for slots in layout.values()), default=0)
    loads: list[Load] = []
    rows: dict[str, list[tuple[int, ...]]] = {rank: list(slots) for rank, slots in layout.items()}
    reached, changed = True, False
    for layer in range(num_layers):
        row = {rank: list(slots[layer]) for rank, slots in layout.items()}
        wanted = {rank: layers[layer] for rank, layers in wants.items()}
        if _reached(row, wanted):
            continue
        reached = False
        if len(loads) >= limit:
            break
        skipped = {(rank, expert) for at, rank, expert in skip if at == layer}
        slots = {
            (rank, expert): slot
            for (at, rank, expert), slot in (prefer or {}).items()
            if at == layer
        }
        chosen = [
            Load(layer, *load) for load in _choose(row, wanted, limit - len(loads), skipped, slots)
        ]
        for load in chosen:
            row[load.rank][load.slot] = load.expert
        changed = _give_up(row, wanted, None) or bool(chosen) or bool(skipped) or changed
        loads += chosen
        for rank, held in row.items():
            rows[rank][layer] = tuple(held)
    if reached:
        return None
    result = {rank: tuple(held) for rank, held in rows.items()}
    return Step(tuple(loads), result if changed else _with_room(result, wants))


def _with_room(layout: Layout, wants: Wants) -> dict[str, Slots]:
    """By the module's rules 1 and 2 in each layer that is not done. Raises ``StuckError``."""
    rows = {rank: list(slots) for rank, slots in layout.items()}
    for layer in range(len(next(iter(layout.values())))):
        row = {rank: list(slots[layer]) for rank, slots in layout.items()}
        wanted = {rank: layers[layer] for rank, layers in wants.items()}
        if not _reached(row, wanted):
            _make_room(row, wanted, layer)
            for rank, held in row.items():
                rows[rank][layer] = tuple(held)
    return {rank: tuple(held) for rank, held in rows.items()}


def after(
    layout: Layout, loads: Collection[Load], wants: Wants, sure: Layout | None = None
) -> dict[str, Slots]:
    """What is held once ``loads`` are in their slots and the copies are given up that this makes
    superfluous. Only copies that are also in ``sure`` (None: all) count as remaining; the loads
    themselves do.
    """
    loaded = with_loads(layout, loads)
    trusted = None if sure is None else with_loads(sure, loads)
    rows: dict[str, list[tuple[int, ...]]] = {rank: list(slots) for rank, slots in loaded.items()}
    for layer in range(max((len(slots) for slots in loaded.values()), default=0)):
        row = {rank: list(slots[layer]) for rank, slots in loaded.items()}
        wanted = {rank: layers[layer] for rank, layers in wants.items()}
        counted = (
            None if trusted is None else {rank: slots[layer] for rank, slots in trusted.items()}
        )
        if _give_up(row, wanted, counted):
            for rank, held in row.items():
                rows[rank][layer] = tuple(held)
    return {rank: tuple(held) for rank, held in rows.items()}


def trimmed(layout: Layout, keep: Mapping[str, int]) -> dict[str, Slots]:
    """Without slots at the end of a rank that are empty in every layer, down to ``keep``."""
    result = dict(layout)
    for rank, slots in layout.items():
        last = max(
            (at + 1 for row in slots for at, expert in enumerate(row) if expert != EMPTY), default=0
        )
        count = min(len(slots[0]), max(last, keep.get(rank, 0)))
        result[rank] = resized(slots, count)
    return result


def _reached(row: _Row, wanted: Mapping[str, frozenset[int]]) -> bool:
    return all(
        sorted(expert for expert in held if expert != EMPTY) == sorted(wanted.get(rank, ()))
        for rank, held in row.items()
    )


def _surplus(held: list[int], wanted: frozenset[int]) -> list[int]:
    """Slots whose expert is not wanted on the rank, or is there twice."""
    return [
        slot
        for slot, expert in enumerate(held)
        if expert != EMPTY and (expert not in wanted or expert in held[:slot])
    ]


def _choose(
    row: _Row,
    wanted: Mapping[str, frozenset[int]],
    limit: int,
    skip: Collection[tuple[str, int]],
    prefer: Mapping[tuple[str, int], int],
) -> list[tuple[str, int, int]]:
    """``(rank, slot, expert)`` of at most ``limit`` loads into empty slots; first those for which
    a rank that is full and waits can then give up a copy.
    """
    lacking = {rank: experts.difference(row[rank]) for rank, experts in wanted.items()}
    waiting = {rank for rank, experts in lacking.items() if experts and EMPTY not in row[rank]}
    frees: dict[int, int] = {}
    for rank, held in row.items():
        for slot in _surplus(held, wanted.get(rank, frozenset())):
            frees[held[slot]] = min(frees.get(held[slot], 2), 0 if rank in waiting else 1)
    offers = sorted(
        (frees.get(expert, 2), expert, rank_key(rank), rank)
        for rank, experts in lacking.items()
        for expert in experts
        if EMPTY in row[rank] and (rank, expert) not in skip
    )
    empty = {
        rank: [slot for slot, expert in enumerate(held) if expert == EMPTY]
        for rank, held in row.items()
    }
    placed: list[tuple[str, int, int]] = []
    for _, expert, _, rank in offers:
        if len(placed) < limit and prefer.get((rank, expert)) in empty[rank]:
            slot = prefer[rank, expert]
            empty[rank].remove(slot)
            placed.append((rank, slot, expert))
    done = {(rank, expert) for rank, _, expert in placed}
    for _, expert, _, rank in offers:
        if len(placed) < limit and empty[rank] and (rank, expert) not in done:
            placed.append((rank, empty[rank].pop(0), expert))
    return placed


def _give_up(
    row: _Row,
    wanted: Mapping[str, frozenset[int]],
    counted: Mapping[str, tuple[int, ...]] | None,
) -> bool:
    """Empty surplus slots of which enough copies remain (those in ``counted``, None: any)."""
    copies = Counter(
        expert
        for rank, held in row.items()
        for slot, expert in enumerate(held)
        if expert != EMPTY and _counts(counted, rank, slot, expert)
    )
    goal = Counter(expert for experts in wanted.values() for expert in experts)
    changed = False
    # Ranks that wait for a slot give up first.
    for rank in sorted(row, key=lambda r: (wanted.get(r, frozenset()) <= set(row[r]), rank_key(r))):
        held = row[rank]
        for slot in reversed(_surplus(held, wanted.get(rank, frozenset()))):
            expert = held[slot]
            left = copies[expert] - _counts(counted, rank, slot, expert)
            if left >= max(1, goal[expert]):
                copies[expert] = left
                held[slot] = EMPTY
                changed = True
    return changed


def _counts(
    counted: Mapping[str, tuple[int, ...]] | None, rank: str, slot: int, expert: int
) -> bool:
    return counted is None or (rank in counted and counted[rank][slot : slot + 1] == (expert,))


def _make_room(row: _Row, wanted: Mapping[str, frozenset[int]], layer: int) -> None:
    """Empty a slot on ranks that wait for one, by the module's rules 1 and 2."""
    copies = Counter(expert for held in row.values() for expert in held if expert != EMPTY)
    waiting = sorted(
        (rank for rank, experts in wanted.items() if not experts <= set(row[rank])), key=rank_key
    )
    made = False
    for rank in waiting:
        held = row[rank]
        for slot in _surplus(held, wanted[rank]):
            if copies[held[slot]] > 1:
                copies[held[slot]] -= 1
                held[slot] = EMPTY
                made = True
                break
    if made:
        return
    copied = [
        (-copies[expert], rank_key(rank), slot, rank)
        for rank in waiting
        for slot, expert in enumerate(row[rank])
        if copies[expert] > 1
    ]
    if not copied:
        names = ", ".join(waiting)
        msg = f"{names} are full in MoE layer index {layer} and hold no expert that has a replica"
        raise StuckError(msg)
    _, _, slot, rank = min(copied)
    row[rank][slot] = EMPTY
