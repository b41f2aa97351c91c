"""From a gate's logits to each token's experts and weights: ``ep_kernels.gating`` on a GPU.

One program takes one row: scores, the choice of groups and the top-k stay in registers, and of
equal experts or groups the lower numbers are chosen. ``gating.reference_gate`` is the reference;
weights are divided by a sum taken best first, as on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_kernels.gating import GateRule
from ep_kernels.triton.arguments import KernelArgumentError, check_tensor
from ep_kernels.triton.registry import Variant
from ep_kernels.triton.tuning import architecture_of, tile


@triton.jit
def _gate(
    logits: tl.tensor,  # [rows, at least GROUPS * SIZE]
    bias: tl.tensor,  # [GROUPS * SIZE] fp32
    experts: tl.tensor,  # [rows, TOP_K] int32, out
    weights: tl.tensor,  # [rows, TOP_K] fp32, out
    row_stride: tl.tensor,
    epsilon: tl.tensor,
    scale: tl.tensor,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BIASED: tl.constexpr,
    NORMALISE: tl.constexpr,
    GROUPS_P2: tl.constexpr,
    SIZE_P2: tl.constexpr,
    TOP_K_P2: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_P2)
    member = tl.arange(0, SIZE_P2)
    exists = (group < GROUPS)[:, None] & (member < SIZE)[None, :]  # [groups, experts of one]
    index = group[:, None] * SIZE + member[None, :]
    nobody: tl.constexpr = GROUPS_P2 * SIZE_P2
    index = tl.where(exists, index, nobody)
    logit = tl.load(logits + row * row_stride + index, mask=exists, other=float("-inf"))
    logit = logit.to(tl.float32)
    if SOFTMAX:
        highest = tl.max(tl.where(exists & (logit == logit), logit, float("-inf")))
        powers = tl.where(exists, tl.exp(logit - highest), 0.0)
        score = powers / tl.sum(powers)
    else:
        score = 1.0 / (1.0 + tl.exp(-logit))
    choice = score
    if BIASED:
        choice += tl.load(bias + index, mask=exists, other=0.0)
    # A NaN must show in the weights, so it is chosen.
    choice = tl.where(choice == choice, choice, float("inf"))
    free = exists
    if TOPK_GROUPS < GROUPS:
        open_choice = tl.where(exists, choice, float("-inf"))
        best = tl.max(open_choice, axis=1)  # [groups]
        if SIZE > 1:
            first = tl.min(tl.where(open_choice == best[:, None], index, nobody), axis=1)
            others = tl.where(index == first[:, None], float("-inf"), open_choice)
            best += tl.max(others, axis=1)
        left = group < GROUPS
        for _ in tl.static_range(TOPK_GROUPS):
            top = tl.max(tl.where(left, best, float("-inf")))
            chosen = tl.min(tl.where(left & (best == top), group, GROUPS_P2))
            left = left & (group != chosen)
        free = exists & ((group < GROUPS) & (left == 0))[:, None]
    place = tl.arange(0, TOP_K_P2)
    out_expert = tl.zeros([TOP_K_P2], tl.int32)
    out_weight = tl.zeros([TOP_K_P2], tl.float32)
    total = epsilon
    for k in tl.static_range(TOP_K):
        top = tl.max(tl.where(free, choice, float("-inf")))
        chosen = tl.min(tl.where(free & (choice == top), index, nobody))
        weight = tl.sum(tl.where(index == chosen, score, 0.0))
        total += weight
        out_expert = tl.where(place == k, chosen, out_expert)
        out_weight = tl.where(place == k, weight, out_weight)
        free = free & (index != chosen)
    if NORMALISE:
        out_weight = out_weight / total
    at = row * TOP_K + place
    tl.store(experts + at, out_expert, mask=place < TOP_K)
    tl.store(weights + at, out_weight * scale, mask=place < TOP_K)


def gate(
    logits: torch.Tensor, rule: GateRule, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits [n, at least num_experts]`` fp32, bf16 or fp16 -> experts ``[n, top_k]`` int32, best
    first, and weights ``[n, top_k]`` fp32. ``bias``: ``[num_experts]`` fp32, for the choice alone.

    Raises ``KernelArgumentError``.
    """
    check_tensor("logits", logits, (None, None), torch.float32, torch.bfloat16, torch.float16)
    rows, width = logits.shape
    if width < rule.num_experts:
        raise KernelArgumentError(
            "logits", f"of shape [{rows}, {width}]", f"at least {rule.num_experts} columns"
        )
    if bias is not None:
        check_tensor("bias", bias, (rule.num_experts,), torch.float32, like=logits)
    experts = torch.empty((rows, rule.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, rule.top_k), dtype=torch.float32, device=logits.device)
    shape = tile("gate", architecture_of(logits.device))
    if rows:
        _gate[(rows,)](
            logits,
            logits if bias is None else bias,
            experts,
            weights,
            width,
            float(rule.epsilon),  # a whole number would be compiled in
            float(rule.scale),
            **_constants(rule, biased=bias is not None),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
    return experts, weights


def _constants(rule: GateRule, *, biased: bool) -> dict[str, int | bool]:
    size = rule.num_experts // rule.num_groups
    return {
        "GROUPS": rule.num_groups,
        "SIZE": size,
        "TOPK_GROUPS": rule.topk_groups,
        "TOP_K": rule.top_k,
        "SOFTMAX": rule.scoring == "softmax",
        "BIASED": biased,
        "NORMALISE": rule.normalise,
        "GROUPS_P2": triton.next_power_of_2(rule.num_groups),
        "SIZE_P2": triton.next_power_of_2(size),
        "TOP_K_P2": triton.next_power_of_2(rule.top_k),
    }


def variants(architecture: int) -> tuple[Variant, ...]:
    """One a family."""
    shape = tile("gate", architecture)
    families = {
        "DeepSeek-V3": (GateRule(256, 8, "sigmoid", 8, 4, epsilon=1e-20, scale=2.5), True),
        "Mixtral": (GateRule(8, 2, "softmax"), False),
        "Qwen3": (GateRule(128, 8, "softmax"), False),
        "Llama-4": (GateRule(128, 1, "sigmoid", normalise=False), False),
    }
    return tuple(
        Variant(
            kernel="gate",
            name=name,
            function=_gate,
            signature={
                "logits": "*fp32:16",
                "bias": "*fp32:16",
                "experts": "*i32:16",
                "weights": "*fp32:16",
                "row_stride": "i32",
                "epsilon": "fp32",
                "scale": "fp32",
            },
            constexprs=_constants(rule, biased=biased),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            hot=True,
        )
        for name, (rule, biased) in families.items()
    )
