"""Small random experts, and the tables of workers that hold them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from ep_kernels.grouped_ffn import ExpertBank

from expert_svc.slots import Applied, SlotTable
from mesh.messages import Source

HIDDEN, INTER = 16, 8
LAYERS = (1, 3)
EXPERTS = 6

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def expert(layer: int, index: int, hidden: int = HIDDEN, inter: int = INTER) -> Tensors:
    """Gate, up and down of a deterministic random expert."""
    random = torch.Generator().manual_seed(layer * 1000 + index)
    gate, up = torch.randn(2, inter, hidden, generator=random)
    return gate, up, torch.randn(hidden, inter, generator=random)


class Reads:
    """A checkpoint that remembers what was read; what ``broken`` names raises instead."""

    def __init__(self, hidden: int = HIDDEN, inter: int = INTER) -> None:
        self.read: list[tuple[int, int]] = []
        self.broken: dict[tuple[int, int], Exception] = {}
        self.size = hidden, inter

    def __call__(self, layer: int, index: int) -> Tensors:
        self.read.append((layer, index))
        if (layer, index) in self.broken:
            raise self.broken[layer, index]
        return expert(layer, index, *self.size)


def new_table(read: Any, **options: Any) -> SlotTable:
    hidden, inter = getattr(read, "size", (HIDDEN, INTER))
    return SlotTable(
        LAYERS, EXPERTS, lambda slots: ExpertBank(slots, hidden, inter), read, **options
    )


def apply(
    table: SlotTable, first: Sequence[int], second: Sequence[int], epoch: int = 1, **options: Any
) -> Applied:
    """Assign the slots of both layers."""
    options.setdefault("superseded", threading.Event())
    return table.apply(LAYERS, (first, second), epoch, **options)


def source(layer: int, slot: int, address: str, peer_slot: int, peer: str = "peer") -> Source:
    return Source(layer, slot, peer, address, peer_slot)
