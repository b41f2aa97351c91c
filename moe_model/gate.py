"""The gate: which experts a token goes to, and with what weights.

Sigmoid with a selection bias and groups (DeepSeek-V3), or softmax (Mixtral); see
``ep_kernels.gating``.
"""

from __future__ import annotations

import torch
from ep_kernels.few import FewGate
from ep_kernels.gating import GateKernel, GateRule
from ep_kernels.packed import is_dispatch_bound, pack_linear

from moe_model.architecture import GateSpec


def gate_rule(spec: GateSpec, num_experts: int, top_k: int) -> GateRule:
    return GateRule(
        num_experts,
        top_k,
        spec.scoring,
        spec.num_groups,
        spec.topk_groups,
        spec.normalise,
        spec.norm_epsilon,
        spec.scaling_factor,
    )


class Gate:
    """``x [n, hidden]`` -> experts ``[n, k]`` int32 and their weights ``[n, k]`` fp32.

    ``weight`` is ``[experts, hidden]``; ``bias`` ``[experts]`` or None. Scores are fp32 whatever
    the checkpoint's type. When ``exact`` a row depends on its token alone. One thread at a time.
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
        rule = gate_rule(spec, weight.shape[0], top_k)
        self._linear = pack_linear(weight, "fp32", exact=exact)
        self._choose = GateKernel(rule, bias)
        self._weight = weight if not exact and is_dispatch_bound(*weight.shape) else None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._choose(self._linear(x))

    def few(self, norm: torch.Tensor, epsilon: float) -> FewGate | None:
        """Norm and gate for a few tokens, where calls cost more than the products."""
        if self._weight is None:
            return None
        return FewGate(norm, epsilon, self._weight, self._choose)
