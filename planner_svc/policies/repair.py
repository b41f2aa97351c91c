"""Make any rows of experts a sound plan with as few changes as it takes. Pure.

API
    ``carried(problem)``            the placement in force, cut to the slots that there are now
    ``finished(rows, problem)``     nothing lost, no avoidable duplicate, pins kept, slots in place

``problem`` is one that ``checks.checked`` has passed. Rows are ``[layers, slots]`` throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from planner_svc.policies.checks import first_slots, held_copies
from planner_svc.policies.problem import EMPTY, Loads, PlanError, Problem, Rows


def carried(problem: Problem) -> Rows:
    """What the ranks hold already, each expert in its slot; ``EMPTY`` where nothing usable is."""
    layers = problem.window.shape[1]
    rows = np.full((layers, sum(problem.topology.slots)), EMPTY, dtype=np.int64)
    for new, old in _blocks(rows, problem):
        width = min(new.shape[1], old.shape[1])
        new[:, :width] = old[:, :width]
        # An expert in a slot that is gone moves up into one that is free.
        for layer in np.flatnonzero((old[:, width:] != EMPTY).any(axis=1)):
            late = old[layer, width:][old[layer, width:] != EMPTY]
            free = np.flatnonzero(new[layer] == EMPTY)[: len(late)]
            new[layer, free] = late[: len(free)]
    return rows


def finished(rows: Rows, problem: Problem, *, near: bool = False, fill: bool = True) -> Rows:
    """A sound plan close to ``rows``, in which an expert that stays on its rank keeps its slot.

    ``near``: copies change places within a node only, and what is added to a rank is looked for
    among the experts of its node first, with strict groups nowhere else. ``fill``: leave no slot
    ``EMPTY``. Raises ``PlanError`` when pins leave no room for all experts.
    """
    layers, experts = problem.window.shape[1:]
    slots = problem.topology.slots
    loads = problem.window.sum(axis=0)  # [layers, experts]
    pins: dict[int, dict[int, set[int]]] = {}
    for (layer, expert), ranks in problem.pins.items():
        for rank in ranks:
            if slots[rank]:
                pins.setdefault(layer, {}).setdefault(rank, set()).add(expert)
    copies = held_copies(rows, slots, experts)
    odd = (copies > 1).any(axis=(1, 2)) | (copies.sum(axis=1) == 0).any(axis=1)
    if fill:
        odd |= (rows == EMPTY).any(axis=1)
    done = rows.copy()
    for layer in range(layers):
        if odd[layer] or layer in pins:
            repair = _Layer(rows[layer], loads[layer], problem, pins.get(layer, {}), near=near)
            done[layer] = repair.run(fill=fill)
    _keep_slots(done, problem)
    return done


class _Layer:
    """One layer under repair: which experts each rank holds."""

    def __init__(
        self,
        row: Rows,
        loads: Loads,
        problem: Problem,
        pins: dict[int, set[int]],
        *,
        near: bool,
    ) -> None:
        topology = problem.topology
        self._slots = topology.slots
        self._speeds = topology.speeds
        self._nodes = topology.nodes
        self._only_near = near and problem.group_rule == "strict"
        self._near = near
        self._pins = pins
        self._load: list[float] = loads.tolist()
        self._copies = [0] * len(self._load)
        starts = first_slots(topology.slots)
        self._held: list[list[int]] = [
            [expert for expert in row[start:end].tolist() if expert != EMPTY]
            for start, end in pairwise(starts)
        ]
        for held in self._held:
            for expert in held:
                self._copies[expert] += 1

    def run(self, *, fill: bool) -> Sequence[int]:
        """Returns the repaired row ``[slots]``."""
        for rank in range(len(self._held)):
            self._part_twins(rank)
        for rank, experts in self._pins.items():
            for expert in sorted(experts - set(self._held[rank])):
                self._pin(expert, rank)
        lost = [expert for expert, copies in enumerate(self._copies) if not copies]
        for expert in sorted(lost, key=lambda e: (-self._load[e], e)):
            self._place(expert)
        if fill:
            for rank in self._by_load():
                while len(self._held[rank]) < self._slots[rank]:
                    self._add(self._hottest_absent(rank), rank)
        return [
            expert
            for held, slots in zip(self._held, self._slots, strict=True)
            for expert in [*held, *[EMPTY] * (slots - len(held))]
        ]

    # -------------------------------------------------------------- steps

    def _part_twins(self, rank: int) -> None:
        """A second copy on one rank changes places with an expert of like load on another, or is
        dropped when every rank has one.
        """
        held = self._held[rank]
        for slot in range(len(held) - 1, -1, -1):
            expert = held[slot]
            if expert not in held[:slot]:
                continue
            partner = self._partner(expert, rank)
            if partner is None:
                self._drop(slot, rank)
            else:
                other, place = partner
                held[slot], self._held[other][place] = self._held[other][place], expert

    def _partner(self, twin: int, rank: int) -> tuple[int, int] | None:
        best: tuple[float, int, int] | None = None
        for other, held in enumerate(self._held):
            away = self._nodes[other] != self._nodes[rank]
            if twin in held or (away and self._near):
                continue
            fixed = self._pins.get(other, ())
            for place, expert in enumerate(held):
                if expert in self._held[rank] or expert in fixed or held.count(expert) > 1:
                    continue
                gap = abs(self._share(expert) - self._share(twin))
                candidate = (gap, other, place)
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else best[1:]

    def _pin(self, expert: int, rank: int) -> None:
        held, fixed = self._held[rank], self._pins[rank]
        if len(held) >= self._slots[rank]:
            # Rather a copy of many; the last copy of an expert finds another rank later.
            slot = min(
                (slot for slot, other in enumerate(held) if other not in fixed),
                key=lambda slot: (self._copies[held[slot]] == 1, self._share(held[slot])),
            )
            self._drop(slot, rank)
        self._add(expert, rank)

    def _place(self, expert: int) -> None:
        for rank in self._by_load():
            if len(self._held[rank]) < self._slots[rank]:
                self._add(expert, rank)
                return
        rank, slot = min(self._spare_copies(), key=self._loss, default=(-1, -1))
        if rank < 0:
            raise PlanError(
                f"pinned experts leave no room for expert {expert} on ranks of "
                f"{' + '.join(map(str, self._slots))} = {sum(self._slots)} slots"
            )
        self._drop(slot, rank)
        self._add(expert, rank)

    def _spare_copies(self) -> Iterator[tuple[int, int]]:
        """(rank, slot) of copies that may go."""
        for rank, held in enumerate(self._held):
            fixed = self._pins.get(rank, ())
            for slot, expert in enumerate(held):
                if self._copies[expert] > 1 and expert not in fixed:
                    yield rank, slot

    def _loss(self, place: tuple[int, int]) -> tuple[float, float]:
        rank, slot = place
        return self._share(self._held[rank][slot]), self._rank_load(rank)

    def _hottest_absent(self, rank: int) -> int:
        """The expert whose copies are busiest, of those that the rank lacks; of all of them when it
        has each already.
        """
        held = set(self._held[rank])
        absent = [expert for expert in range(len(self._load)) if expert not in held]
        if self._near:
            at_hand = {
                expert
                for other, experts in enumerate(self._held)
                if self._nodes[other] == self._nodes[rank]
                for expert in experts
            }
            near = [expert for expert in absent if expert in at_hand]
            absent = near or ([] if self._only_near else absent)
        candidates = absent or sorted(held) or range(len(self._load))
        return max(candidates, key=lambda e: (self._share(e), -self._copies[e], -e))

    # -------------------------------------------------------------- bookkeeping

    def _share(self, expert: int) -> float:
        """Load of one copy."""
        return self._load[expert] / max(self._copies[expert], 1)

    def _rank_load(self, rank: int) -> float:
        return sum(map(self._share, self._held[rank])) / self._speeds[rank]

    def _by_load(self) -> list[int]:
        """Ranks, the idlest first; of equally idle ones the emptiest."""
        ranks = range(len(self._held))
        return sorted(
            ranks, key=lambda r: (self._rank_load(r), len(self._held[r]) - self._slots[r])
        )

    def _add(self, expert: int, rank: int) -> None:
        self._held[rank].append(expert)
        self._copies[expert] += 1

    def _drop(self, slot: int, rank: int) -> None:
        self._copies[self._held[rank].pop(slot)] -= 1


def _blocks(rows: Rows, problem: Problem) -> Iterator[tuple[Rows, Rows]]:
    """Views ``[layers, slots of a rank]`` of ``rows`` and of the placement in force."""
    if problem.previous is None:
        return
    slots = problem.topology.slots
    before = slots if problem.previous_slots is None else problem.previous_slots
    for new, width, old, old_width in zip(
        first_slots(slots), slots, first_slots(before), before, strict=False
    ):
        yield rows[:, new : new + width], problem.previous[:, old : old + old_width]


def _keep_slots(rows: Rows, problem: Problem) -> None:
    """Reorder each rank's experts in place so that those it has already stay where they are."""
    for new, old in _blocks(rows, problem):
        width = min(new.shape[1], old.shape[1])
        for layer in np.flatnonzero((new[:, :width] != old[:, :width]).any(axis=1)):
            rest: list[int] = new[layer].tolist()
            placed = [EMPTY] * len(rest)
            open_slots = []
            for slot, expert in enumerate([*old[layer, :width].tolist(), *placed[width:]]):
                if expert != EMPTY and expert in rest:
                    rest.remove(expert)
                    placed[slot] = expert
                else:
                    open_slots.append(slot)
            for slot, expert in zip(open_slots, rest, strict=True):
                placed[slot] = expert
            new[layer] = placed
