"""The plain parts of a layer: norm and SwiGLU, with few calls each, because at one token the
calls cost the time.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from ep_kernels.packed import Kind, pack_linear, serial_rows
from torch.nn.functional import rms_norm, silu


class Norm(Protocol):
    """``x [..., width] -> [..., width]``."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


def make_norm(weight: torch.Tensor, eps: float, *, exact: bool) -> Norm:
    """RMS norm (arXiv 1910.07467) with ``weight`` ``[width]``."""
    return _ExactRmsNorm(weight, eps) if exact else _RmsNorm(weight, eps)


class Direction:
    """RMS norm without its weight, and scaled to length 1 instead of root width:
    ``x / sqrt(|x|^2 + width eps)``. A matrix that reads it has ``rms_scale(weight)`` multiplied
    into its columns.
    """

    __slots__ = ("_floor",)

    def __init__(self, width: int, eps: float) -> None:
        self._floor = torch.tensor([(width * eps) ** 0.5])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # Half the time of ATen's composition: hypot does the square, the sum and the root.
        length: torch.Tensor = torch.linalg.vector_norm(x, 2, -1, True)
        return x / length.hypot_(self._floor)


def rms_scale(weight: torch.Tensor) -> torch.Tensor:
    """What turns a ``Direction`` into the RMS norm with ``weight``, ``[width]`` fp64."""
    return weight.double() * math.sqrt(weight.shape[-1])


class _RmsNorm(Direction):
    __slots__ = ("_weight",)

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__(weight.shape[-1], eps)
        self._weight = rms_scale(weight).float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x).mul_(self._weight)


class _ExactRmsNorm:
    """ATen's composition: each step is correctly rounded, so a row never depends on others."""

    __slots__ = ("_eps", "_shape", "_weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight.float()
        self._shape = list(weight.shape)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self._shape, self._weight, self._eps)


class SwiGlu:
    """``down(silu(gate x) * up x)``: ``[n, hidden] -> [n, hidden]``."""

    __slots__ = ("_down", "_exact", "_gate_up", "_halves", "_inner")

    def __init__(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        *,
        kind: Kind,
        exact: bool,
    ) -> None:
        self._inner = gate.shape[0]
        self._halves = [self._inner, self._inner]
        self._gate_up = pack_linear(torch.cat([gate, up]), kind, exact=exact)
        self._down = pack_linear(down, kind, exact=exact)
        self._exact = exact

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self._gate_up(x)  # [n, 2 inner]
        if not self._exact:
            gate, up = gate_up.split_with_sizes(self._halves, 1)
            return self._down(silu(gate).mul_(up))
        inner = self._inner
        act = gate_up.new_empty(gate_up.shape[0], inner)
        for block in serial_rows(gate_up.shape[0], inner):
            torch.mul(silu(gate_up[block, :inner]), gate_up[block, inner:], out=act[block])
        return self._down(act)
