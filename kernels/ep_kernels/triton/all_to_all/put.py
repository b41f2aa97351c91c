"""Rows, pairs, header and flag into every peer's inbox."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from ep_kernels import fp8
from ep_kernels.triton.all_to_all.end import columns_of
from ep_kernels.triton.all_to_all.inbox import HEADER_WORDS as HEADER_SIZE
from ep_kernels.triton.all_to_all.inbox import InboxLayout, Wire
from ep_kernels.triton.all_to_all.plan import Lists
from ep_kernels.triton.all_to_all.rounding import bf16_bits, e4m3_bits
from ep_kernels.triton.all_to_all.signals import array, flag_at, last_to_finish, publish
from ep_kernels.triton.parts import part_of_kernel
from ep_kernels.triton.tuning import Tile, tile

HEADER_WORDS = tl.constexpr(HEADER_SIZE)
FP32 = tl.constexpr(int(Wire.FP32))
BF16 = tl.constexpr(int(Wire.BF16))
LARGEST = tl.constexpr(fp8.LARGEST)
FLOOR = tl.constexpr(fp8.SMALLEST)


class Sender(Protocol):
    """What a launch needs to know of who sends: an ``End``, or one lane's."""

    peer_layout: InboxLayout
    architecture: int
    addresses: torch.Tensor
    """Of the peers' inboxes."""
    me: torch.Tensor
    """Our number among each peer's peers."""
    stamp: torch.Tensor
    """``[3]`` int64: step, epoch, and when the message was sent (or began, of an answer)."""
    counter: torch.Tensor


