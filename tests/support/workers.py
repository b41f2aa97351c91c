"""Simulated expert workers: they do with their slots what real ones do when they are told to."""

from __future__ import annotations

from dataclasses import dataclass, field

from mesh.messages import AssignSlots, Placement
from mesh.placement import EMPTY

LAYERS, EXPERTS = (3, 7), 5
"""MoE layers of the simulated model, and the experts of each."""


@dataclass
class Worker:
    incarnation: int
    offered: int
    slots: list[list[int]] = field(default_factory=lambda: [[] for _ in LAYERS])
    """What it holds."""
    command: AssignSlots | None = None
    failed: dict[tuple[int, int], int] = field(default_factory=dict)
    """(layer, slot) that could not be filled for this command -> expert."""
    refused: bool = False
    ready: bool = False
    draining: bool = False
    known: Placement | None = None
    """Newest placement that it heard of."""
    acknowledged_since: int = -1
    """Start of the planner that heard its first acknowledgement."""

    def take(self, command: AssignSlots) -> None:
        if self.command is not None and command.command < self.command.command:
            return
        if self.command is None or command.command != self.command.command:
            self.failed.clear()
            self.refused = False
        self.command = command
        for layer, row in enumerate(command.slots):
            held = self.slots[layer]
            self.slots[layer] = [
                expert if held[at : at + 1] == [expert] else EMPTY for at, expert in enumerate(row)
            ]

    def lacking(self) -> list[tuple[int, int, int]]:
        assert self.command is not None
        return [
            (layer, slot, expert)
            for layer, row in enumerate(self.command.slots)
            for slot, expert in enumerate(row)
            if self.slots[layer][slot] != expert and (layer, slot) not in self.failed
        ]
