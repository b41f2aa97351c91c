"""Where each pair stands among the pairs of its group: a stable counting sort's first half.

Blocks of pairs are counted apart (integers, so in any order), the counts of each group are summed
over the blocks before, and within a block a pair comes after the earlier pairs of its group. The
result depends on the order of the pairs alone. What the counts are used for is the caller's kernel:
``permute`` and ``replicas``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ep_kernels.triton.registry import Variant
from ep_kernels.triton.tuning import architecture_of, tile


@triton.jit
def load_groups(
    groups: tl.tensor, pairs: tl.tensor, NUM_GROUPS: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The program's pairs' groups ``[BLOCK]``; ``NUM_GROUPS`` for those that are in none."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(groups + at, mask=at < pairs, other=-1)
    return tl.where((found < 0) | (found >= NUM_GROUPS), NUM_GROUPS, found)


@triton.jit
def earlier_in_block(group: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """How many earlier pairs of the block are in each pair's group ``[BLOCK]``."""
    at = tl.arange(0, BLOCK)
    # A column of the same values, without a second load.
    other = tl.reshape(group, [1, BLOCK])
    same = (group[:, None] == other) & (at[None, :] < at[:, None])
    return tl.sum(same.to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["pairs"])
def _count(
    groups: tl.tensor,  # [pairs] int32
    counts: tl.tensor,  # [blocks, BINS] int32, out
    pairs: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    group = load_groups(groups, pairs, NUM_GROUPS, BLOCK)
    found = tl.histogram(group, BINS)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["blocks"])
def _sum_before(
    counts: tl.tensor,  # [blocks, BINS] int32, becomes the sum over the blocks before
    totals: tl.tensor,  # [BINS] int32, out
    blocks: tl.tensor,
    BINS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros([COLUMNS], tl.int32)
    begin = 0
    while begin < blocks:
        row = begin + tl.arange(0, ROWS)
        at = counts + row[:, None] * BINS + column[None, :]
        mask = (row < blocks)[:, None] & (column < BINS)[None, :]
        found = tl.load(at, mask=mask, other=0)  # [ROWS, COLUMNS]
        until = tl.cumsum(found, axis=0)
        tl.store(at, before[None, :] + until - found, mask=mask)
        before += tl.sum(found, axis=0)
        begin += ROWS
    tl.store(totals + column, before, mask=column < BINS)


class Counts(NamedTuple):
    """Pairs of each group. The bins are a power of two; the one after the last group counts the
    pairs that are in none.
    """

    before: torch.Tensor
    """``[blocks, bins]`` int32: of each group in the blocks before."""
    totals: torch.Tensor
    """``[bins]`` int32."""

    @property
    def bins(self) -> int:
        return self.totals.shape[0]


def block_of(device: torch.device) -> int:
    """Pairs that one program of a counting kernel takes."""
    return tile("counting", architecture_of(device))["BLOCK"]


def count_pairs(groups: torch.Tensor, num_groups: int) -> Counts:
    """Count ``groups`` (int32, contiguous, of any shape), where numbers that are not ``0`` to
    ``num_groups - 1`` are in no group. Two launches.
    """
    device = groups.device
    shape = tile("counting", architecture_of(device))
    pairs, bins = groups.numel(), triton.next_power_of_2(num_groups + 1)
    blocks = triton.cdiv(pairs, shape["BLOCK"])
    before = torch.empty((blocks, bins), dtype=torch.int32, device=device)
    if not blocks:
        return Counts(before, torch.zeros(bins, dtype=torch.int32, device=device))
    totals = torch.empty(bins, dtype=torch.int32, device=device)
    _count[(blocks,)](
        groups,
        before,
        pairs,
        NUM_GROUPS=num_groups,
        BINS=bins,
        BLOCK=shape["BLOCK"],
        num_warps=shape.num_warps,
    )
    _sum_before[(triton.cdiv(bins, shape["COLUMNS"]),)](
        before,
        totals,
        blocks,
        BINS=bins,
        COLUMNS=shape["COLUMNS"],
        ROWS=shape["ROWS"],
        num_warps=shape.num_warps,
    )
    return Counts(before, totals)


def variants(architecture: int) -> tuple[Variant, ...]:
    """For the 256 experts of DeepSeek-V3."""
    shape = tile("counting", architecture)
    return (
        Variant(
            kernel="counting.count",
            name="256 groups",
            function=_count,
            signature={"groups": "*i32:16", "counts": "*i32:16", "pairs": "i32"},
            constexprs={"NUM_GROUPS": 256, "BINS": 512, "BLOCK": shape["BLOCK"]},
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            hot=True,
        ),
        Variant(
            kernel="counting.sum_before",
            name="256 groups",
            function=_sum_before,
            signature={"counts": "*i32:16", "totals": "*i32:16", "blocks": "i32"},
            constexprs={"BINS": 512, "COLUMNS": shape["COLUMNS"], "ROWS": shape["ROWS"]},
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            hot=True,
        ),
    )
