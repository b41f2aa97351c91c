"""The routed experts of one layer, forward and backward, expert by expert over sorted tokens.

Autograd over a Python loop of small matrix products spends most of its time on bookkeeping. Here
one function holds the whole layer, so that a training step on one core is mostly arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _RoutedExperts(torch.autograd.Function):
    """y[n] = sum_k weight[n, k] * down[e] (silu(gate[e] x[n]) * up[e] x[n]), e = chosen[n, k]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> tuple[Tensor, Tensor]:
        tokens, k = chosen.shape
        experts, twice_width, hidden = gate_up.shape
        width = twice_width // 2

        # Sort the N * K (token, expert) pairs by expert: each expert's rows become one slice.
        order = torch.argsort(chosen.reshape(-1), stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(tokens * k)
        load = torch.bincount(chosen.reshape(-1), minlength=experts)
        slices = _slices(load)
        token_of_row = order // k

        rows = x[token_of_row]
        row_weights = weights.reshape(-1)[order].unsqueeze(1)
        projected = x.new_empty(tokens * k, twice_width)
        for e, s in slices:
            torch.mm(rows[s], gate_up[e].t(), out=projected[s])
        sigmoid = torch.sigmoid(projected[:, :width])
        activated = projected[:, :width] * sigmoid
        inner = activated * projected[:, width:]
        weighted = inner * row_weights
        y = x.new_empty(tokens * k, hidden)
        for e, s in slices:
            torch.mm(weighted[s], down[e].t(), out=y[s])

        ctx.save_for_backward(
            rows, row_weights, projected, sigmoid, activated, inner, weighted,
            gate_up, down, token_of_row, inverse,
        )  # fmt: skip
        ctx.slices, ctx.k = slices, k
        ctx.mark_non_differentiable(load)
        return y[inverse].view(tokens, k, hidden).sum(1), load

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, Tensor, Tensor]:
        (
            rows, row_weights, projected, sigmoid, activated, inner, weighted,
            gate_up, down, token_of_row, inverse,
        ) = ctx.saved_tensors  # fmt: skip
        dy = grads[0]
        tokens, k, width = dy.shape[0], ctx.k, inner.shape[1]

        dy_rows = dy[token_of_row]
        d_weighted = torch.empty_like(inner)
        d_down = torch.zeros_like(down)
        for e, s in ctx.slices:
            torch.mm(dy_rows[s], down[e], out=d_weighted[s])
            torch.mm(dy_rows[s].t(), weighted[s], out=d_down[e])
        d_weights = (d_weighted * inner).sum(1)
        d_inner = d_weighted.mul_(row_weights)

        d_projected = torch.empty_like(projected)
        torch.mul(d_inner, activated, out=d_projected[:, width:])
        d_activated = d_inner * projected[:, width:]
        torch.mul(d_activated, sigmoid + activated * (1 - sigmoid), out=d_projected[:, :width])
        d_rows = torch.empty_like(rows)
        d_gate_up = torch.zeros_like(gate_up)
        for e, s in ctx.slices:
            torch.mm(d_projected[s], gate_up[e], out=d_rows[s])
            torch.mm(d_projected[s].t(), rows[s], out=d_gate_up[e])

        dx = d_rows[inverse].view(tokens, k, rows.shape[1]).sum(1)
        return dx, None, d_weights[inverse].view(tokens, k), d_gate_up, d_down


def _slices(load: Tensor) -> list[tuple[int, slice]]:
    """The (expert, rows) of each expert that has any rows, from its row counts [E]."""
    ends = load.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(starts, ends, strict=True)) if b > a]


def routed_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply a layer's routed experts.

    Args:
        x: tokens, float [N, D].
        chosen: expert numbers, int64 [N, K].
        weights: their weights, float [N, K].
        gate_up: gate and up projections of all experts, float [E, 2 * M, D].
        down: down projections of all experts, float [E, D, M].

    Returns:
        The weighted sums, float [N, D], and the tokens that each expert received, int64 [E].
    """
    y: Tensor
    load: Tensor
    y, load = _RoutedExperts.apply(x, chosen, weights, gate_up, down)  # type: ignore[no-untyped-call]
    return y, load
