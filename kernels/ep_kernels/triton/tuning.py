"""Tile shapes: one table, ``[kernel][architecture]``.

An architecture is a CUDA compute capability without the dot. ``INTERPRETED`` stands for Triton's
interpreter on a CPU: its tiles are small, so that little tensors have several. Imports no triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

INTERPRETED: Final = 0
ARCHITECTURES: Final = (80, 90, 100)
"""A100, H100 and H200, B200: what is compiled ahead of time."""

_SAME_FAMILY: Final = {103: 100}
"""Runs what is compiled for the other: the same matrix units and as much shared memory."""


class UnsupportedArchitecture(RuntimeError):
    """There are no tiles for this device; nothing was launched."""

    def __init__(self, what: str) -> None:
        accepted = ", ".join(f"sm_{arch}" for arch in ARCHITECTURES)
        super().__init__(
            f"no tile shapes for {what}; accepted are {accepted}, and cpu in Triton's interpreter"
        )


@dataclass(frozen=True, slots=True)
class Tile:
    """How one kernel is cut up: ``blocks`` are passed to it as constants."""

    blocks: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1

    def __getitem__(self, block: str) -> int:
        return self.blocks[block]


def _everywhere(tile: Tile, interpreted: Tile) -> dict[int, Tile]:
    return {INTERPRETED: interpreted, **dict.fromkeys(ARCHITECTURES, tile)}


TABLE: Final[Mapping[str, Mapping[int, Tile]]] = {
    # One row a program and few values a row: one warp, so that no sum crosses warps.
    "gate": _everywhere(Tile(num_warps=1), Tile()),
    "counting": _everywhere(
        Tile({"BLOCK": 64, "COLUMNS": 4, "ROWS": 128}), Tile({"BLOCK": 8, "COLUMNS": 4, "ROWS": 2})
    ),
    "permute.plan": _everywhere(Tile({"TILES": 8}), Tile({"TILES": 4})),
    # 16 bytes a thread and load.
    "permute": _everywhere(Tile({"BLOCK": 1024}), Tile({"BLOCK": 16})),
}


def tile(kernel: str, architecture: int) -> Tile:
    """``kernel``'s tile on ``architecture``, one of ``ARCHITECTURES`` or ``INTERPRETED``."""
    return TABLE[kernel][architecture]


def architecture_of(device: torch.device) -> int:
    """The table's column for ``device``. Raises ``UnsupportedArchitecture``."""
    if device.type == "cpu":
        return INTERPRETED
    if device.type != "cuda":
        raise UnsupportedArchitecture(f"device {device.type!r}")
    major, minor = torch.cuda.get_device_capability(device)
    found = 10 * major + minor
    found = _SAME_FAMILY.get(found, found)
    if found not in ARCHITECTURES:
        raise UnsupportedArchitecture(f"sm_{found}")
    return found
