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

FP8_ARCHITECTURES: Final = (90, 100)
"""Those of them whose matrix units take FP8."""

_SAME_FAMILY: Final = {103: 100}
"""Runs what is compiled for the other: the same matrix units and as much shared memory."""


class UnsupportedArchitecture(RuntimeError):
    """There are no tiles for this device; nothing was launched."""

    def __init__(self, what: str, accepted: tuple[int, ...] = ARCHITECTURES) -> None:
        names = ", ".join(f"sm_{arch}" for arch in accepted)
        super().__init__(
            f"no tile shapes for {what}; accepted are {names}, and cpu in Triton's interpreter"
        )


@dataclass(frozen=True, slots=True)
class Tile:
    """How one kernel is cut up: ``blocks`` are passed to it as constants."""

    blocks: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1

    def __getitem__(self, block: str) -> int:
        return self.blocks[block]


def _ffn(
    m: int, n: int, k: int, num_warps: int, num_stages: int, *, transposed: bool = False
) -> Tile:
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8, "TRANSPOSED": transposed}
    return Tile(blocks, num_warps, num_stages)


def _everywhere(tile: Tile, interpreted: Tile) -> dict[int, Tile]:
    return {INTERPRETED: interpreted, **dict.fromkeys(ARCHITECTURES, tile)}


