"""Chunks of a long batch to where the whole of it belongs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ep_kernels.triton.all_to_all.end import End, columns_of
from ep_kernels.triton.all_to_all.inbox import HEADER_WORDS as HEADER_SIZE
from ep_kernels.triton.all_to_all.inbox import InboxLayout
from ep_kernels.triton.all_to_all.put import copy_words
from ep_kernels.triton.all_to_all.signals import array, flag_at, last_to_finish, publish
from ep_kernels.triton.parts import part_of_kernel
from ep_kernels.triton.tuning import Tile, tile

HEADER_WORDS = tl.constexpr(HEADER_SIZE)


@triton.jit
def drain_kernel(
    inbox: tl.tensor,
    lanes_ptr: tl.tensor,
    slot: tl.tensor,
    target_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    address_ptr: tl.tensor,
    me_ptr: tl.tensor,
    KIND: tl.constexpr,
    HIDDEN: tl.constexpr,
    SCALES: tl.constexpr,
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
    PEER_FLAG_STRIDE: tl.constexpr,
    PEER_TAKEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Copy a chunk that has arrived on each of ``lanes`` to where the whole batch belongs, and
    give the ring slot back at once.

    Grid: lanes, ceil(CAP / ROWS). ``target [lanes, 7]`` addresses of arrays for the batch: rows,
    scales, begins, pair rows, slots, experts, weights, sized by the first chunk's totals.
    """
    which = tl.program_id(0)
    block = tl.program_id(1)
    lane = tl.load(lanes_ptr + which)
    message = (lane * SLOTS + slot).to(tl.int64)
    flag_ptr = flag_at(inbox + lane * FLAG_STRIDE + slot * 8)
    flag = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    header = array(inbox + HEADERS + message * HEADER_WORDS * 8, tl.int64)
    rows = tl.load(header + 4).to(tl.int32)
    first = tl.load(header + 7)
    programs = tl.maximum((rows + ROWS - 1) // ROWS, 1)
    target = target_ptr + which * 7
    if block < programs:
        i = block * ROWS + tl.arange(0, ROWS)
        live = i < rows
        from_row = (message * CAP + i)[:, None]
        to_row = (first + i)[:, None]
        for h in range(0, HIDDEN, BLOCK_H):
            column = h + tl.arange(0, BLOCK_H)
            mask = live[:, None] & (column < HIDDEN)[None, :]
            source = array(inbox + ROWS_AT, KIND) + from_row * HIDDEN + column[None, :]
            to = array(tl.load(target), KIND) + to_row * HIDDEN + column[None, :]
            tl.store(to, tl.load(source, mask, 0), mask)
        for g in range(0, SCALES, BLOCK_S):
            group = g + tl.arange(0, BLOCK_S)
            mask = live[:, None] & (group < SCALES)[None, :]
            source = array(inbox + SCALES_AT, tl.float32) + from_row * SCALES + group[None, :]
            to = array(tl.load(target + 1), tl.float32) + to_row * SCALES + group[None, :]
            tl.store(to, tl.load(source, mask, 0.0), mask)
        if PAIRS:
            _drain_pairs(
                block,
                inbox + BEGINS + message * BEGIN_STRIDE,
                inbox + PAIR_AT + message * 4 * PAIR_STRIDE,
                header,
                target,
                PAIR_STRIDE,
                BLOCK_P,
            )
        if last_to_finish(counter_ptr + lane, programs):
            tl.store(seen_ptr + lane * SLOTS + slot, flag)
            peer = tl.load(address_ptr + lane)
            me = tl.load(me_ptr + lane)
            at = peer + PEER_TAKEN + me * PEER_FLAG_STRIDE + slot * 8
            publish(flag_at(at), flag)


@part_of_kernel
def _drain_pairs(
    block: tl.tensor,
    begins: tl.tensor,
    arrays: tl.tensor,
    header: tl.tensor,
    target: tl.tensor,
    PAIR_STRIDE: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """A chunk's begins and pairs, numbered within the batch."""
    if block == 0:
        rows = tl.load(header + 4).to(tl.int32)
        pairs = tl.load(header + 5).to(tl.int32)
        first = tl.load(header + 7)
        pair = tl.load(header + 9)
        to = tl.load(target + 2) + first * 4
        copy_words(array(begins, tl.int32), to, 0, rows + 1, -pair.to(tl.int32), BLOCK_P)
        for i in range(4):
            to = tl.load(target + 3 + i) + pair * 4
            shift = tl.where(i == 0, -first.to(tl.int32), 0)
            source = array(arrays + i * PAIR_STRIDE, tl.int32)
            copy_words(source, to, 0, pairs, shift, BLOCK_P)


_KINDS = (tl.uint32, tl.uint16, tl.uint8)


def drain(end: End, lane: int, slot: int, arrays: tuple[torch.Tensor, ...]) -> None:
    """Launch ``drain_kernel`` for one lane; ``arrays`` as ``target`` lists them."""
    layout, back = end.layout, end.peer_layout
    shape = tile("drain", end.architecture)
    device = end.device
    drain_kernel[(1, triton.cdiv(layout.shape.capacity_rows, shape["ROWS"]))](
        end.inbox.address,
        torch.tensor([lane], dtype=torch.int32, device=device),
        slot,
        torch.tensor([[array.data_ptr() for array in arrays]], device=device),
        end.seen,
        end.counter,
        end.addresses,
        end.me,
        num_warps=shape.num_warps,
        **constants_of(layout, back, shape),
    )


def constants_of(layout: InboxLayout, back: InboxLayout, shape: Tile) -> dict[str, Any]:
    message = layout.shape
    scales = layout.scale_row_bytes // 4
    return {
        "KIND": _KINDS[message.wire],
        "HIDDEN": message.hidden,
        "SCALES": scales,
        "PAIRS": message.capacity_pairs > 0,
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
        "PEER_FLAG_STRIDE": back.flag_stride,
        "PEER_TAKEN": back.taken,
        "ROWS": shape["ROWS"],
        "BLOCK_H": columns_of(shape["BLOCK_H"], message.hidden, scaled=False),
        "BLOCK_S": triton.next_power_of_2(max(1, scales)),
        "BLOCK_P": shape["BLOCK_P"],
    }
