"""The answers of all expert ranks, added up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_kernels.triton.all_to_all.end import End, columns_of
from ep_kernels.triton.all_to_all.inbox import HEADER_WORDS as HEADER_SIZE
from ep_kernels.triton.all_to_all.inbox import InboxLayout, Wire
from ep_kernels.triton.all_to_all.plan import Lists, Pairs
from ep_kernels.triton.all_to_all.signals import array, flag_at, wait_for_flag
from ep_kernels.triton.parts import part_of_kernel
from ep_kernels.triton.tuning import Tile, tile

HEADER_WORDS = tl.constexpr(HEADER_SIZE)
FP32 = tl.constexpr(int(Wire.FP32))


@triton.jit
def combine_kernel(
    inbox: tl.tensor,
    slot: tl.tensor,
    rank_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    home_ptr: tl.tensor,
    go_ptr: tl.tensor,
    tokens: tl.tensor,
    lanes: tl.tensor,
    source_ptr: tl.tensor,
    out_ptr: tl.tensor,
    answered_ptr: tl.tensor,
    missing_ptr: tl.tensor,
    state_ptr: tl.tensor,
    abort_ptr: tl.tensor,
    limit_ns: tl.tensor,
    EXACT: tl.constexpr,
    WIRE: tl.constexpr,
    STREAMED: tl.constexpr,
    HIDDEN: tl.constexpr,
    K: tl.constexpr,
    CAP: tl.constexpr,
    SLOTS: tl.constexpr,
    FLAG_STRIDE: tl.constexpr,
    HEADERS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCKS_H: tl.constexpr,
) -> None:
    """Add up what the expert ranks answered, token by token, waiting for each lane that matters.

    Grid: max(tokens, lanes), ceil(HIDDEN / (BLOCK_H * BLOCKS_H)). ``out [tokens, HIDDEN]`` fp32:
    partial sums or, ``EXACT``, weighted rows, in the gate's order. Every lane
    is waited for, used or not, and ``answered [lanes]`` is its answer's status (0: none). A token
    that lacks a part has ``missing`` 1 and a row without that part. ``STREAMED``: answers lie at
    the addresses ``source [lanes]``, ``answered`` says which are there, and nothing is waited for.
    """
    token = tl.program_id(0)
    part = tl.program_id(1)
    if not STREAMED:
        _settle(
            (token < lanes) & (part == 0),
            token,
            inbox,
            slot,
            go_ptr,
            answered_ptr,
            state_ptr,
            abort_ptr,
            limit_ns,
            SLOTS,
            FLAG_STRIDE,
            HEADERS,
        )
    if token < tokens:
        lacking = tl.full((), 0, tl.int32)
        for block in range(BLOCKS_H):
            column = (part * BLOCKS_H + block) * BLOCK_H + tl.arange(0, BLOCK_H)
            inside = column < HIDDEN
            total = tl.full((BLOCK_H,), 0.0, tl.float32)
            for j in range(K):
                lane = tl.load(rank_ptr + token * K + j)
                row = tl.load(home_ptr + token * K + j, (lane >= 0) & (lane < lanes), -1)
                if row >= 0:
                    if STREAMED:
                        there = tl.load(answered_ptr + lane) == 1
                        base = tl.load(source_ptr + lane)
                        at = row.to(tl.int64) * HIDDEN
                    else:
                        status = wait_for_answer(
                            lane,
                            inbox,
                            slot,
                            go_ptr,
                            state_ptr,
                            abort_ptr,
                            limit_ns,
                            SLOTS,
                            FLAG_STRIDE,
                            HEADERS,
                        )
                        there = status == 1
                        base = inbox + ROWS_AT
                        at = ((lane * SLOTS + slot).to(tl.int64) * CAP + row) * HIDDEN
                    if there:
                        if WIRE == FP32:
                            from_ptr = array(base, tl.float32)
                        else:
                            from_ptr = array(base, tl.bfloat16)
                        values = tl.load(from_ptr + at + column, inside, 0.0).to(tl.float32)
                        if EXACT:
                            total += tl.load(weight_ptr + token * K + j) * values
                        else:
                            total += values
                    else:
                        lacking = 1
            tl.store(out_ptr + token.to(tl.int64) * HIDDEN + column, total, inside)
        if part == 0:
            tl.store(missing_ptr + token, lacking)


@part_of_kernel
def wait_for_answer(
    lane: tl.tensor,
    inbox: tl.tensor,
    slot: tl.tensor,
    go_ptr: tl.tensor,
    state_ptr: tl.tensor,
    abort_ptr: tl.tensor,
    limit_ns: tl.tensor,
    SLOTS: tl.constexpr,
    FLAG_STRIDE: tl.constexpr,
    HEADERS: tl.constexpr,
) -> tl.tensor:
    """The status of the lane's answer; 0 when there is none."""
    flag = tl.load(go_ptr + lane)
    status = tl.full((), 0, tl.int64)
    if flag != 0:
        flag_ptr = flag_at(inbox + lane * FLAG_STRIDE + slot * 8)
        seen = wait_for_flag(flag_ptr, flag, state_ptr + lane, abort_ptr + lane, limit_ns)
        if seen >= flag:
            at = inbox + HEADERS + (lane * SLOTS + slot).to(tl.int64) * HEADER_WORDS * 8
            header = array(at, tl.int64)
            status = tl.load(header + 6)
    return status


