"""Which placement is in force, which one is being given out, and who must still acknowledge it.

Pure: time is an argument, what must be sent is returned by ``due``. An expert worker becomes a
rank of a placement; it is told its slots by ``AssignSlots`` until ``SlotsReady`` acknowledges the
command. A placement is committed (and only then broadcast) once every rank has acknowledged it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from mesh.messages import AssignSlots, Placement
from mesh.placement import fault, local_slots, unserved
from planner_svc.policies.uniform import UNLIMITED, PlacementError, slots_per_rank, uniform

RESEND_S = 2.0
"""Pause before an unacknowledged command is sent again; a worker at work ignores the repeat."""
RETRY_S = 10.0
"""Pause before a command that a worker could not carry out is tried again."""
_NO_WORKERS = "no expert worker has joined"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What placements of one model have in common."""

    moe_layers: tuple[int, ...]
    num_experts: int


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


@dataclass(slots=True)
class _Rank:
    offered: int
    command: AssignSlots | None = None
    acknowledged: bool = False
    due_at: float = 0.0
    error: str = ""


@dataclass(slots=True)
class Rollout:
    """State of the placement; the planner feeds it events and carries out what ``due`` returns.

    ``wanted_ranks`` expert workers are waited for, ``patience_s`` at most, before the first
    placement. ``stored`` is the plan of an earlier run: its epoch is never undercut, and it is
    used again when exactly its ranks and number of slots come back. ``first_command`` must grow
    from one start of the planner to the next, so that an old acknowledgement matches no new
    command.
    """

    shape: ModelShape
    redundant_slots: int
    wanted_ranks: int
    patience_s: float
    stored: Placement | None
    first_command: int
    committed: Placement | None = None
    proposed: Placement | None = None
    problem: str = _NO_WORKERS
    """Why there is no placement yet, in words."""
    _ranks: dict[str, _Rank] = field(default_factory=dict)
    _commands: int = 0
    _newest_epoch: int = 0
    _waiting_since: float | None = None
    _adopted: bool = False

    def __post_init__(self) -> None:
        if self.stored is not None:
            self._newest_epoch = self.stored.epoch
            if not fits(self.stored, self.shape):
                self.stored = None

    # -------------------------------------------------------------- events

    def joined(self, rank: str, offered: int, now: float) -> None:
        """An expert worker said ``Hello`` (again); whatever it held before counts for nothing."""
        self._ranks[rank] = _Rank(offered=offered)
        if self._waiting_since is None:
            self._waiting_since = now

    def gone(self, rank: str, now: float) -> None:
        """An expert worker died or left. The committed placement stands: the rank's experts wait
        for its next process, as nothing is placed anew.
        """
        if self._ranks.pop(rank, None) is None:
            return
        if self.proposed is not None and rank in self.proposed.ranks:
            self.proposed = None
            self._waiting_since = now

    def learned(self, placement: Placement) -> None:
        """A member knows ``placement``: the newest one survives the planner that made it."""
        if not fits(placement, self.shape):
            return
        self.saw_epoch(placement.epoch)
        if self.committed is None or placement.epoch > self.committed.epoch:
            self.committed = placement
            self.proposed = None
            self._adopted = True

    def saw_epoch(self, epoch: int) -> None:
        """A member reports ``epoch``; a new placement gets a higher one."""
        self._newest_epoch = max(self._newest_epoch, epoch)

    def acknowledged(self, rank: str, command: int, error: str, now: float) -> None:
        """``SlotsReady``; one for a command that is not the rank's newest is ignored."""
        state = self._ranks.get(rank)
        if state is None or state.command is None or state.command.command != command:
            return
        state.error = error
        state.acknowledged = not error
        if error:
            state.due_at = now + RETRY_S

    # -------------------------------------------------------------- decisions

    def due(self, now: float) -> list[Assign | Commit]:
        """Everything that must be done now; call it after each event and each tick."""
        effects: list[Assign | Commit] = []
        if self._adopted and self.committed is not None:
            self._adopted = False
            effects.append(Commit(self.committed))
        if self.committed is None and self.proposed is None:
            self._propose(now)
        target = self.proposed or self.committed
        if target is None:
            return effects
        for rank, state in self._ranks.items():
            slots = (
                local_slots(target, rank)
                if rank in target.ranks
                else tuple(() for _ in target.moe_layers)
            )
            command, again = state.command, True
            if command is None or command.slots != slots or command.epoch != target.epoch:
                self._commands += 1
                command = AssignSlots(
                    command=self.first_command + self._commands,
                    epoch=target.epoch,
                    moe_layers=target.moe_layers,
                    slots=slots,
                )
                state.command, again = command, False
                state.acknowledged, state.error, state.due_at = False, "", now
            if not state.acknowledged and now >= state.due_at:
                state.due_at = now + RESEND_S
                effects.append(Assign(rank, command, again))
        if self.proposed is not None and self._all_acknowledged(self.proposed):
            self.committed, self.proposed, self._waiting_since = self.proposed, None, None
            effects.append(Commit(self.committed))
        return effects

    def errors(self) -> dict[str, str]:
        """Rank -> why it could not take its slots."""
        return {rank: state.error for rank, state in self._ranks.items() if state.error}

    def check(self) -> None:
        """Assert what must hold after each event."""
        for placement in (self.committed, self.proposed):
            if placement is not None:
                assert fits(placement, self.shape)
                assert placement.epoch <= self._newest_epoch
        if self.proposed is not None:
            assert self.committed is None
            assert set(self.proposed.ranks) <= set(self._ranks)
        for state in self._ranks.values():
            assert not (state.acknowledged and (state.error or state.command is None))

    # -------------------------------------------------------------- inside

    def _propose(self, now: float) -> None:
        present = sorted(self._ranks, key=lambda rank: (len(rank), rank))
        if not present or self._waiting_since is None:
            self.problem = _NO_WORKERS
            return
        patient = now - self._waiting_since < self.patience_s
        if len(present) < self.wanted_ranks and patient:
            self.problem = f"waiting for expert workers: {len(present)} of {self.wanted_ranks}"
            return
        try:
            shares = slots_per_rank(
                self.shape.num_experts,
                self.redundant_slots,
                [self._ranks[rank].offered for rank in present],
            )
        except PlacementError as error:
            self.problem = str(error)
            return
        self.problem = ""
        self._newest_epoch += 1
        if self.stored is not None and self._takes(self.stored, sum(shares)):
            self.proposed = msgspec.structs.replace(self.stored, epoch=self._newest_epoch)
            return
        self.proposed = uniform(
            epoch=self._newest_epoch,
            moe_layers=self.shape.moe_layers,
            num_experts=self.shape.num_experts,
            ranks=present,
            shares=shares,
        )

    def _takes(self, placement: Placement, total_slots: int) -> bool:
        """Whether the present ranks, and only they, can hold ``placement`` of ``total_slots``."""
        return (
            set(placement.ranks) == set(self._ranks)
            and sum(placement.slots_per_rank) == total_slots
            and all(
                self._ranks[rank].offered == UNLIMITED or self._ranks[rank].offered >= slots
                for rank, slots in zip(placement.ranks, placement.slots_per_rank, strict=True)
            )
        )

    def _all_acknowledged(self, placement: Placement) -> bool:
        return all(
            (state := self._ranks.get(rank)) is not None and state.acknowledged
            for rank in placement.ranks
        )


def fits(placement: Placement, shape: ModelShape) -> bool:
    """Whether ``placement`` (which a peer or a file gave us) is sound and holds every expert."""
    return (
        placement.epoch > 0
        and placement.moe_layers == shape.moe_layers
        and placement.num_experts == shape.num_experts
        and not fault(placement)
        and not unserved(placement, placement.ranks)
    )
