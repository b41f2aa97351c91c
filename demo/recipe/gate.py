"""The router of DeepSeek-V3: sigmoid scores, group-limited top-k, bias-corrected selection."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


@torch.no_grad()
def select_experts(scores: Tensor, bias: Tensor, groups: int, top_groups: int, k: int) -> Tensor:
    """Choose each token's experts.

    The bias steers which experts are chosen, never how much they weigh. A group's rank is the sum
    of its two best corrected scores; only experts of the ``top_groups`` best groups can be chosen.

    Args:
        scores: sigmoid affinities, float [N, E] in (0, 1).
        bias: load-balancing correction, float [E].

    Returns:
        Expert numbers, int64 [N, K], best first.
    """
    group_size = scores.shape[1] // groups
    corrected = scores + bias
    rank = corrected.view(-1, groups, group_size).topk(2, dim=-1)[0].sum(-1)
    allowed = torch.zeros_like(rank).scatter_(1, rank.topk(top_groups, dim=-1)[1], 1).bool()
    allowed = allowed.repeat_interleave(group_size, dim=1)
    return corrected.masked_fill(~allowed, -math.inf).topk(k, dim=-1)[1]


class Gate(nn.Module):
    """Router of one MoE layer."""

    e_score_correction_bias: Tensor

    def __init__(
        self, width: int, experts: int, groups: int, top_groups: int, k: int, scale: float
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.groups, self.top_groups, self.k, self.scale = groups, top_groups, k, scale

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route tokens [N, D] to expert numbers int64 [N, K] and weights float [N, K]."""
        scores = functional.linear(x, self.weight).sigmoid()
        chosen = select_experts(
            scores, self.e_score_correction_bias, self.groups, self.top_groups, self.k
        )
        weights = scores.gather(1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale
