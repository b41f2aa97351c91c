"""Placements as JSON files: ours, and SGLang's ``--init-expert-location``. Pure.

API
    ``PlacementDocument``                      what such a file may hold
    ``proposal(document, placement, ranks)``   the ``Propose`` that carries it out
    ``sglang_map(placement)``                  SGLang's ``physical_to_logical_map``

Ours is a ``Placement``. SGLang's has one row for each layer of the model, whether it has experts
or not, and knows neither ranks nor empty slots: its slots are dealt out in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mesh.messages import Placement, Propose
from mesh.placement import EMPTY

Rows = Sequence[Sequence[int]]


class PlacementJsonError(Exception):
    """It is no placement of this model; says what was expected. Attribute: ``field``."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class PlacementDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either ``physical_to_logical`` with ``ranks`` and ``slots_per_rank``, or SGLang's map."""

    physical_to_logical: tuple[tuple[int, ...], ...] | None = None
    ranks: tuple[str, ...] | None = None
    slots_per_rank: tuple[int, ...] | None = None
    physical_to_logical_map: tuple[tuple[int, ...], ...] | None = None
    epoch: int | None = None
    """Read over: the planner numbers placements."""
    moe_layers: tuple[int, ...] | None = None
    num_experts: int | None = None
    """If given, these two must be the model's."""


def proposal(document: PlacementDocument, placement: Placement, ranks: Sequence[str]) -> Propose:
    """What to ask the planner for, so that ``document`` comes into force.

    ``placement`` is the one in force, ``ranks`` are the expert workers that are there. Empty slots
    are not asked for: the planner keeps spare ones by itself. Raises ``PlacementJsonError``.
    """
    for name in ("moe_layers", "num_experts"):
        given, own = getattr(document, name), getattr(placement, name)
        if given is not None and given != own:
            raise PlacementJsonError(name, f"{name} is {given}, this model's is {own}")
    if (document.physical_to_logical is None) == (document.physical_to_logical_map is None):
        raise PlacementJsonError(
            "physical_to_logical",
            "give either physical_to_logical, with ranks and slots_per_rank, or SGLang's "
            "physical_to_logical_map",
        )
    if document.physical_to_logical_map is not None:
        field = "physical_to_logical_map"
        rows: Rows = _moe_rows(document.physical_to_logical_map, placement)
        names, slots = tuple(ranks), _shares(rows, placement, ranks)
    else:
        field, rows = "physical_to_logical", document.physical_to_logical or ()
        if document.ranks is None or document.slots_per_rank is None:
            missing = "ranks" if document.ranks is None else "slots_per_rank"
            raise PlacementJsonError(missing, f"physical_to_logical needs {missing}")
        names, slots = document.ranks, document.slots_per_rank
        if len(names) != len(slots):
            raise PlacementJsonError(
                "slots_per_rank", f"{len(names)} ranks but slot counts for {len(slots)}"
            )
        if any(count < 0 for count in slots):
            raise PlacementJsonError("slots_per_rank", "a rank has fewer than 0 slots")
    _check(rows, sum(slots), placement, field)
    serving, packed = _without_spares(rows, slots)
    return Propose(ranks=names, slots_per_rank=serving, physical_to_logical=packed)


def sglang_map(placement: Placement) -> dict[str, list[list[int]]]:
    """A file for SGLang's ``--init-expert-location``: serving slots in rank order.

    Layers without experts get a row that SGLang ignores. SGLang deals slots out in equal shares:
    it means the same ranks only where ours hold equally many. Raises ``PlacementJsonError`` while
    a rank serves more experts in one layer than in another (within a move, or after a loss).
    """
    slots, rows = _without_spares(placement.physical_to_logical, placement.slots_per_rank)
    if any(EMPTY in row for row in rows):
        raise PlacementJsonError(
            "format",
            "some rank serves more experts in one layer than in another, which SGLang's format "
            "cannot say: wait for the move to end, or export without a format",
        )
    by_layer = dict(zip(placement.moe_layers, rows, strict=True))
    idle = [slot % placement.num_experts for slot in range(sum(slots))]
    layers = range(max(placement.moe_layers, default=-1) + 1)
    return {"physical_to_logical_map": [list(by_layer.get(layer, idle)) for layer in layers]}


def _moe_rows(rows: Rows, placement: Placement) -> Rows:
    """The rows of the MoE layers, out of one for each of those or for each layer of the model."""
    layers = placement.moe_layers
    if len(rows) == len(layers):
        return rows
    if len(rows) > max(layers):
        return [rows[layer] for layer in layers]
    raise PlacementJsonError(
        "physical_to_logical_map",
        f"physical_to_logical_map has {len(rows)} rows; expected {len(layers)} (the MoE layers) or "
        f"at least {max(layers) + 1} (all layers)",
    )


def _shares(rows: Rows, placement: Placement, ranks: Sequence[str]) -> tuple[int, ...]:
    """Slots of each of ``ranks``: as now if the sum is the same, else equal, the first one more."""
    if not ranks:
        raise PlacementJsonError("physical_to_logical_map", "no expert worker is there to hold it")
    total = len(rows[0]) if rows else 0
    serving, _ = _without_spares(placement.physical_to_logical, placement.slots_per_rank)
    if tuple(ranks) == placement.ranks and sum(serving) == total:
        return serving
    share, more = divmod(total, len(ranks))
    return tuple(share + (index < more) for index in range(len(ranks)))


def _check(rows: Rows, total: int, placement: Placement, field: str) -> None:
    experts, layers = placement.num_experts, placement.moe_layers
    if len(rows) != len(layers):
        raise PlacementJsonError(
            field, f"{field} has {len(rows)} rows, the model {len(layers)} MoE layers"
        )
    for layer, row in zip(layers, rows, strict=True):
        if len(row) != total:
            raise PlacementJsonError(
                field, f"layer {layer} has {len(row)} slots, the ranks have {total}"
            )
        for slot, expert in enumerate(row):
            if not EMPTY <= expert < experts:
                raise PlacementJsonError(
                    field,
                    f"layer {layer} slot {slot} holds expert {expert}, expected -1 (empty) to "
                    f"{experts - 1}",
                )
        if lost := sorted(set(range(experts)).difference(row)):
            raise PlacementJsonError(
                field, f"layer {layer} has no slot for expert {', '.join(map(str, lost[:8]))}"
            )


def _without_spares(
    rows: Rows, slots_per_rank: Sequence[int]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Rows with the experts of each rank first, and no more slots than its fullest layer fills."""
    firsts = [sum(slots_per_rank[:rank]) for rank in range(len(slots_per_rank))]
    held = [
        [
            [expert for expert in row[first : first + count] if expert != EMPTY]
            for first, count in zip(firsts, slots_per_rank, strict=True)
        ]
        for row in rows
    ]  # [layers][ranks] experts
    serving = tuple(
        max((len(layer[rank]) for layer in held), default=0) for rank in range(len(slots_per_rank))
    )
    packed = tuple(
        tuple(
            expert
            for experts, count in zip(layer, serving, strict=True)
            for expert in (*experts, *([EMPTY] * (count - len(experts))))
        )
        for layer in held
    )
    return serving, packed
