"""Drawing tokens from logits without sorting the vocabulary.

Tokens are ordered by falling logit, equal ones by id. What top_k and top_p keep is a front of that
order, and so is what lies before the token drawn: each is "the longest front that holds less than
a goal", in tokens or in probability. ``_front`` finds its end by bisection over the logits' bits
(order is kept by a flip of the negative ones), then over the ids of the equal logits there. A pass
over a row's logits reads them from the L2 cache; a step that is off costs nothing, and a row's
result depends on nothing but the row.

The rules are the router's: temperature; min_p as a share of the most likely token; top_k; top_p, a
share of what was left; one number in [0, 1) of (seed, position), splitmix64 as on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_kernels.triton.arguments import KernelArgumentError, check_tensor
from ep_kernels.triton.parts import part_of_kernel
from ep_kernels.triton.registry import Variant
from ep_kernels.triton.tuning import architecture_of, tile

UNDRAWABLE = -1
"""In place of a token where a row's logits hold no finite maximum."""

_UNDRAWABLE = tl.constexpr(UNDRAWABLE)
_GREEDY_BELOW = 1e-5
_GREEDY = tl.constexpr(_GREEDY_BELOW)
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_LOWEST = tl.constexpr(-(1 << 31))
_HIGHEST = tl.constexpr((1 << 31) - 1)


@dataclass(frozen=True, slots=True)
class Draws:
    """Each row's parameters, ``[rows]`` on the device: ``temperature`` fp32 (under 1e-5: greedy),
    ``top_k`` int32 (0: off), ``top_p`` fp32 (1: off), ``min_p`` fp32 (0: off), ``seed`` and
    ``position`` int64, whose bits are taken as unsigned.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor


@part_of_kernel
def _ordered(value: tl.tensor) -> tl.tensor:
    """int32 in the order of the fp32 values; both zeros are one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@part_of_kernel
