"""What one expert worker was told to hold, and what it is known to hold. Pure.

Commands are repeated until they are acknowledged. ``sure`` is what the worker holds whatever
becomes of the command that is under way: what it acknowledged last, less what it was told to give
up since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mesh.messages import AssignSlots, SlotsReady
from mesh.placement import EMPTY
from planner_svc.waves import Load, Slots

RESEND_S = 2.0
"""Pause before an unacknowledged command is sent again; a worker at work ignores the repeat."""
REFUSED_S = 10.0
"""Pause before a command that a worker could not carry out is sent again."""


@dataclass(slots=True)
class RankState:
    """One process of an expert worker, from its first ``Hello`` to its death.

    ``offered``: the most slots per MoE layer that it holds, 0 for any number; ``bundles``: where
    others fetch experts from its memory.
    """

    moe_layers: tuple[int, ...]
    offered: int
    bundles: str
    ready: bool = False
    """Its own word: it serves what it holds."""
    draining: bool = False
    silent: bool = False
    """Nothing has been heard of it for a while: it may be dead, or only slow."""
    answered: bool = False
    """It has acknowledged a command, or refused one: ``sure`` is all that it holds."""
    sure: Slots = ()
    command: AssignSlots | None = None
    acknowledged: bool = False
    due_at: float = 0.0
    error: str = ""
    faults: tuple[str, ...] = ()
    """What went wrong with the newest command, in words."""
    setbacks: int = 0
    """How often it failed since it last loaded something."""

    def __post_init__(self) -> None:
        self.sure = tuple(() for _ in self.moe_layers)

    def greeted(self, offered: int, bundles: str, now: float) -> None:
        """The same process said ``Hello`` again: what was sent meanwhile may be lost."""
        self.offered, self.bundles = offered, bundles
        if not self.acknowledged and not self.error:
            self.due_at = now

    def told(self, slots: Slots) -> bool:
        """Whether its newest command says so."""
        return self.command is not None and self.command.slots == slots

    def tell(self, command: AssignSlots, now: float) -> None:
        """``command`` is its newest; it is due at once."""
        self.sure = tuple(
            tuple(new if held[at : at + 1] == (new,) else EMPTY for at, new in enumerate(row))
            for held, row in zip(self.sure, command.slots, strict=True)
        )
        self.command = command
        self.acknowledged, self.error, self.faults, self.due_at = False, "", (), now

    def forget_command(self) -> None:
        """Tell it anew, even if that says the same."""
        self.command, self.acknowledged, self.error = None, False, ""

    def answer(self, ready: SlotsReady, now: float) -> bool:
        """Take an acknowledgement; False for one that tells nothing new."""
        if self.command is None or self.command.command != ready.command or self.acknowledged:
            return False
        self.answered = True
        self.error = ready.error
        self.faults = (ready.error,) if ready.error else _in_words(ready)
        if ready.error:
            self.setbacks += 1
            self.due_at = now + REFUSED_S
            return True
        held = [list(row) for row in self.command.slots]
        for fault in ready.faults:
            if fault.layer in self.moe_layers:
                row = held[self.moe_layers.index(fault.layer)]
                if 0 <= fault.slot < len(row):
                    row[fault.slot] = EMPTY
        self.sure = tuple(map(tuple, held))
        self.acknowledged = True
        if ready.faults:
            self.setbacks += 1
        elif ready.loaded:
            self.setbacks = 0
        return True

    def does_as_told(self) -> bool:
        """It holds exactly what its newest command says."""
        return self.acknowledged and self.command is not None and self.sure == self.command.slots

    def holds(self, layer: int, slot: int, expert: int) -> bool:
        """Whether it is known to hold ``expert`` there (``layer`` is an index)."""
        return self.sure[layer][slot : slot + 1] == (expert,)

    def failed(self, load: Load) -> bool:
        """Whether it was told to load this and says that it could not."""
        command = self.command
        return (
            command is not None
            and (self.acknowledged or bool(self.error))
            and command.slots[load.layer][load.slot : load.slot + 1] == (load.expert,)
            and not self.holds(load.layer, load.slot, load.expert)
        )

    def lacking(self, slots: Slots) -> Iterator[tuple[int, int, int]]:
        """``(layer index, slot, expert)`` of ``slots`` that it is not known to hold."""
        for layer, row in enumerate(slots):
            for slot, expert in enumerate(row):
                if expert != EMPTY and not self.holds(layer, slot, expert):
                    yield layer, slot, expert


def _in_words(ready: SlotsReady) -> tuple[str, ...]:
    return tuple(
        f"layer {fault.layer} slot {fault.slot} expert {fault.expert}: {fault.reason}"
        for fault in ready.faults
    )
