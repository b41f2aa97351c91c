"""Cross-entropy of the language-model head without ever holding all the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 512  # rows of logits held at a time: 512 x 3072 floats stay within a core's share of cache


class _HeadLoss(torch.autograd.Function):
    """Mean cross-entropy, chunk by chunk; the gradients are made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        rows = x.shape[0]
        loss = x.new_zeros(())
        dx, d_weight = torch.empty_like(x), torch.zeros_like(weight)
        for i in range(0, rows, CHUNK):
            part, label = x[i : i + CHUNK], target[i : i + CHUNK, None]
            z = part @ weight.t()
            z -= z.max(1, keepdim=True)[0]
            z_label = z.gather(1, label)
            z.exp_()
            total = z.sum(1, keepdim=True)
            loss += (total.log() - z_label).sum()
            z.div_(total)
            z.scatter_add_(1, label, torch.full_like(z_label, -1.0))
            torch.mm(z, weight, out=dx[i : i + CHUNK])
            d_weight.addmm_(z.t(), part)
        ctx.save_for_backward(dx.div_(rows), d_weight.div_(rows))
        return loss / rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        dx, d_weight = ctx.saved_tensors
        return dx * grads[0], d_weight * grads[0], None


def head_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Mean loss in nats a token, for x [N, D], weight [V, D] and target int64 [N]."""
    loss: Tensor = _HeadLoss.apply(x, weight, target)  # type: ignore[no-untyped-call]
    return loss
