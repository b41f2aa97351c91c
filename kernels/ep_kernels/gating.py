"""From a gate's logits to each token's experts and their weights, as one call into C.

Scores are the sigmoid or softmax of the logits; ``bias`` is added for the choice alone. With groups
only experts of the ``topk_groups`` best are chosen, where a group counts as much as its two best
experts together (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Weights are the chosen scores,
divided by ``their sum + epsilon`` when ``normalise``, times ``scale``. Of equal experts or groups
the lower numbers are chosen. A row depends on nothing but its own logits; NaN there becomes NaN in
the weights.

``reference_gate`` says the same with torch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ep_kernels.native_library import load


@dataclass(frozen=True, slots=True)
class GateRule:
    """How experts are chosen and weighed."""

    num_experts: int
    top_k: int
    scoring: Literal["sigmoid", "softmax"]
    num_groups: int = 1
    topk_groups: int = 1
    normalise: bool = True
    epsilon: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Raises ``ValueError`` when there are fewer experts to choose from than ``top_k``."""
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_experts} experts do not make {self.num_groups} groups")
        choice = self.num_experts // self.num_groups * self.topk_groups
        if not 1 <= self.topk_groups <= self.num_groups or not 1 <= self.top_k <= choice:
            raise ValueError(
                f"cannot choose {self.top_k} experts from {self.topk_groups} of "
                f"{self.num_groups} groups of {self.num_experts} experts"
            )


class _Gate(ctypes.Structure):
    _fields_ = (
        ("num_experts", ctypes.c_int32),
        ("num_groups", ctypes.c_int32),
        ("topk_groups", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("softmax", ctypes.c_int32),
        ("normalise", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("bias", ctypes.c_void_p),
        ("score", ctypes.c_void_p),
        ("choice", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
        ("group", ctypes.c_void_p),
    )


class GateKernel:
    """``logits [n, at least num_experts] fp32`` -> experts ``[n, top_k]`` int32, best first, and
    weights ``[n, top_k]`` fp32. One thread at a time. ``address`` is C's ``Gate``.
    """

    __slots__ = ("_call", "_held", "address", "top_k")

    def __init__(self, rule: GateRule, bias: torch.Tensor | None) -> None:
        """``bias``: ``[num_experts]`` or None."""
        experts = rule.num_experts
        floats = np.zeros(3 * experts + max(rule.top_k, rule.topk_groups), dtype=np.float32)
        groups = np.zeros(2 * rule.num_groups, dtype=np.int32)
        if bias is not None:
            floats[:experts] = bias.float().numpy()
        start = floats.ctypes.data
        gate = _Gate(
            experts,
            rule.num_groups,
            rule.topk_groups,
            rule.top_k,
            rule.scoring == "softmax",
            rule.normalise,
            rule.epsilon,
            rule.scale,
            None if bias is None else start,
            start + 4 * experts,
            start + 8 * experts,
            start + 12 * experts,
            groups.ctypes.data,
        )
        self._held = (gate, floats, groups)
        self.address = ctypes.addressof(gate)
        self.top_k = rule.top_k
        self._call = load("gate").moemesh_gate
        self._call.restype = None
        pointer, number = ctypes.c_void_p, ctypes.c_int32
        self._call.argtypes = (pointer, pointer, number, number, pointer, pointer)

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, stride = logits.shape
        experts = torch.empty((rows, self.top_k), dtype=torch.int32)
        weights = torch.empty((rows, self.top_k))
        self._call(
            self.address,
            logits.data_ptr(),
            rows,
            stride,
            experts.data_ptr(),
            weights.data_ptr(),
        )
        return experts, weights


def reference_gate(
    rule: GateRule, bias: torch.Tensor | None, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``GateKernel`` computes, in plain torch."""
    logits = logits[:, : rule.num_experts]
    scores = logits.sigmoid() if rule.scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    size = rule.num_experts // rule.num_groups
    grouped = choice.reshape(-1, rule.num_groups, size)  # [n, groups, experts of one]
    best = grouped.topk(min(2, size), -1)[0].sum(-1)  # [n, groups]
    groups = best.sort(dim=1, descending=True, stable=True)[1][:, : rule.topk_groups]
    is_open = torch.zeros_like(best).scatter(1, groups, 1.0).bool()
    choice = grouped.masked_fill(~is_open[:, :, None], float("-inf")).flatten(1)
    experts = choice.sort(dim=1, descending=True, stable=True)[1][:, : rule.top_k]
    weights = scores.gather(1, experts)
    if rule.normalise:
        weights = weights / (weights.sum(1, keepdim=True) + rule.epsilon)
    return experts.int(), weights * rule.scale
