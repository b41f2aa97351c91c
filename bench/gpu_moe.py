"""Gate, replicas, permute, quantise and the grouped products, at DeepSeek-V3's shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from ep_kernels.fp8 import dequantise, quantise_weight, rounded_rows
from ep_kernels.gating import GateRule, reference_gate
from ep_kernels.routing import Places
from ep_kernels.triton.gate import gate
from ep_kernels.triton.grouped_gemm import (
    SlotWeights,
    block_m_of,
    expert_ffn,
    grouped_ffn,
    regime_of,
)
from ep_kernels.triton.permute import permute, plan, reference_plan, unpermute
from ep_kernels.triton.quantise import quantise
from ep_kernels.triton.replicas import ReplicaSplit, Sent, reference_split
from gpu_harness import BF16, COPY, FP8, Meter, largest_error
from torch.nn.functional import silu

DEEPSEEK = GateRule(256, 8, "sigmoid", 8, 4, epsilon=1e-20, scale=2.5)


@dataclass(frozen=True)
class Sizes:
    """One expert rank of DeepSeek-V3; smaller ones to try the sections without a GPU."""

    hidden: int = 7168
    inter: int = 2048
    slots: int = 32
    top_k: int = 8
    tokens: tuple[int, ...] = (64, 512, 8192)
    """Of a batch: decoding, decoding with many sequences, prefill."""


FULL = Sizes()


def gates(meter: Meter, sizes: Sizes = FULL) -> None:
    families = {
        "DeepSeek-V3": DEEPSEEK,
        "Mixtral": GateRule(8, 2, "softmax"),
        "Qwen3": GateRule(128, 8, "softmax"),
        "Llama-4": GateRule(128, 1, "sigmoid", normalise=False),
    }
    for name, rule in families.items():
        for tokens in sizes.tokens:
            logits = torch.randn(tokens, rule.num_experts, device=meter.device)
            bias = torch.randn(rule.num_experts, device=meter.device) if rule is DEEPSEEK else None
            experts, weights = gate(logits, rule, bias)
            wanted, wanted_weights = reference_gate(rule, bias, logits)
            # Two exponentials that differ in their last bit may order two experts differently.
            other = float((experts != wanted).float().mean())
            if other > 1e-4:
                raise ValueError(f"{name}: {100 * other:.3f} % of the choices differ")
            same = (experts == wanted).all(1)
            check = largest_error(weights[same], wanted_weights[same], 1e-5, "weights")
            moved = logits.nbytes + experts.nbytes + weights.nbytes
            milliseconds = meter.milliseconds(lambda: gate(logits, rule, bias))  # noqa: B023
            what = f"{name}, {tokens} tokens, {1000 * milliseconds:.0f} us"
            speed = moved / milliseconds / 1e6
            meter.row("gate", what, speed, "GB/s", reference=COPY, check=check)


def replica_split(meter: Meter, sizes: Sizes = FULL) -> None:
    ranks = 32
    copies = np.ones(256, dtype=np.int32)
    copies[:ranks] = 2
    first = np.concatenate([[0], copies.cumsum()]).astype(np.int32)
    rank = np.concatenate([np.arange(c) + e % (ranks - 1) for e, c in enumerate(copies)])
    places = Places(first, rank.astype(np.int32), np.zeros(rank.size, dtype=np.int32))
    physical = np.arange(rank.size, dtype=np.int32)
    sent, reference_sent = Sent.nothing(ranks, meter.device), Sent.nothing(ranks, "cpu")
    split = ReplicaSplit(places, physical, sent)
    for tokens in sizes.tokens:
        logits = torch.randn(tokens, 256, device=meter.device)
        experts = gate(logits, DEEPSEEK)[0]
        got = split(experts).cpu()
        wanted = reference_split(experts.cpu(), places, physical, reference_sent)
        if not torch.equal(got, wanted) or not torch.equal(
            sent.recent.cpu(), reference_sent.recent
        ):
            raise ValueError(f"{int((got != wanted).sum())} of {got.numel()} pairs go elsewhere")
        before = (sent.recent.clone(), sent.since_forgetting.clone())
        milliseconds = meter.milliseconds(lambda: split(experts))  # noqa: B023
        sent.recent.copy_(before[0])
        sent.since_forgetting.copy_(before[1])
        what = f"{tokens} tokens, 32 of 256 experts twice"
        meter.row("replicas", what, 1000 * milliseconds, "us", check="every pair")


def permutes(meter: Meter, sizes: Sizes = FULL) -> None:
    for tokens in sizes.tokens:
        slots = drawn_slots(meter, sizes, tokens)
        made = plan(slots, sizes.slots, 64)
        wanted = reference_plan(slots.cpu(), sizes.slots, 64)
        for got_part, wanted_part in zip(made[:3], wanted[:3], strict=True):
            if not torch.equal(got_part.cpu(), wanted_part):
                raise ValueError(f"the plan of {tokens} tokens differs from its reference")
        x = torch.randn(tokens, sizes.hidden, device=meter.device, dtype=torch.bfloat16)
        rows = permute(x, made)
        here = made.row_of_pair >= 0
        token = here.nonzero()[:, 0]
        if not torch.equal(rows[made.row_of_pair[here].long()], x[token]):
            raise ValueError("a row is not its token's")
        weights = torch.rand(tokens, sizes.top_k, device=meter.device)
        got = unpermute(rows, weights, made)
        kept = (weights * here).sum(1, keepdim=True)
        check = largest_error(got, x.float() * kept, 1e-5, "sums")
        if not torch.equal(got, unpermute(rows, weights, made)):
            raise ValueError("two runs differ")
        milliseconds = meter.milliseconds(lambda: plan(slots, sizes.slots, 64))  # noqa: B023
        meter.row("permute", f"plan, {tokens} tokens", 1000 * milliseconds, "us", check="all")
        pairs = int(here.sum())
        row_bytes = sizes.hidden * x.element_size()
        moved = x.nbytes + pairs * row_bytes
        speed = moved / meter.milliseconds(lambda: permute(x, made)) / 1e6  # noqa: B023
        meter.row("permute", f"permute, {tokens} tokens", speed, "GB/s", reference=COPY)
        moved = got.nbytes + pairs * row_bytes
        milliseconds = meter.milliseconds(lambda: unpermute(rows, weights, made))  # noqa: B023
        what = f"unpermute, {tokens} tokens"
        meter.row("permute", what, moved / milliseconds / 1e6, "GB/s", reference=COPY, check=check)


def quantises(meter: Meter, sizes: Sizes = FULL) -> None:
    for tokens in sizes.tokens:
        x = torch.randn(tokens, sizes.hidden, device=meter.device, dtype=torch.bfloat16)
        values, scales = quantise(x)
        wanted = rounded_rows(x)
        # A division that differs in its last bit may round a value to its neighbour.
        check = largest_error(dequantise(values, scales), wanted, 2**-4, "values")
        other = float((dequantise(values, scales) != wanted).float().mean())
        if other > 1e-3:
            raise ValueError(f"{100 * other:.2f} % of the values differ")
        moved = x.nbytes + values.nbytes + scales.nbytes
        speed = moved / meter.milliseconds(lambda: quantise(x)) / 1e6  # noqa: B023
        meter.row("quantise", f"{tokens} tokens", speed, "GB/s", reference=COPY, check=check)


def drawn_slots(meter: Meter, sizes: Sizes, tokens: int) -> torch.Tensor:
    """A rank that holds ``slots`` experts gets tokens of which each has at least one pair there:
    of ``top_k`` pairs the others are elsewhere.
    """
    slots = torch.randint(-sizes.slots, sizes.slots, (tokens, sizes.top_k), device=meter.device)
    slots[:, 0] = torch.randint(0, sizes.slots, (tokens,), device=meter.device)
    return torch.where(slots < 0, -1, slots).int()


def drawn_weights(meter: Meter, sizes: Sizes, *, fp8: bool) -> SlotWeights:
    shapes = ((2 * sizes.inter, sizes.hidden), (sizes.hidden, sizes.inter))
    drawn = [
        torch.randn(sizes.slots, *shape, device=meter.device, dtype=torch.bfloat16).mul_(
            shape[1] ** -0.5
        )
        for shape in shapes
    ]
    if not fp8:
        return SlotWeights(*drawn)
    quantised = []
    for tensor in drawn:
        parts = [quantise_weight(one) for one in tensor]  # one slot at a time: fp32 inside
        quantised.append(tuple(torch.stack(list(part)) for part in zip(*parts, strict=True)))
    (gate_up, gate_up_scale), (down, down_scale) = quantised
    return SlotWeights(gate_up, down, gate_up_scale, down_scale)


def checked(meter: Meter, sizes: Sizes, weights: SlotWeights, tokens: int) -> str:
    """Compare ``expert_ffn`` with fp32 products slot by slot."""
    slots = drawn_slots(meter, sizes, tokens)
    x = torch.randn(tokens, sizes.hidden, device=meter.device, dtype=torch.bfloat16)
    pair_weights = torch.rand(tokens, sizes.top_k, device=meter.device)
    got = expert_ffn(x, slots, pair_weights, weights)
    rows = rounded_rows(x) if weights.is_fp8 else x.float()
    wanted = torch.zeros(tokens, sizes.hidden, device=meter.device)
    for slot in range(sizes.slots):
        gate_up, down = weights.gate_up[slot], weights.down[slot]
        if weights.gate_up_scale is not None and weights.down_scale is not None:
            gate_up = dequantise(gate_up, weights.gate_up_scale[slot])
            down = dequantise(down, weights.down_scale[slot])
        token, choice = (slots == slot).nonzero(as_tuple=True)
        half = (rows[token] @ gate_up.float().t()).chunk(2, dim=1)
        act = silu(half[0]) * half[1]
        if weights.is_fp8:
            act = rounded_rows(act)
        weighted = (act @ down.float().t()) * pair_weights[token, choice, None]
        wanted.index_add_(0, token, weighted)
    kind = "FP8" if weights.is_fp8 else "bf16"
    limit = 2**-5 if weights.is_fp8 else 2**-6
    return largest_error(got, wanted, limit, f"{kind} sums")


def torch_grouped(weights: SlotWeights) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """torch's own grouped product over rows without padding, ``ends [slots]`` int32."""
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # noqa: SLF001
    gate_up, down = weights.gate_up.transpose(1, 2), weights.down.transpose(1, 2)

    def call(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        half = grouped(rows, gate_up, offs=ends).chunk(2, dim=1)
        product: torch.Tensor = grouped((silu(half[0]) * half[1]).contiguous(), down, offs=ends)
        return product

    return call


def _grouped(meter: Meter, sizes: Sizes, *, fp8: bool) -> None:
    weights = drawn_weights(meter, sizes, fp8=fp8)
    section = "grouped GEMM " + ("FP8" if fp8 else "bf16")
    for tokens in sizes.tokens:
        check = checked(meter, sizes, weights, tokens)
        slots = drawn_slots(meter, sizes, tokens)
        x = torch.randn(tokens, sizes.hidden, device=meter.device, dtype=torch.bfloat16)
        regime = regime_of(slots.numel(), sizes.slots)
        made = plan(slots, sizes.slots, block_m_of(weights, regime))
        if fp8:
            values, scales = quantise(x)
            rows, row_scales = permute(values, made), permute(scales, made)
        else:
            rows, row_scales = permute(x, made), None
        milliseconds = meter.milliseconds(
            lambda: grouped_ffn(rows, made, weights, regime, row_scales)  # noqa: B023
        )
        pairs = int((slots >= 0).sum())
        flops = 6.0 * pairs * sizes.hidden * sizes.inter
        what = f"{regime}, {tokens} tokens, {pairs} pairs, {1000 * milliseconds:.0f} us"
        speed, peak = flops / milliseconds / 1e9, FP8 if fp8 else BF16
        meter.row(section, what, speed, "TFLOP/s", reference=peak, check=check)
        read = weights.gate_up.nbytes + weights.down.nbytes
        meter.row(section, what, read / milliseconds / 1e6, "GB/s of weights", reference=COPY)
        pair_weights = torch.rand(tokens, sizes.top_k, device=meter.device)
        whole = meter.milliseconds(
            lambda: expert_ffn(x, slots, pair_weights, weights)  # noqa: B023
        )
        meter.row(section, f"{what}: with plan, permute and back", 1000 * whole, "us")
        if fp8:
            continue
        dense = x[(slots >= 0).nonzero()[:, 0]]
        ends = torch.bincount(slots[slots >= 0].long(), minlength=sizes.slots).cumsum(0).int()
        theirs = torch_grouped(weights)
        ours = milliseconds
        milliseconds = meter.milliseconds(lambda: theirs(dense, ends))  # noqa: B023
        meter.row(
            section,
            f"torch grouped_mm, {pairs} pairs, {1000 * milliseconds:.0f} us",
            flops / milliseconds / 1e9,
            "TFLOP/s",
            reference="our grouped GEMM",
            reference_speed=flops / ours / 1e9,
        )


def grouped_bf16(meter: Meter, sizes: Sizes = FULL) -> None:
    _grouped(meter, sizes, fp8=False)


def grouped_fp8(meter: Meter, sizes: Sizes = FULL) -> None:
    _grouped(meter, sizes, fp8=True)


SECTIONS = {
    "gate": gates,
    "replicas": replica_split,
    "permute": permutes,
    "quantise": quantises,
    "grouped GEMM bf16": grouped_bf16,
    "grouped GEMM FP8": grouped_fp8,
}
