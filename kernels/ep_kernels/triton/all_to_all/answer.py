"""The experts' output back to the routers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_kernels.triton.all_to_all.end import End, columns_of
from ep_kernels.triton.all_to_all.inbox import HEADER_WORDS as HEADER_SIZE
from ep_kernels.triton.all_to_all.inbox import InboxLayout, Wire
from ep_kernels.triton.all_to_all.rounding import bf16_bits
from ep_kernels.triton.all_to_all.signals import array, flag_at, last_to_finish, publish
from ep_kernels.triton.tuning import Tile, tile

HEADER_WORDS = tl.constexpr(HEADER_SIZE)
FP32 = tl.constexpr(int(Wire.FP32))


@triton.jit
def answer_kernel(
    y_ptr: tl.tensor,
    y_stride: tl.tensor,
    where_ptr: tl.tensor,
    lanes_ptr: tl.tensor,
    slot: tl.tensor,
    got_ptr: tl.tensor,
    info_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    state_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    address_ptr: tl.tensor,
    me_ptr: tl.tensor,
    EXACT: tl.constexpr,
    POST: tl.constexpr,
    WIRE: tl.constexpr,
    HIDDEN: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    FLAG_STRIDE: tl.constexpr,
    TAKEN: tl.constexpr,
    HEADERS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """Write each message's answer into its router's inbox, post it, and give the message back.

    Grid: lanes, ceil(most rows / ROWS). ``y`` is the experts' output. A row of the answer is the
    weighted sum of a token's pairs in the gate's order or, ``EXACT``, a pair's unweighted row.
    ``where [lanes, 5]`` are addresses of the message's begins, its weights, ``home`` (a pair's row
    of ``y``) and an array of rows, and the row of that where the answer begins. A stale message has
    an answer without rows. Without ``POST`` only the rows are written.
    """
    which = tl.program_id(0)
    block = tl.program_id(1)
    lane = tl.load(lanes_ptr + which)
    flag = tl.load(got_ptr + which)
    stale = tl.load(info_ptr + which * 4 + 2)
    pairs = tl.load(info_ptr + which * 4 + 1)
    rows = pairs if EXACT else tl.load(info_ptr + which * 4)
    rows = tl.where(stale != 0, 0, rows)
    programs = tl.maximum((rows + ROWS - 1) // ROWS, 1)
    open_ = tl.load(state_ptr + lane) == 0
    if (flag != 0) & open_ & (block < programs):
        begins = array(tl.load(where_ptr + which * 5), tl.int32)
        weights = array(tl.load(where_ptr + which * 5 + 1), tl.float32)
        home = array(tl.load(where_ptr + which * 5 + 2), tl.int32)
        to = tl.load(where_ptr + which * 5 + 3)
        to_row = tl.load(where_ptr + which * 5 + 4)
        i = block * ROWS + tl.arange(0, ROWS)
        live = i < rows
        if EXACT:
            first = i
            end = i + 1
        else:
            first = tl.load(begins + i, live, 0)
            end = tl.load(begins + i + 1, live, 0)
        for h in range(0, HIDDEN, BLOCK_H):
            column = h + tl.arange(0, BLOCK_H)
            inside = (column < HIDDEN)[None, :]
            total = tl.full((ROWS, BLOCK_H), 0.0, tl.float32)
            for j in range(1 if EXACT else K):
                pair = first + j
                real = live & (pair < end) & (pair >= 0) & (pair < pairs)
                source = tl.load(home + pair, real, 0).to(tl.int64)
                mask = real[:, None] & inside
                values = tl.load(y_ptr + source[:, None] * y_stride + column[None, :], mask, 0.0)
                if EXACT:
                    total = values.to(tl.float32)
                else:
                    weight = tl.load(weights + pair, real, 0.0)
                    total += weight[:, None] * values.to(tl.float32)
            mask = live[:, None] & inside
            at = (to_row + i)[:, None] * HIDDEN + column[None, :]
            if WIRE == FP32:
                tl.store(array(to, tl.float32) + at, total, mask)
            else:
                tl.store(array(to, tl.uint16) + at, bf16_bits(total), mask)
        if POST:
            peer = tl.load(address_ptr + lane)
            me = tl.load(me_ptr + lane)
            if block == 0:
                at = peer + HEADERS + (me * SLOTS + slot).to(tl.int64) * HEADER_WORDS * 8
                header = array(at, tl.int64)
                tl.store(header, flag)
                tl.store(header + 4, rows.to(tl.int64))
                tl.store(header + 6, tl.where(stale != 0, 2, 1).to(tl.int64))
            if last_to_finish(counter_ptr + lane, programs):
                tl.store(info_ptr + which * 4 + 2, 0)
                tl.store(seen_ptr + lane * SLOTS + slot, flag)
                at = peer + me * FLAG_STRIDE + slot * 8
                publish(flag_at(at + TAKEN), flag)
                publish(flag_at(at), flag)


def answer(
    end: End,
    slot: int,
    y: torch.Tensor,
    lanes: torch.Tensor,
    where: torch.Tensor,
    got: torch.Tensor,
    info: torch.Tensor,
    most_rows: int,
    *,
    top_k: int,
    exact: bool,
    post: bool,
) -> None:
    """Launch ``answer_kernel``."""
    shape = tile("answer", end.architecture)
    grid = (lanes.shape[0], max(1, triton.cdiv(most_rows, shape["ROWS"])))
    answer_kernel[grid](
        y,
        y.stride(0),
        where,
        lanes,
        slot,
        got,
        info,
        end.seen,
        end.state,
        end.counter,
        end.addresses,
        end.me,
        num_warps=shape.num_warps,
        **constants_of(end.peer_layout, shape, top_k=top_k, exact=exact, post=post),
    )


def constants_of(
    layout: InboxLayout, shape: Tile, *, top_k: int, exact: bool, post: bool
) -> dict[str, int | bool]:
    return {
        "EXACT": exact,
        "POST": post,
        "WIRE": int(layout.shape.wire),
        "HIDDEN": layout.shape.hidden,
        "K": top_k,
        "SLOTS": layout.shape.ring_slots,
        "FLAG_STRIDE": layout.flag_stride,
        "TAKEN": layout.taken,
        "HEADERS": layout.headers,
        "ROWS": shape["ROWS"],
        "BLOCK_H": columns_of(shape["BLOCK_H"], layout.shape.hidden, scaled=False),
    }
