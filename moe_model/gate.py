"""The gate: which experts a token goes to, and with what weights.

Sigmoid with a selection bias and groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; the score
of a group is the sum of its two best experts), or softmax (Mixtral).
"""

from __future__ import annotations

import torch
from ep_kernels.packed import pack_linear, serial_rows

from moe_model.architecture import GateSpec

_VECTOR_VALUES = 64
"""A multiple of what one step of ATen's vector loops covers on any CPU."""


class Gate:
    """``x [n, hidden]`` -> experts ``[n, k]`` int64 and their weights ``[n, k]`` fp32.

    ``weight`` is ``[experts, hidden]``; ``bias`` ``[experts]`` or None. Scores are fp32 whatever
    the checkpoint's type. When ``exact`` a row depends on its token alone.
    """

    def __init__(
        self,
        spec: GateSpec,
        top_k: int,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        exact: bool,
    ) -> None:
        self.spec = spec
        self.num_experts = weight.shape[0]
        self.top_k = top_k
        self._bias = None if bias is None else bias.float()
        self._group_size = self.num_experts // spec.num_groups
        self._limits_groups = spec.topk_groups < spec.num_groups
        self._closed = torch.full((1, spec.num_groups, 1), float("-inf"))
        self._total_scale = 1.0 / spec.scaling_factor
        self._exact = exact
        if exact:
            # Whole vectors a row, so that no row falls into a remainder loop's other rounding.
            extra = -self.num_experts % _VECTOR_VALUES
            weight = torch.cat([weight, weight.new_zeros(extra, weight.shape[1])])
        self._linear = pack_linear(weight, "fp32", exact=exact)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self._score(self._linear(x))  # [n, experts]
        choice = scores if self._bias is None else scores + self._bias
        if self._limits_groups:
            choice = self._close_groups(choice)
        experts = torch.topk(choice, self.top_k, -1, True, False)[1]  # [n, k]
        weights = scores.gather(1, experts)
        if self.spec.normalise:
            # Scaling the few sums rather than the weights; each step rounds by itself (exact mode).
            total = weights.sum(-1, True).add_(self.spec.norm_epsilon)
            weights.div_(total.mul_(self._total_scale))
        elif self.spec.scaling_factor != 1.0:
            weights.mul_(self.spec.scaling_factor)
        return experts, weights

    def _score(self, logits: torch.Tensor) -> torch.Tensor:
        if self.spec.scoring == "softmax":
            return torch.softmax(logits[:, : self.num_experts], -1)
        if self._exact:
            for block in serial_rows(logits.shape[0], logits.shape[1]):
                logits[block].sigmoid_()
            return logits[:, : self.num_experts]
        return logits.sigmoid_()

    def _close_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """Minus infinity for every expert outside the best groups, ``[n, experts]``."""
        n = choice.shape[0]
        grouped = choice.view(n, self.spec.num_groups, self._group_size)
        group_scores = torch.topk(grouped, 2, -1, True, False)[0].sum(-1, True)  # [n, groups, 1]
        best = torch.topk(group_scores, self.spec.topk_groups, 1, True, False)[1]
        penalty = self._closed.expand(n, -1, -1).scatter(1, best, 0.0)  # [n, groups, 1]
        return (grouped + penalty).view(n, self.num_experts)