TABLE: Final[Mapping[str, Mapping[int, Tile]]] = {
    # One row a program and few values a row: one warp, so that no sum crosses warps.
    "gate": _everywhere(Tile(num_warps=1), Tile()),
    "counting": _everywhere(
        Tile({"BLOCK": 64, "COLUMNS": 4, "ROWS": 128}), Tile({"BLOCK": 8, "COLUMNS": 4, "ROWS": 2})
    ),
    # One program, one sum after the other: one warp, for the same reason.
    "replicas.divide": _everywhere(Tile(num_warps=1), Tile()),
    "permute.plan": _everywhere(Tile({"TILES": 8}), Tile({"TILES": 4})),
    # 16 bytes a thread and load.
    "permute": _everywhere(Tile({"BLOCK": 1024}), Tile({"BLOCK": 64})),
    "quantise.fp8": {
        INTERPRETED: Tile({"BLOCK": 16}),
        **dict.fromkeys(FP8_ARCHITECTURES, Tile({"BLOCK": 8})),
    },
    # Decoding reads each weight once for few rows: low tiles, many stages in flight. Wgmma and
    # tcgen05 want at least 64 rows.
    "grouped_gemm.gate_up.bf16.decode": {
        INTERPRETED: _ffn(8, 32, 32, 4, 1, transposed=True),
        80: _ffn(16, 64, 64, 4, 4),
        90: _ffn(16, 64, 128, 4, 4, transposed=True),
        100: _ffn(16, 64, 128, 4, 4, transposed=True),
    },
    "grouped_gemm.down.bf16.decode": {
        INTERPRETED: _ffn(8, 32, 32, 4, 1, transposed=True),
        80: _ffn(16, 128, 64, 4, 4),
        90: _ffn(16, 128, 128, 4, 4, transposed=True),
        100: _ffn(16, 128, 128, 4, 4, transposed=True),
    },
    "grouped_gemm.gate_up.bf16.prefill": {
        INTERPRETED: _ffn(16, 32, 16, 4, 1),
        80: _ffn(64, 64, 64, 4, 4),
        90: _ffn(128, 128, 64, 8, 3),
        100: _ffn(128, 128, 64, 8, 3),
    },
    "grouped_gemm.down.bf16.prefill": {
        INTERPRETED: _ffn(16, 32, 32, 4, 1),
        80: _ffn(64, 128, 64, 4, 4),
        90: _ffn(128, 256, 64, 8, 4),
        100: _ffn(128, 256, 64, 8, 4),
    },
    # BLOCK_K is what shares a scale. So is gate_up's BLOCK_N, whose results are quantised at once.
    "grouped_gemm.gate_up.fp8.decode": {
        INTERPRETED: _ffn(8, 128, 128, 4, 1, transposed=True),
        90: _ffn(16, 128, 128, 4, 4, transposed=True),
        100: _ffn(16, 128, 128, 4, 4, transposed=True),
    },
    "grouped_gemm.down.fp8.decode": {
        INTERPRETED: _ffn(8, 128, 128, 4, 1, transposed=True),
        90: _ffn(16, 128, 128, 4, 4, transposed=True),
        100: _ffn(16, 128, 128, 4, 4, transposed=True),
    },
    "grouped_gemm.gate_up.fp8.prefill": {
        INTERPRETED: _ffn(16, 128, 128, 4, 1),
        90: _ffn(64, 128, 128, 8, 4),
        100: _ffn(64, 128, 128, 8, 4),
    },
    "grouped_gemm.down.fp8.prefill": {
        INTERPRETED: _ffn(16, 128, 128, 4, 1),
        90: _ffn(64, 128, 128, 4, 4),
        100: _ffn(64, 128, 128, 4, 4),
    },
    "attention.latent": {
        INTERPRETED: Tile({"BLOCK_M": 16, "BLOCK_N": 16}),
        80: Tile({"BLOCK_M": 16, "BLOCK_N": 32}, 4, 2),
        90: Tile({"BLOCK_M": 64, "BLOCK_N": 32}, 8, 2),
        100: Tile({"BLOCK_M": 16, "BLOCK_N": 32}, 4, 2),
    },
    "attention.grouped": {
        INTERPRETED: Tile({"BLOCK_M": 16, "BLOCK_N": 16}),
        80: Tile({"BLOCK_M": 64, "BLOCK_N": 64}, 4, 3),
        90: Tile({"BLOCK_M": 64, "BLOCK_N": 128}, 4, 3),
        100: Tile({"BLOCK_M": 64, "BLOCK_N": 128}, 4, 3),
    },
    "attention.reduce": _everywhere(Tile(num_warps=2), Tile(num_warps=1)),
    "rms_norm": _everywhere(Tile(num_warps=8), Tile(num_warps=1)),
    "latent_rows": _everywhere(Tile(num_warps=4), Tile(num_warps=1)),
    "rotate": _everywhere(Tile({"HEADS": 16}, 4), Tile({"HEADS": 4}, 1)),
    "sampling": {
        INTERPRETED: Tile({"BLOCK": 128}, 1),
        80: Tile({"BLOCK": 4096}, 16),
        90: Tile({"BLOCK": 4096}, 16),
        100: Tile({"BLOCK": 8192}, 16),  # 4096 spill
    },
    "plan": _everywhere(Tile({"BLOCK_T": 128}), Tile({"BLOCK_T": 8}, num_warps=1)),
    "put": _everywhere(
        Tile({"ROWS": 1, "BLOCK_BYTES": 4096, "BLOCK_P": 256}, 8),
        Tile({"ROWS": 8, "BLOCK_BYTES": 512, "BLOCK_P": 16}, num_warps=1),
    ),
    # It waits by words that each thread reads: one warp sees the same.
    "await": _everywhere(Tile(num_warps=1), Tile(num_warps=1)),
    "arrive": _everywhere(Tile({"BLOCK_P": 512}), Tile({"BLOCK_P": 32}, num_warps=1)),
    "answer": _everywhere(
        Tile({"ROWS": 1, "BLOCK_H": 2048}), Tile({"ROWS": 8, "BLOCK_H": 256}, num_warps=1)
    ),
    "combine": _everywhere(
        Tile({"BLOCK_H": 2048, "BLOCKS_H": 2}), Tile({"BLOCK_H": 256, "BLOCKS_H": 2}, num_warps=1)
    ),
    "drain": _everywhere(
        Tile({"ROWS": 1, "BLOCK_H": 2048, "BLOCK_P": 256}),
        Tile({"ROWS": 8, "BLOCK_H": 256, "BLOCK_P": 16}, num_warps=1),
    ),
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


def fp8_architecture_of(device: torch.device) -> int:
    """The same for a kernel that works in FP8."""
    found = architecture_of(device)
    if found not in (*FP8_ARCHITECTURES, INTERPRETED):
        raise UnsupportedArchitecture(f"FP8 on sm_{found}", FP8_ARCHITECTURES)
    return found
