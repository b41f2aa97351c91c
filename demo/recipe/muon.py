"""Muon: momentum whose update is orthogonalised, for the weight matrices of the body."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Approximate U V^T of each matrix's singular value decomposition, for a batch [n, r, c].

    Newton-Schulz with the quintic coefficients that trade exactness for speed: the singular
    values end up between about 0.7 and 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = g.shape[-2] > g.shape[-1]
    x = g.transpose(-1, -2) if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(-1, -2) if tall else x


@dataclass
class _Slot:
    """One parameter, seen as a batch of matrices [n, r, c], with its momentum of that shape."""

    parameter: torch.nn.Parameter
    matrices: Tensor
    momentum: Tensor


class Muon:
    """Steps all matrices of one shape in a single batched orthogonalisation."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.02,
    ) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self._by_shape: dict[tuple[int, ...], list[_Slot]] = {}
        for name, p in parameters:
            matrices = p.data
            if name.endswith("gate_up"):  # [E, 2M, D] holds two matrices an expert
                matrices = matrices.view(-1, p.shape[1] // 2, p.shape[2])
            elif p.dim() == 2:
                matrices = matrices.unsqueeze(0)
            slot = _Slot(p, matrices, torch.zeros_like(matrices))
            self._by_shape.setdefault(tuple(matrices.shape[1:]), []).append(slot)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update the parameters from their gradients, at ``scale`` times the learning rate."""
        lr = self.lr * scale
        for (rows, columns), slots in self._by_shape.items():
            updates = []
            for slot in slots:
                assert slot.parameter.grad is not None
                grad = slot.parameter.grad.view_as(slot.matrices)
                slot.momentum.lerp_(grad, 1 - self.momentum)
                updates.append(torch.lerp(grad, slot.momentum, self.momentum))
            directions = orthogonalise(torch.cat(updates))
            stretch: float = max(1.0, rows / columns) ** 0.5
            first = 0
            for slot in slots:
                n = slot.matrices.shape[0]
                direction = directions[first : first + n]
                slot.matrices.mul_(1 - lr * self.weight_decay).add_(direction, alpha=-lr * stretch)
                first += n

    def state(self) -> list[Tensor]:
        """The momenta, in a fixed order."""
        return [slot.momentum for slots in self._by_shape.values() for slot in slots]

    def load_state(self, momenta: list[Tensor]) -> None:
        """Take back what ``state`` gave."""
        for mine, saved in zip(self.state(), momenta, strict=True):
            mine.copy_(saved)