@part_of_kernel
def copy_words(
    from_ptr: tl.tensor,
    to_address: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    shift: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """``count`` 32-bit values from ``from_ptr + first``, less ``shift``, to an address."""
    to_ptr = to_address.to(tl.pointer_type(tl.int32))
    for p in range(0, count, BLOCK):
        at = p + tl.arange(0, BLOCK)
        tl.store(to_ptr + at, tl.load(from_ptr + first + at, at < count, 0) - shift, at < count)


@triton.jit(do_not_specialize=["slot", "layer"])
def put_kernel(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    row_token_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    pair_row_ptr: tl.tensor,
    pair_slot_ptr: tl.tensor,
    pair_expert_ptr: tl.tensor,
    pair_weight_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    go_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    address_ptr: tl.tensor,
    me_ptr: tl.tensor,
    slot: tl.tensor,
    stamp_ptr: tl.tensor,
    layer: tl.tensor,
    first_ptr: tl.tensor,
    status_ptr: tl.tensor,
    WIRE: tl.constexpr,
    HIDDEN: tl.constexpr,
    LIST: tl.constexpr,
    PAIR_LIST: tl.constexpr,
    PAIRS: tl.constexpr,
    CAP: tl.constexpr,
    SLOTS: tl.constexpr,
    FLAG_STRIDE: tl.constexpr,
    HEADERS: tl.constexpr,
    BEGINS: tl.constexpr,
    BEGIN_STRIDE: tl.constexpr,
    PAIR_AT: tl.constexpr,
    PAIR_STRIDE: tl.constexpr,
    ROWS_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Write the next rows of each lane's list, from ``first``, into its peer's inbox; post them.

    Grid: lanes, ceil(CAP / ROWS). ``x`` fp32 or bf16 ``[tokens, HIDDEN]``; with ``PAIRS`` a lane's
    rows are those of ``row_token``, else those of ``x`` as they lie (an answer, to one lane).
    """
    lane = tl.program_id(0)
    block = tl.program_id(1)
    flag = tl.load(go_ptr + lane)
    first = tl.load(first_ptr + lane)
    total = tl.load(counts_ptr + lane * 2)
    rows = tl.minimum(tl.maximum(total - first, 0), CAP)
    programs = tl.maximum((rows + ROWS - 1) // ROWS, 1)
    if (flag != 0) & (block < programs):
        peer = tl.load(address_ptr + lane)
        me = tl.load(me_ptr + lane)
        message = (me * SLOTS + slot).to(tl.int64)
        i = block * ROWS + tl.arange(0, ROWS)
        live = i < rows
        to_row = message * CAP + i  # [ROWS], of the peer's row array
        if PAIRS:
            source = tl.load(row_token_ptr + lane * LIST + first + i, live, 0).to(tl.int64)
        else:
            source = (first + i).to(tl.int64)
        for h in range(0, HIDDEN, BLOCK_H):
            column = h + tl.arange(0, BLOCK_H)
            mask = live[:, None] & (column < HIDDEN)[None, :]
            values = tl.load(x_ptr + source[:, None] * x_stride + column[None, :], mask, 0.0)
            values = values.to(tl.float32)  # [ROWS, BLOCK_H]
            at = to_row[:, None] * HIDDEN + column[None, :]
            if WIRE == FP32:
                tl.store(array(peer + ROWS_AT, tl.float32) + at, values, mask)
            elif WIRE == BF16:
                tl.store(array(peer + ROWS_AT, tl.uint16) + at, bf16_bits(values), mask)
            else:
                groups = tl.reshape(values, (ROWS, BLOCK_H // 128, 128))
                peak = tl.max(tl.abs(groups), 2)  # [ROWS, BLOCK_H / 128]
                scale = tl.maximum(peak, FLOOR) / LARGEST
                scaled = tl.reshape(groups / scale[:, :, None], (ROWS, BLOCK_H))
                tl.store(array(peer + ROWS_AT, tl.uint8) + at, e4m3_bits(scaled), mask)
                group = h // 128 + tl.arange(0, BLOCK_H // 128)
                at = to_row[:, None] * (HIDDEN // 128) + group[None, :]
                inside = live[:, None] & (group < HIDDEN // 128)[None, :]
                tl.store(array(peer + SCALES_AT, tl.float32) + at, scale, inside)
        if block == 0:
            header = array(peer + HEADERS + message * HEADER_WORDS * 8, tl.int64)
            tl.store(header, flag)
            tl.store(header + 1, tl.load(stamp_ptr))
            tl.store(header + 2, layer.to(tl.int64))
            tl.store(header + 3, tl.load(stamp_ptr + 1))
            tl.store(header + 4, rows.to(tl.int64))
            tl.store(header + 7, first.to(tl.int64))
            tl.store(header + 8, total.to(tl.int64))
            if not PAIRS:
                tl.store(header + 6, tl.load(status_ptr + lane).to(tl.int64))
                tl.store(header + 5, tl.full((), 0, tl.int64))
                tl.store(header + 9, tl.full((), 0, tl.int64))
                tl.store(header + 10, tl.full((), 0, tl.int64))
            if PAIRS:
                tl.store(header + 6, tl.load(stamp_ptr + 2))
                pair = tl.load(begin_ptr + lane * (LIST + 1) + first)
                pairs = tl.load(begin_ptr + lane * (LIST + 1) + first + rows) - pair
                tl.store(header + 5, pairs.to(tl.int64))
                tl.store(header + 9, pair.to(tl.int64))
                tl.store(header + 10, tl.load(counts_ptr + lane * 2 + 1).to(tl.int64))
                at = peer + BEGINS + message * BEGIN_STRIDE
                copy_words(begin_ptr + lane * (LIST + 1), at, first, rows + 1, pair, BLOCK_P)
                at = peer + PAIR_AT + message * 4 * PAIR_STRIDE
                own = lane * PAIR_LIST
                copy_words(pair_row_ptr + own, at, pair, pairs, first, BLOCK_P)
                copy_words(pair_slot_ptr + own, at + PAIR_STRIDE, pair, pairs, 0, BLOCK_P)
                copy_words(pair_expert_ptr + own, at + 2 * PAIR_STRIDE, pair, pairs, 0, BLOCK_P)
                copy_words(pair_weight_ptr + own, at + 3 * PAIR_STRIDE, pair, pairs, 0, BLOCK_P)
        if last_to_finish(counter_ptr + lane, programs):
            at = peer + me * FLAG_STRIDE + slot * 8
            publish(flag_at(at), flag)


def put(
    end: Sender,
    x: torch.Tensor,
    counts: torch.Tensor,
    slot: int,
    go: torch.Tensor,
    layer: int,
    firsts: torch.Tensor,
    *,
    lists: Lists | None = None,
    statuses: torch.Tensor | None = None,
) -> None:
    """Launch ``put_kernel``: on each lane with a flag in ``go`` one message of the rows from
    ``firsts [lanes]`` on, of ``counts [lanes, 2]`` rows and pairs.

    Without ``lists`` they are answers: rows of ``x`` as they lie, without pairs, of ``statuses``
    ``[lanes]`` int32.
    """
    layout = end.peer_layout
    shape = tile("put", end.architecture)
    message = layout.shape
    put_kernel[(counts.shape[0], triton.cdiv(message.capacity_rows, shape["ROWS"]))](
        x,
        x.stride(0),
        counts if lists is None else lists.row_token,
        counts if lists is None else lists.begin,
        counts if lists is None else lists.pair_row,
        counts if lists is None else lists.pair_slot,
        counts if lists is None else lists.pair_expert,
        counts if lists is None else lists.pair_weight.view(torch.int32),
        counts,
        go,
        end.counter,
        end.addresses,
        end.me,
        slot,
        end.stamp,
        layer,
        firsts,
        counts if statuses is None else statuses,
        LIST=0 if lists is None else lists.tokens,
        PAIR_LIST=0 if lists is None else lists.pair_row.shape[1],
        num_warps=shape.num_warps,
        **constants_of(layout, shape, pairs=lists is not None),
    )


def constants_of(layout: InboxLayout, shape: Tile, *, pairs: bool) -> dict[str, int | bool]:
    message = layout.shape
    columns = shape["BLOCK_BYTES"] // message.wire.value_bytes  # 16 bytes a thread
    return {
        "WIRE": int(message.wire),
        "HIDDEN": message.hidden,
        "PAIRS": pairs,
        "CAP": message.capacity_rows,
        "SLOTS": message.ring_slots,
        "FLAG_STRIDE": layout.flag_stride,
        "HEADERS": layout.headers,
        "BEGINS": layout.begins,
        "BEGIN_STRIDE": layout.begin_stride,
        "PAIR_AT": layout.pairs,
        "PAIR_STRIDE": layout.pair_stride,
        "ROWS_AT": layout.rows,
        "SCALES_AT": layout.scales,
        "ROWS": shape["ROWS"],
        "BLOCK_H": columns_of(columns, message.hidden, scaled=message.wire is Wire.FP8),
        "BLOCK_P": shape["BLOCK_P"],
    }