def _uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """fp64 in [0, 1): splitmix64 of both, 53 bits of it."""
    mixed = seed.to(tl.uint64, bitcast=True)
    mixed += _GAMMA
    mixed ^= position.to(tl.uint64, bitcast=True)
    mixed = _mix(mixed)
    mixed += _GAMMA
    mixed = _mix(mixed)
    return (mixed >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@part_of_kernel
def _mix(value: tl.tensor) -> tl.tensor:
    value ^= value >> 30
    value *= _MIX_1
    value ^= value >> 27
    value *= _MIX_2
    return value ^ (value >> 31)


@part_of_kernel
def _held(
    logits: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    peak: tl.tensor,
    floor: tl.tensor,
    key: tl.tensor,
    last: tl.tensor,
    cut_key: tl.tensor,
    cut_id: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """What the front up to (``key``, id ``last``) holds of the tokens that are kept: those with
    at least ``floor`` of the peak's weight and not beyond (``cut_key``, ``cut_id``). fp64, tokens
    with ``COUNT``, else weight. Sums run along a row in one order.
    """
    held = tl.full((), 0.0, tl.float64)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(logits + token, token < vocab, float("-inf")).to(tl.float32)
        order = _ordered(logit)
        weight = tl.exp((logit - peak) * inverse)
        inside = (order > key) | ((order == key) & (token <= last))
        inside = inside & ((order > cut_key) | ((order == cut_key) & (token <= cut_id)))
        inside = inside & (weight >= floor) & (token < vocab)
        held += tl.sum(tl.where(inside, 1.0 if COUNT else weight, 0.0), 0).to(tl.float64)
    return held


@part_of_kernel
def _equal_ids(
    logits: tl.tensor, vocab: tl.tensor, key: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The lowest and the highest id of the tokens whose logit has this key."""
    lowest = vocab
    highest = tl.full((), -1, tl.int32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(logits + token, token < vocab, float("-inf")).to(tl.float32)
        equal = (_ordered(logit) == key) & (token < vocab)
        lowest = tl.minimum(lowest, tl.min(tl.where(equal, token, vocab), 0))
        highest = tl.maximum(highest, tl.max(tl.where(equal, token, -1), 0))
    return lowest, highest


@part_of_kernel
def _front(
    logits: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    peak: tl.tensor,
    floor: tl.tensor,
    cut_key: tl.tensor,
    cut_id: tl.tensor,
    goal: tl.tensor,
    BEYOND: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Key and id of the token at which a front first holds the goal (more than it: ``BEYOND``).

    The whole must hold it.
    """
    # A front down to ``low`` holds the goal, one down to ``high`` does not.
    low = tl.full((), _LOWEST, tl.int64)
    high = _ordered(peak).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        held = _held(
            logits, vocab, inverse, peak, floor, middle.to(tl.int32), vocab, cut_key, cut_id,
            COUNT, BLOCK,
        )  # fmt: skip
        reached = held > goal if BEYOND else held >= goal
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    key = low.to(tl.int32)
    # Of the tokens at that logit most often there is one; else their ids are searched.
    first, last = _equal_ids(logits, vocab, key, BLOCK)
    first -= 1
    while last - first > 1:
        middle_id = (first + last) >> 1
        held = _held(
            logits, vocab, inverse, peak, floor, key, middle_id, cut_key, cut_id, COUNT, BLOCK
        )
        reached = held > goal if BEYOND else held >= goal
        last = tl.where(reached, middle_id, last)
        first = tl.where(reached, first, middle_id)
    return key, last


@triton.jit
def _sample(
    logits: tl.tensor,  # [rows, at least vocab]
    row_stride: tl.tensor,
    vocab: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    tokens: tl.tensor,  # [rows] int32, out
    cuts: tl.tensor,  # [rows, 2] int32, out: key and id of the last token that was kept
    BLOCK: tl.constexpr,
) -> None:
    """Grid: rows."""
    row = tl.program_id(0)
    at = logits + row.to(tl.int64) * row_stride
    peak = tl.full((), float("-inf"), tl.float32)
    best = tl.full((), 0, tl.int32)
    broken = tl.full((), 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(at + token, token < vocab, float("-inf")).to(tl.float32)
        broken = tl.maximum(broken, tl.max((logit != logit).to(tl.int32), 0))
        top = tl.max(logit, 0)
        where = tl.min(tl.where(logit == top, token, vocab), 0)
        best = tl.where(top > peak, where, best)
        peak = tl.maximum(peak, top)
    heat = tl.load(temperature + row)
    drawn = best
    cut_key = _ordered(peak)
    cut_id = best
    if (broken != 0) | (peak == float("inf")) | (peak == float("-inf")):
        drawn = tl.full((), _UNDRAWABLE, tl.int32)
    elif heat >= _GREEDY:
        inverse = 1.0 / heat
        floor = tl.load(min_p + row)
        cut_key = tl.full((), _LOWEST, tl.int32)
        cut_id = vocab
        k = tl.load(top_k + row)
        if (k > 0) & (k < vocab):
            goal = k.to(tl.float64)
            whole = _held(
                at, vocab, inverse, peak, floor, cut_key, cut_id, cut_key, cut_id, True, BLOCK
            )
            if whole > goal:
                cut_key, cut_id = _front(
                    at, vocab, inverse, peak, floor, cut_key, cut_id, goal, False, True, BLOCK
                )
        left = _held(
            at, vocab, inverse, peak, floor, cut_key, cut_id, cut_key, cut_id, False, BLOCK
        )
        p = tl.load(top_p + row)
        if p < 1.0:
            cut_key, cut_id = _front(
                at, vocab, inverse, peak, floor, cut_key, cut_id, left * p.to(tl.float64),
                False, False, BLOCK,
            )  # fmt: skip
            left = _held(
                at, vocab, inverse, peak, floor, cut_key, cut_id, cut_key, cut_id, False, BLOCK
            )
        goal = left * _uniform(tl.load(seed + row), tl.load(position + row))
        _, drawn = _front(
            at, vocab, inverse, peak, floor, cut_key, cut_id, goal, True, False, BLOCK
        )
    tl.store(tokens + row, drawn)
    tl.store(cuts + row * 2, cut_key)
    tl.store(cuts + row * 2 + 1, cut_id)


def sample(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """``logits [rows, vocab]`` fp32, bf16 or fp16 -> a token a row, ``[rows]`` int32
    (``UNDRAWABLE`` where a row has a NaN or no finite maximum). Raises ``KernelArgumentError``.
    """
    return sample_and_cuts(logits, draws)[0]


def sample_and_cuts(logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """``sample``, and ``[rows, 2]`` int32: where what top_k and top_p keep ends, as the logit's
    bits in their order and a token id (see ``kept``).
    """
    check_tensor("logits", logits, (None, None), torch.float32, torch.bfloat16, torch.float16)
    rows, vocab = logits.shape
    if vocab < 1:
        raise KernelArgumentError("logits", f"of shape [{rows}, 0]", "at least one token")
    kinds = {"top_k": torch.int32, "seed": torch.int64, "position": torch.int64}
    for name in Draws.__dataclass_fields__:
        check_tensor(
            name, getattr(draws, name), (rows,), kinds.get(name, torch.float32), like=logits
        )
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    cuts = torch.empty((rows, 2), dtype=torch.int32, device=logits.device)
    if rows:
        shape = tile("sampling", architecture_of(logits.device))
        _sample[(rows,)](
            logits,
            logits.stride(0),
            vocab,
            draws.temperature,
            draws.top_k,
            draws.top_p,
            draws.min_p,
            draws.seed,
            draws.position,
            tokens,
            cuts,
            BLOCK=shape["BLOCK"],
            num_warps=shape.num_warps,
        )
    return tokens, cuts


def kept(logits: torch.Tensor, cuts: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Which tokens could be drawn, ``[rows, vocab]``, from what ``sample_and_cuts`` told."""
    bits = (logits.float() + 0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    token = torch.arange(logits.shape[1], device=logits.device)
    front = (order > cuts[:, :1]) | ((order == cuts[:, :1]) & (token <= cuts[:, 1:]))
    heat = draws.temperature.clamp(min=_GREEDY_BELOW).unsqueeze(1)
    peak = logits.float().amax(1, keepdim=True)
    return front & (torch.exp((logits.float() - peak) / heat) >= draws.min_p.unsqueeze(1))


def reference_kept(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Ids of the tokens that one row ``[vocab]`` may yield, most likely first: by sorting, fp64."""
    logits = logits.double()
    order = torch.argsort(logits, descending=True, stable=True)
    if temperature < _GREEDY_BELOW:
        return order[:1]
    weights = torch.exp((logits[order] - logits.max()) / temperature)
    order, weights = order[weights >= min_p], weights[weights >= min_p]
    if top_k:
        order, weights = order[:top_k], weights[:top_k]
    if top_p < 1.0:
        before = weights.cumsum(0) - weights
        order = order[before < top_p * weights.sum()]
    return order


def variants(architecture: int) -> tuple[Variant, ...]:
    shape = tile("sampling", architecture)
    signature = {
        "logits": "*fp32:16",
        "row_stride": "i32:16",
        "vocab": "i32",
        "temperature": "*fp32:16",
        "top_k": "*i32:16",
        "top_p": "*fp32:16",
        "min_p": "*fp32:16",
        "seed": "*i64:16",
        "position": "*i64:16",
        "tokens": "*i32:16",
        "cuts": "*i32:16",
    }
    return (
        Variant(
            kernel="sampling",
            name="fp32 logits",
            function=_sample,
            signature=signature,
            constexprs={"BLOCK": shape["BLOCK"]},
            num_warps=shape.num_warps,
            num_stages=1,
            hot=True,
        ),
    )
