"""What is asked of the roll-out and what it asks for. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mesh.messages import AssignSlots, Placement
from mesh.placement import fault, unserved
from mesh.settings import Settings
from planner_svc.policies.problem import PlanError
from planner_svc.waves import Wants, layout_of, rank_key, wants_of


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What placements of one model have in common."""

    moe_layers: tuple[int, ...]
    num_experts: int


@dataclass(frozen=True, slots=True)
class RolloutRules:
    """``wanted_ranks`` expert workers are waited for, ``patience_s`` at most, before the first
    placement; the others are as in ``PlannerSettings``.
    """

    redundant_slots: int
    spare_slots: int
    wanted_ranks: int
    patience_s: float
    move_slots: int
    move_bytes_per_s: int
    phase_timeout_s: float

    @classmethod
    def of(cls, settings: Settings) -> RolloutRules:
        planner = settings.planner
        return cls(
            redundant_slots=planner.redundant_slots,
            spare_slots=planner.spare_slots,
            wanted_ranks=settings.mesh.experts,
            patience_s=planner.first_placement_wait_s,
            move_slots=planner.move_slots,
            move_bytes_per_s=planner.move_bytes_per_s,
            phase_timeout_s=planner.phase_timeout_s,
        )


@dataclass(frozen=True, slots=True)
class Target:
    """Where a move is to end; spare slots are the roll-out's business.

    ``rows`` ``[moe layers][sum(slots_per_rank)]`` logical experts, -1 for a slot to be left empty.
    A second copy of an expert on one rank counts for nothing.
    """

    ranks: tuple[str, ...]
    slots_per_rank: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    why: str
    """For logs: rebalance, admin."""


@dataclass(frozen=True, slots=True)
class Assign:
    """Effect: send ``command`` to the expert worker ``rank``; ``again`` when it repeats one."""

    rank: str
    command: AssignSlots
    again: bool


@dataclass(frozen=True, slots=True)
class Commit:
    """Effect: ``placement`` is in force; keep it on disk and broadcast it."""

    placement: Placement


@dataclass(frozen=True, slots=True)
class Moved:
    """Effect: ``slots`` more experts serve in slots that were empty."""

    slots: int


@dataclass(frozen=True, slots=True)
class Done:
    """Effect: the target of ``move_to`` is reached."""

    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Effect: a wave towards the target of ``move_to`` failed. It is tried again by itself in
    ``retry_in_s``, or given up when that is None.
    """

    reason: str
    faults: tuple[str, ...]
    retry_in_s: float | None


@dataclass(frozen=True, slots=True)
class Noted:
    """Effect: log ``event`` with ``values``."""

    event: str
    values: dict[str, Any] = field(default_factory=dict)


RolloutEffect = Assign | Commit | Moved | Done | Failed | Noted


def fits(placement: Placement, shape: ModelShape) -> bool:
    """Whether ``placement`` (which a peer or a file gave us) is sound and holds every expert."""
    return (
        placement.epoch > 0
        and placement.moe_layers == shape.moe_layers
        and placement.num_experts == shape.num_experts
        and not fault(placement)
        and not unserved(placement, placement.ranks)
    )


def checked(target: Target, shape: ModelShape, most: Mapping[str, int]) -> Wants:
    """What each rank is to hold; ``most``: ranks that may hold experts -> slots per layer that they
    offer. Raises ``PlanError`` when the target is malformed or does not fit.
    """
    if len(target.ranks) != len(target.slots_per_rank):
        msg = f"{len(target.ranks)} ranks but slot counts for {len(target.slots_per_rank)}"
        raise PlanError(msg)
    if absent := [rank for rank in target.ranks if rank not in most]:
        accepted = ", ".join(sorted(most, key=rank_key)) or "none"
        msg = f"{', '.join(absent)} cannot hold experts now; accepted: {accepted}"
        raise PlanError(msg)
    placement = Placement(
        epoch=1,
        moe_layers=shape.moe_layers,
        num_experts=shape.num_experts,
        ranks=target.ranks,
        slots_per_rank=target.slots_per_rank,
        physical_to_logical=target.rows,
    )
    if wrong := fault(placement):
        raise PlanError(wrong)
    if nowhere := unserved(placement, target.ranks):
        layer, experts = next(iter(nowhere.items()))
        raise PlanError(f"experts {list(experts)} of layer {layer} are on no rank")
    wants = wants_of(layout_of(placement))
    for rank, layers in wants.items():
        if (count := max(map(len, layers))) > most[rank]:
            msg = f"{count} experts in a layer of {rank}, which offers {most[rank]} slots"
            raise PlanError(msg)
    return wants