@part_of_kernel
def _settle(
    due: tl.tensor,
    lane: tl.tensor,
    inbox: tl.tensor,
    slot: tl.tensor,
    go_ptr: tl.tensor,
    answered_ptr: tl.tensor,
    state_ptr: tl.tensor,
    abort_ptr: tl.tensor,
    limit_ns: tl.tensor,
    SLOTS: tl.constexpr,
    FLAG_STRIDE: tl.constexpr,
    HEADERS: tl.constexpr,
) -> None:
    """If ``due``, wait for the lane's answer, whether or not a token needs it."""
    if due:
        status = wait_for_answer(
            lane,
            inbox,
            slot,
            go_ptr,
            state_ptr,
            abort_ptr,
            limit_ns,
            SLOTS,
            FLAG_STRIDE,
            HEADERS,
        )
        tl.store(answered_ptr + lane, status.to(tl.int32))


def add_up(
    pairs: Pairs,
    lists: Lists,
    answered: torch.Tensor,
    sources: torch.Tensor,
    layout: InboxLayout,
    architecture: int,
) -> torch.Tensor:
    """Launch ``combine_kernel`` over partial sums that are there: lane ``l``'s rows, if
    ``answered[l]`` is 1, at the address ``sources[l]``. ``layout``: what an answer is like.
    ``[tokens, hidden]`` fp32.
    """
    tokens, top_k = pairs.rank.shape
    lanes, hidden = answered.shape[0], layout.shape.hidden
    shape = tile("combine", architecture)
    out = torch.empty((tokens, hidden), device=answered.device)
    missing = torch.empty(tokens, dtype=torch.int32, device=answered.device)
    constants = constants_of(layout, shape, top_k=top_k, exact=False, streamed=True)
    columns = constants["BLOCK_H"] * constants["BLOCKS_H"]
    combine_kernel[(tokens, triton.cdiv(hidden, columns))](
        0,
        0,
        pairs.rank,
        pairs.weight,
        lists.home,
        answered,
        tokens,
        lanes,
        sources,
        out,
        answered,
        missing,
        answered,
        answered,
        0,
        num_warps=shape.num_warps,
        **constants,
    )
    return out


def combine(
    end: End,
    slot: int,
    pairs: Pairs,
    lists: Lists,
    go: torch.Tensor,
    answered: torch.Tensor,
    sources: torch.Tensor,
    *,
    exact: bool,
    streamed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch ``combine_kernel``."""
    tokens, top_k = pairs.rank.shape
    layout = end.layout
    hidden = layout.shape.hidden
    shape = tile("combine", end.architecture)
    out = torch.empty((tokens, hidden), device=end.device)
    missing = torch.empty(tokens, dtype=torch.int32, device=end.device)
    constants = constants_of(layout, shape, top_k=top_k, exact=exact, streamed=streamed)
    columns = constants["BLOCK_H"] * constants["BLOCKS_H"]
    grid = (max(tokens, len(end.peers)), triton.cdiv(hidden, columns))
    combine_kernel[grid](
        end.inbox.address,
        slot,
        pairs.rank,
        pairs.weight,
        lists.home,
        go,
        tokens,
        len(end.peers),
        sources,
        out,
        answered,
        missing,
        end.state,
        end.abort,
        end.limit_ns,
        num_warps=shape.num_warps,
        **constants,
    )
    return out, missing


def constants_of(
    layout: InboxLayout, shape: Tile, *, top_k: int, exact: bool, streamed: bool
) -> dict[str, int]:
    hidden = layout.shape.hidden
    columns = columns_of(shape["BLOCK_H"], hidden, scaled=False)
    return {
        "EXACT": exact,
        "WIRE": int(layout.shape.wire),
        "STREAMED": streamed,
        "HIDDEN": hidden,
        "K": top_k,
        "CAP": layout.shape.capacity_rows,
        "SLOTS": layout.shape.ring_slots,
        "FLAG_STRIDE": layout.flag_stride,
        "HEADERS": layout.headers,
        "ROWS_AT": layout.rows,
        "BLOCK_H": columns,
        "BLOCKS_H": min(shape["BLOCKS_H"], triton.cdiv(hidden, columns)),
    }
