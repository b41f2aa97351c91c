"""Tokens into the order of their slots, each slot's rows padded to whole tiles, and back.

A grouped product wants the rows of one slot together, beginning where a tile begins. The plan says
where each pair's row goes, in the order of the pairs, and which slot each tile belongs to; nothing
of it is read back by the host, so the rows are allocated for the worst case. Padding is neither
written nor read: a tile knows how many of its rows count.

Back, each token's rows are weighted and added in fp32 in the order of its pairs: no atomics, the
same bits each time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ep_kernels.triton.arguments import KernelArgumentError, check_positive, check_tensor
from ep_kernels.triton.counting import count_pairs, earlier_in_block, load_groups
from ep_kernels.triton.registry import Variant
from ep_kernels.triton.tuning import architecture_of, tile

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Plan(NamedTuple):
    """Where rows go. ``rows`` and ``tiles`` are upper bounds that hold for any choice of slots."""

    row_of_pair: torch.Tensor
    """``[tokens, k]`` int32; -1 for a pair that is in no slot."""
    tile_slot: torch.Tensor
    """``[tiles]`` int32: the slot whose rows the tile holds, -1 for a tile beyond the last."""
    tile_rows: torch.Tensor
    """``[tiles]`` int32: how many of the tile's rows are pairs; the others are padding."""
    totals: torch.Tensor
    """``[at least slots]`` int32: pairs of each slot."""
    block_m: int
    """Rows of a tile."""

    @property
    def tiles(self) -> int:
        return self.tile_slot.shape[0]

    @property
    def rows(self) -> int:
        return self.tiles * self.block_m


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _plan(
    slots: tl.tensor,  # [pairs] int32
    before: tl.tensor,  # [blocks, BINS] int32
    totals: tl.tensor,  # [BINS] int32
    row_of_pair: tl.tensor,  # [pairs] int32, out
    tile_slot: tl.tensor,  # [tiles] int32, out
    tile_rows: tl.tensor,  # [tiles] int32, out
    pairs: tl.tensor,
    tiles: tl.tensor,
    NUM_SLOTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.load(totals + bins, mask=bins < NUM_SLOTS, other=0)  # [bins]
    used = (total + BLOCK_M - 1) // BLOCK_M
    until = tl.cumsum(used, axis=0)  # tiles of this slot and those before
    first = until - used
    if program * BLOCK < pairs:
        slot = load_groups(slots, pairs, NUM_SLOTS, BLOCK)
        rank = earlier_in_block(slot, BLOCK)
        rank += tl.load(before + program * BINS + slot)
        begin = tl.gather(first, slot, axis=0)
        row = tl.where(slot == NUM_SLOTS, -1, begin * BLOCK_M + rank)
        at = program * BLOCK + tl.arange(0, BLOCK)
        tl.store(row_of_pair + at, row, mask=at < pairs)
    number = program * TILES + tl.arange(0, TILES)
    # The tile's slot is the number of slots that end before it.
    ended = (until[None, :] <= number[:, None]) & (bins < NUM_SLOTS)[None, :]
    slot = tl.sum(ended.to(tl.int32), axis=1)  # [TILES]
    own = slot[:, None] == bins[None, :]
    left = total[None, :] - (number[:, None] - first[None, :]) * BLOCK_M
    count = tl.sum(tl.where(own, left, 0), axis=1)
    exists = slot < NUM_SLOTS
    tl.store(tile_slot + number, tl.where(exists, slot, -1), mask=number < tiles)
    count = tl.where(exists, tl.minimum(count, BLOCK_M), 0)
    tl.store(tile_rows + number, count, mask=number < tiles)


def plan(slots: torch.Tensor, num_slots: int, block_m: int) -> Plan:
    """Plan for pairs that go to ``slots [tokens, k]`` int32, ``0`` to ``num_slots - 1``; any other
    number is a pair that is not computed here. Three launches. Raises ``KernelArgumentError``.
    """
    check_tensor("slots", slots, (None, None), torch.int32)
    check_positive("num_slots", num_slots)
    if block_m < 1 or block_m & (block_m - 1):
        raise KernelArgumentError("block_m", str(block_m), "a power of two")
    device = slots.device
    counting, shape = (tile(name, architecture_of(device)) for name in ("counting", "permute.plan"))
    pairs = slots.numel()
    tiles = most_tiles(pairs, num_slots, block_m)
    counts = count_pairs(slots, num_slots)
    made = Plan(
        torch.empty(slots.shape, dtype=torch.int32, device=device),
        torch.empty(tiles, dtype=torch.int32, device=device),
        torch.empty(tiles, dtype=torch.int32, device=device),
        counts.totals,
        block_m,
    )
    if pairs:
        programs = max(triton.cdiv(pairs, counting["BLOCK"]), triton.cdiv(tiles, shape["TILES"]))
        _plan[(programs,)](
            slots,
            counts.before,
            counts.totals,
            made.row_of_pair,
            made.tile_slot,
            made.tile_rows,
            pairs,
            tiles,
            NUM_SLOTS=num_slots,
            BINS=counts.bins,
            BLOCK=counting["BLOCK"],
            BLOCK_M=block_m,
            TILES=shape["TILES"],
            num_warps=shape.num_warps,
        )
    return made


def most_tiles(pairs: int, num_slots: int, block_m: int) -> int:
    """Tiles that ``pairs`` pairs can need at most: each slot may end in one that is not full."""
    partial = min(pairs, num_slots)
    return partial + (pairs - partial) // block_m


@triton.jit
def _permute(
    x: tl.tensor,  # [tokens, WIDTH]
    row_of_pair: tl.tensor,  # [tokens, TOP_K] int32
    out: tl.tensor,  # [rows, WIDTH]
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    value = tl.load(x + token * WIDTH + column, mask=mask)
    for k in tl.static_range(TOP_K):
        row = tl.load(row_of_pair + token * TOP_K + k).to(tl.int64)
        tl.store(out + row * WIDTH + column, value, mask=mask & (row >= 0))


def permute(x: torch.Tensor, plan: Plan) -> torch.Tensor:
    """``x [tokens, width]`` fp32, bf16, fp16 or e4m3 -> ``[plan.rows, width]``: each token's row at
    each of its pairs' places. Padding is left as the allocator gave it. Raises
    ``KernelArgumentError``.
    """
    tokens, top_k = plan.row_of_pair.shape
    check_tensor("x", x, (tokens, None), *_FLOATS, torch.float8_e4m3fn, like=plan.row_of_pair)
    width = x.shape[1]
    shape = tile("permute", architecture_of(x.device))
    out = torch.empty((plan.rows, width), dtype=x.dtype, device=x.device)
    if tokens and width:
        # What the values mean does not matter, and the interpreter cannot move FP8.
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
        _permute[(tokens, triton.cdiv(width, shape["BLOCK"]))](
            x.view(integers),
            plan.row_of_pair,
            out.view(integers),
            WIDTH=width,
            TOP_K=top_k,
            BLOCK=shape["BLOCK"],
            num_warps=shape.num_warps,
        )
    return out


@triton.jit
def _unpermute(
    y: tl.tensor,  # [rows, WIDTH]
    row_of_pair: tl.tensor,  # [tokens, TOP_K] int32
    weights: tl.tensor,  # [tokens, TOP_K] fp32
    out: tl.tensor,  # [tokens, WIDTH]
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(row_of_pair + token * TOP_K + k).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + k)
        value = tl.load(y + row * WIDTH + column, mask=mask & (row >= 0), other=0.0)
        # A pair that is not here adds nothing, whatever its weight.
        total += tl.where(row >= 0, weight * value.to(tl.float32), 0.0)
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=mask)


def unpermute(
    y: torch.Tensor, weights: torch.Tensor, plan: Plan, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``y [plan.rows, width]`` fp32, bf16 or fp16 and ``weights [tokens, k]`` fp32 -> ``[tokens,
    width]`` of ``dtype``: each token's weighted sum over its pairs, zeros for one without any.

    Raises ``KernelArgumentError``.
    """
    tokens, top_k = plan.row_of_pair.shape
    check_tensor("y", y, (plan.rows, None), *_FLOATS, like=plan.row_of_pair)
    check_tensor("weights", weights, (tokens, top_k), torch.float32, like=y)
    if dtype not in _FLOATS:
        raise KernelArgumentError("dtype", str(dtype), "float32, bfloat16 or float16")
    width = y.shape[1]
    shape = tile("permute", architecture_of(y.device))
    out = torch.empty((tokens, width), dtype=dtype, device=y.device)
    if tokens and width:
        _unpermute[(tokens, triton.cdiv(width, shape["BLOCK"]))](
            y,
            plan.row_of_pair,
            weights,
            out,
            WIDTH=width,
            TOP_K=top_k,
            BLOCK=shape["BLOCK"],
            num_warps=shape.num_warps,
        )
    return out


def reference_plan(slots: torch.Tensor, num_slots: int, block_m: int) -> Plan:
    """What ``plan`` computes, in plain torch."""
    flat = slots.flatten().long()
    here = (flat >= 0) & (flat < num_slots)
    counted = torch.bincount(flat[here], minlength=num_slots)
    used = (counted + block_m - 1) // block_m
    first = (used.cumsum(0) - used) * block_m
    row = torch.full_like(flat, -1)
    tiles = most_tiles(flat.numel(), num_slots, block_m)
    tile_slot = torch.full((tiles,), -1)
    tile_rows = torch.zeros(tiles, dtype=torch.long)
    for slot in range(num_slots):
        mine = torch.nonzero(flat == slot).flatten()
        row[mine] = first[slot] + torch.arange(mine.numel(), device=flat.device)
        begin = int(first[slot]) // block_m
        for number, at in enumerate(range(0, mine.numel(), block_m)):
            tile_slot[begin + number] = slot
            tile_rows[begin + number] = min(block_m, mine.numel() - at)
    return Plan(
        row.reshape(slots.shape).int(), tile_slot.int(), tile_rows.int(), counted.int(), block_m
    )


def reference_unpermute(y: torch.Tensor, weights: torch.Tensor, plan: Plan) -> torch.Tensor:
    """What ``unpermute`` computes, in plain torch, fp32."""
    row = plan.row_of_pair.long()
    rows = y.float()[row.clamp(min=0)]  # [tokens, k, width]
    rows = torch.where((row >= 0)[..., None], rows * weights[..., None], 0.0)
    return rows.sum(1)


def variants(architecture: int) -> tuple[Variant, ...]:
    """For DeepSeek-V3: hidden 7168, top-8, a rank that holds 32 of the experts."""
    counting, shape = tile("counting", architecture), tile("permute.plan", architecture)
    rows = tile("permute", architecture)
    row_constants = {"WIDTH": 7168, "TOP_K": 8, "BLOCK": rows["BLOCK"]}
    return (
        Variant(
            kernel="permute.plan",
            name="32 slots",
            function=_plan,
            signature={
                "slots": "*i32:16",
                "before": "*i32:16",
                "totals": "*i32:16",
                "row_of_pair": "*i32:16",
                "tile_slot": "*i32:16",
                "tile_rows": "*i32:16",
                "pairs": "i32",
                "tiles": "i32",
            },
            constexprs={
                "NUM_SLOTS": 32,
                "BINS": 64,
                "BLOCK": counting["BLOCK"],
                "BLOCK_M": 64,
                "TILES": shape["TILES"],
            },
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            hot=True,
        ),
        Variant(
            kernel="permute.permute",
            name="bf16, top-8 of 7168",
            function=_permute,
            signature={"x": "*i16:16", "row_of_pair": "*i32:16", "out": "*i16:16"},
            constexprs=row_constants,
            num_warps=rows.num_warps,
            num_stages=rows.num_stages,
            hot=True,
        ),
        Variant(
            kernel="permute.unpermute",
            name="bf16 to fp32, top-8 of 7168",
            function=_unpermute,
            signature={
                "y": "*bf16:16",
                "row_of_pair": "*i32:16",
                "weights": "*fp32:16",
                "out": "*fp32:16",
            },
            constexprs=row_constants,
            num_warps=rows.num_warps,
            num_stages=rows.num_stages,
            hot=True,
        ),
    )
