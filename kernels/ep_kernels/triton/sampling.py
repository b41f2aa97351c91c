"""Drawing tokens from logits without sorting the vocabulary.

Tokens are ordered by falling logit, equal ones by id. What min_p, top_k and top_p keep is a front
of that order, and so is what lies before the token drawn: each is "the longest front that holds
less than a goal", in tokens or in probability. ``_front`` finds its end by bisection over the
logits' bits (order is kept by a flip of the negative ones), then over the ids of the equal logits
there. A row that is cut by nothing is drawn in the order of ids, as on the CPU: two passes find the
block, and the token is found in it. A pass over a row's logits reads them from the L2 cache; a step
that is off costs nothing, and a row's result depends on nothing but the row.

The rules are the router's: temperature; min_p as a distance from the largest logit; top_k; top_p, a
share of what was left; one number in [0, 1) of (seed, position), splitmix64 as on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Draws:
    """Each row's parameters, ``[rows]`` on the device: ``inverse_temperature`` fp32 (0: greedy),
    ``depth`` fp32, how far below the row's largest a logit may be (``inf``: any; for min_p
    ``-temperature * log(min_p)``), ``top_k`` int32 (0: off), ``top_p`` fp64 (1: off), ``seed`` and
    ``position`` int64, whose bits are taken as unsigned.
    """

    inverse_temperature: torch.Tensor
    depth: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor

    @classmethod
    def of(
        cls,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        seed: Sequence[int],
        position: Sequence[int],
    ) -> Draws:
        """On the host; a temperature of 0 is greedy."""
        return cls(
            torch.tensor([1.0 / one if one else 0.0 for one in temperature], dtype=torch.float32),
            torch.tensor(
                [
                    -one * math.log(share) if share else math.inf
                    for one, share in zip(temperature, min_p, strict=True)
                ],
                dtype=torch.float32,
            ),
            torch.tensor(top_k, dtype=torch.int32),
            torch.tensor(top_p, dtype=torch.float64),
            torch.tensor([_signed(one) for one in seed], dtype=torch.int64),
            torch.tensor(position, dtype=torch.int64),
        )

    def on(self, place: torch.device) -> Draws:
        return Draws(*(getattr(self, name).to(place) for name in self.__dataclass_fields__))


def _signed(bits: int) -> int:
    """int64 of the lowest 64 bits."""
    bits &= (1 << 64) - 1
    return bits - (1 << 64) if bits >> 63 else bits


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
def _weights(
    at: tl.tensor,
    vocab: tl.tensor,
    first: tl.tensor,
    inverse: tl.tensor,
    peak: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Ids, logits and weights of a block of a row from ``first`` on; of no weight beyond it."""
    token = first + tl.arange(0, BLOCK)
    logit = tl.load(at + token, token < vocab, float("-inf")).to(tl.float32)
    return token, logit, tl.exp((logit - peak) * inverse)


