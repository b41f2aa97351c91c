"""The FFN of a dense layer or shared expert."""

from __future__ import annotations

import torch
from ep_kernels.few import FEW_TOKENS, FewDense
from ep_kernels.half_ffn import HalfExpert, half_expert
from ep_kernels.packed import Kind, pack_linear, serial_rows
from torch.nn.functional import silu


class SwiGlu:
    """``down(silu(gate x) * up x)``: ``[n, hidden] -> [n, hidden]``."""

    __slots__ = ("_down", "_exact", "_few", "_gate_up", "_half", "_halves", "_inner")

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
        self._half = half_expert(self._gate_up, self._down)
        self._exact = exact
        self._few = None
        if not exact and 4 * 3 * gate.numel() <= FewDense.MOST_BYTES:
            self._few = FewDense(torch.cat([gate, up]), down)

    @property
    def half(self) -> HalfExpert | None:
        """The same with fp16 weights as one call into C, if it has such."""
        return self._half

    @property
    def few(self) -> FewDense | None:
        """The same for a few tokens as one call into C, if it is small."""
        return self._few

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._few is not None and x.shape[0] <= FEW_TOKENS:
            return self._few(x)
        if self._half is not None:
            return self._half(x)
        gate_up = self._gate_up(x)  # [n, 2 inner]
        if not self._exact:
            gate, up = gate_up.split_with_sizes(self._halves, 1)
            return self._down(silu(gate).mul_(up))
        inner = self._inner
        act = gate_up.new_empty(gate_up.shape[0], inner)
        for block in serial_rows(gate_up.shape[0], inner):
            torch.mul(silu(gate_up[block, :inner]), gate_up[block, inner:], out=act[block])
        return self._down(act)