@part_of_kernel
def _held(
    logits: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    peak: tl.tensor,
    key: tl.tensor,
    last: tl.tensor,
    cut_key: tl.tensor,
    cut_id: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """What the front up to (``key``, id ``last``) holds of the tokens that are kept: those not
    beyond (``cut_key``, ``cut_id``). fp64, tokens with ``COUNT``, else weight. Sums run along a row
    in one order.
    """
    held = tl.full((), 0.0, tl.float64)
    for first in range(0, vocab, BLOCK):
        token, logit, weight = _weights(logits, vocab, first, inverse, peak, BLOCK)
        order = _ordered(logit)
        inside = (order > key) | ((order == key) & (token <= last))
        inside = inside & ((order > cut_key) | ((order == cut_key) & (token <= cut_id)))
        inside = inside & (token < vocab)
        held += tl.sum(tl.where(inside, 1.0 if COUNT else weight, 0.0), 0).to(tl.float64)
    return held


@part_of_kernel
def _by_id(
    logits: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    peak: tl.tensor,
    number: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The first token up to which, in the order of ids, all hold more than a share ``number``."""
    held = tl.full((), 0.0, tl.float64)
    for first in range(0, vocab, BLOCK):
        _, _, weight = _weights(logits, vocab, first, inverse, peak, BLOCK)
        held += tl.sum(weight, 0).to(tl.float64)
    goal = held * number
    # The same sums again: the whole holds more than the goal. Should a compiler make other sums of
    # them, the last block has the token.
    held = tl.full((), 0.0, tl.float64)
    begin = tl.full((), 0, tl.int32)
    _, _, weight = _weights(logits, vocab, begin, inverse, peak, BLOCK)
    through = tl.sum(weight, 0).to(tl.float64)
    while (through <= goal) & (begin + BLOCK < vocab):
        held = through
        begin += BLOCK
        _, _, weight = _weights(logits, vocab, begin, inverse, peak, BLOCK)
        through = held + tl.sum(weight, 0).to(tl.float64)
    token, _, weight = _weights(logits, vocab, begin, inverse, peak, BLOCK)
    before = begin - 1
    last = tl.minimum(begin + BLOCK, vocab) - 1
    while last - before > 1:
        middle = (before + last) >> 1
        through = held + tl.sum(tl.where(token <= middle, weight, 0.0), 0).to(tl.float64)
        last = tl.where(through > goal, middle, last)
        before = tl.where(through > goal, before, middle)
    return last


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
    low = cut_key.to(tl.int64)
    high = _ordered(peak).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        held = _held(
            logits, vocab, inverse, peak, middle.to(tl.int32), vocab, cut_key, cut_id,
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
        held = _held(logits, vocab, inverse, peak, key, middle_id, cut_key, cut_id, COUNT, BLOCK)
        reached = held > goal if BEYOND else held >= goal
        last = tl.where(reached, middle_id, last)
        first = tl.where(reached, first, middle_id)
    return key, last


@triton.jit
def _sample(
    logits: tl.tensor,  # [rows, at least vocab]
    row_stride: tl.tensor,
    vocab: tl.tensor,
    inverse_temperature: tl.tensor,
    depth: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
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
    inverse = tl.load(inverse_temperature + row)
    drawn = best
    cut_key = _ordered(peak)
    cut_id = best
    if (broken != 0) | (peak == float("inf")) | (peak == float("-inf")):
        drawn = tl.full((), _UNDRAWABLE, tl.int32)
    elif inverse > 0.0:
        cut_key = _ordered(peak - tl.load(depth + row))
        cut_id = vocab
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        some = (k > 0) & (k < vocab)
        number = _uniform(tl.load(seed + row), tl.load(position + row))
        if some | (p < 1.0) | (tl.load(depth + row) < float("inf")):
            if some:
                goal = k.to(tl.float64)
                whole = _held(
                    at, vocab, inverse, peak, cut_key, cut_id, cut_key, cut_id, True, BLOCK
                )
                if whole > goal:
                    cut_key, cut_id = _front(
                        at, vocab, inverse, peak, cut_key, cut_id, goal, False, True, BLOCK
                    )
            left = _held(at, vocab, inverse, peak, cut_key, cut_id, cut_key, cut_id, False, BLOCK)
            if p < 1.0:
                cut_key, cut_id = _front(
                    at, vocab, inverse, peak, cut_key, cut_id, left * p, False, False, BLOCK
                )
                left = _held(
                    at, vocab, inverse, peak, cut_key, cut_id, cut_key, cut_id, False, BLOCK
                )
            _, drawn = _front(
                at, vocab, inverse, peak, cut_key, cut_id, left * number, True, False, BLOCK
            )
        else:
            drawn = _by_id(at, vocab, inverse, peak, number, BLOCK)
    tl.store(tokens + row, drawn)
    tl.store(cuts + row * 2, cut_key)
    tl.store(cuts + row * 2 + 1, cut_id)


@triton.jit
def _log_sum(
    logits: tl.tensor,  # [rows, at least vocab]
    row_stride: tl.tensor,
    vocab: tl.tensor,
    sums: tl.tensor,  # [rows] fp64, out
    BLOCK: tl.constexpr,
) -> None:
    """Grid: rows."""
    row = tl.program_id(0)
    at = logits + row.to(tl.int64) * row_stride
    peak = tl.full((), float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(at + token, token < vocab, float("-inf")).to(tl.float32)
        peak = tl.maximum(peak, tl.max(logit, 0))
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, vocab, BLOCK):
        _, _, weight = _weights(at, vocab, first, 1.0, peak, BLOCK)
        total += tl.sum(weight, 0).to(tl.float64)
    tl.store(sums + row, peak.to(tl.float64) + tl.log(total))


def sample(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """``logits [rows, vocab]`` fp32, bf16 or fp16 -> a token a row, ``[rows]`` int32
    (``UNDRAWABLE`` where a row has a NaN or no finite maximum). Raises ``KernelArgumentError``.
    """
    return sample_and_cuts(logits, draws)[0]


def sample_and_cuts(logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """``sample``, and ``[rows, 2]`` int32: where what top_k and top_p keep ends, as the logit's
    bits in their order and a token id (see ``kept``).
    """
    rows, vocab = _check_logits(logits)
    kinds = {
        "top_k": torch.int32, "top_p": torch.float64, "seed": torch.int64, "position": torch.int64
    }  # fmt: skip
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
            draws.inverse_temperature,
            draws.depth,
            draws.top_k,
            draws.top_p,
            draws.seed,
            draws.position,
            tokens,
            cuts,
            BLOCK=shape["BLOCK"],
            num_warps=shape.num_warps,
        )
    return tokens, cuts


def log_sum(logits: torch.Tensor) -> torch.Tensor:
    """Of ``logits [rows, vocab]`` the logarithm of the sum of their exponentials, ``[rows]`` fp64:
    what a logit is above its token's log-probability. Raises ``KernelArgumentError``.
    """
    rows, vocab = _check_logits(logits)
    sums = torch.empty(rows, dtype=torch.float64, device=logits.device)
    if rows:
        shape = tile("sampling", architecture_of(logits.device))
        _log_sum[(rows,)](
            logits,
            logits.stride(0),
            vocab,
            sums,
            BLOCK=shape["BLOCK"],
            num_warps=shape.num_warps,
        )
    return sums


def _check_logits(logits: torch.Tensor) -> torch.Size:
    check_tensor("logits", logits, (None, None), torch.float32, torch.bfloat16, torch.float16)
    if logits.shape[1] < 1:
        raise KernelArgumentError("logits", f"of shape {list(logits.shape)}", "at least one token")
    return logits.shape


def most_likely(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids ``[rows, count]`` int64 of each row's largest logits, falling, equal ones by id."""
    vocab = logits.shape[1]
    # No two are equal, so that nothing is left to the device.
    falling = torch.arange(vocab - 1, -1, -1, device=logits.device)
    keys = (_order_of(logits).to(torch.int64) << 32) | falling
    return vocab - 1 - (keys.topk(count).values & 0xFFFFFFFF)


def _order_of(logits: torch.Tensor) -> torch.Tensor:
    """See ``_ordered``."""
    bits = (logits.float() + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def kept(logits: torch.Tensor, cuts: torch.Tensor) -> torch.Tensor:
    """Which tokens could be drawn, ``[rows, vocab]``, from what ``sample_and_cuts`` told."""
    order = _order_of(logits)
    token = torch.arange(logits.shape[1], device=logits.device)
    return (order > cuts[:, :1]) | ((order == cuts[:, :1]) & (token <= cuts[:, 1:]))


def reference_kept(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Ids of the tokens that one row ``[vocab]`` may yield, most likely first: by sorting, fp64."""
    order = torch.argsort(logits, descending=True, stable=True)
    if not temperature:
        return order[:1]
    logits = logits.float()
    peak = logits.max()
    if min_p:
        order = order[logits[order] >= peak + temperature * math.log(min_p)]
    if top_k:
        order = order[:top_k]
    weights = torch.exp((logits[order].double() - peak) / temperature)
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
        "inverse_temperature": "*fp32:16",
        "depth": "*fp32:16",
        "top_k": "*i32:16",
        "top_p": "*fp64:16",
        "seed": "*i64:16",
        "position": "*i64:16",
        "tokens": "*i32:16",
        "cuts": "*i32:16",
    }
    sums = {name: signature[name] for name in ("logits", "row_stride", "vocab")}
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
        Variant(
            kernel="sampling.log_sum",
            name="fp32 logits",
            function=_log_sum,
            signature=sums | {"sums": "*fp64:16"},
            constexprs={"BLOCK": shape["BLOCK"]},
            num_warps=shape.num_warps,
            num_stages=1,
            hot=True,
        ),
    )
