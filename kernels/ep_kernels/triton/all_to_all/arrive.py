"""What has come, by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_kernels.triton.all_to_all.end import End
from ep_kernels.triton.all_to_all.inbox import HEADER_WORDS as HEADER_SIZE
from ep_kernels.triton.all_to_all.inbox import InboxLayout, LaneState
from ep_kernels.triton.all_to_all.signals import array, flag_at, wait_for_flag
from ep_kernels.triton.tuning import Tile, tile

HEADER_WORDS = tl.constexpr(HEADER_SIZE)
CORRUPT = tl.constexpr(int(LaneState.CORRUPT))


@dataclass(frozen=True, slots=True)
class Arrived:
    """Messages on ``lanes`` in one ring slot, indexed by expert; valid until answered.

    ``index [experts, lanes, capacity_tokens]`` int32: of each expert slot and lane the first
    ``count [experts, lanes]`` are rows of ``ExpertExchange.rows``. The experts' output goes to the
    same places of ``y [experts * lanes * capacity_tokens, hidden]``.
    """

    slot: int
    lanes: torch.Tensor
    index: torch.Tensor
    count: torch.Tensor
    home: torch.Tensor
    info: torch.Tensor
    """``[lanes, 4]`` int32: rows, pairs, whether the message is stale."""
    got: torch.Tensor
    where: torch.Tensor


@triton.jit
def arrive_kernel(
    inbox: tl.tensor,
    lanes_ptr: tl.tensor,
    lanes: tl.tensor,
    slot: tl.tensor,
    held_ptr: tl.tensor,
    experts: tl.tensor,
    seen_ptr: tl.tensor,
    got_ptr: tl.tensor,
    info_ptr: tl.tensor,
    index_ptr: tl.tensor,
    home_ptr: tl.tensor,
    count_ptr: tl.tensor,
    state_ptr: tl.tensor,
    abort_ptr: tl.tensor,
    limit_ns: tl.tensor,
    CAP: tl.constexpr,
    PAIR_CAP: tl.constexpr,
    SLOTS: tl.constexpr,
    FLAG_STRIDE: tl.constexpr,
    HEADERS: tl.constexpr,
    PAIR_AT: tl.constexpr,
    PAIR_STRIDE: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Wait for a message on each of ``lanes`` and index its rows by the expert slots they are for.

    Grid: lanes, local slots; each program waits for its own lane only, so an expert's rows from a
    router are known as soon as that router's message is there. ``index [experts, lanes, CAP]``
    are rows of the inbox's row array, ``count [experts, lanes]`` of them; ``home [lanes,
    PAIR_CAP]`` is where in ``index`` a pair went, or -1. ``info [lanes, 4]``: rows, pairs, whether
    a pair named a slot that does not hold its expert (cleared by ``answer_kernel``).
    """
    which = tl.program_id(0)
    expert_slot = tl.program_id(1)
    lane = tl.load(lanes_ptr + which)
    seen = tl.load(seen_ptr + lane * SLOTS + slot)
    flag_ptr = flag_at(inbox + lane * FLAG_STRIDE + slot * 8)
    flag = wait_for_flag(flag_ptr, seen + 1, state_ptr + lane, abort_ptr + lane, limit_ns)
    found = tl.full((), 0, tl.int32)
    if (flag > seen) & (tl.load(state_ptr + lane, volatile=True) == 0):
        message = (lane * SLOTS + slot).to(tl.int64)
        header = array(inbox + HEADERS + message * HEADER_WORDS * 8, tl.int64)
        rows = tl.load(header + 4)
        pairs = tl.load(header + 5)
        sound = (tl.load(header) == flag) & (rows >= 0) & (rows <= CAP)
        sound = sound & (pairs >= 0) & (pairs <= PAIR_CAP)
        if sound:
            at = inbox + PAIR_AT + message * 4 * PAIR_STRIDE
            row_ptr = array(at, tl.int32)
            slot_ptr = array(at + PAIR_STRIDE, tl.int32)
            expert_ptr = array(at + 2 * PAIR_STRIDE, tl.int32)
            held = tl.load(held_ptr + expert_slot)
            stale = tl.full((), 0, tl.int32)
            begin = (expert_slot * lanes + which) * CAP
            for p in range(0, pairs.to(tl.int32), BLOCK_P):
                pair = p + tl.arange(0, BLOCK_P)
                live = pair < pairs
                named = tl.load(slot_ptr + pair, live, expert_slot)
                row = tl.load(row_ptr + pair, live, 0)
                # A row beyond the message must not be read, and cannot be ours.
                bad = (named < 0) | (named >= experts) | (row < 0) | (row >= rows)
                mine = live & (named == expert_slot) & ~bad
                wrong = mine & (tl.load(expert_ptr + pair, mine, 0) != held)
                stale = tl.maximum(stale, tl.max((wrong | (live & bad)).to(tl.int32), 0))
                one = mine.to(tl.int32)
                place = found + tl.cumsum(one, 0) - one
                fits = mine & (place < CAP)  # a token names a slot once; nonsense is cut
                tl.store(index_ptr + begin + place, (message * CAP + row).to(tl.int32), fits)
                tl.store(home_ptr + which * PAIR_CAP + pair, begin + place, fits)
                if expert_slot == 0:
                    tl.store(
                        home_ptr + which * PAIR_CAP + pair,
                        tl.full((BLOCK_P,), -1, tl.int32),
                        live & bad,
                    )
                found += tl.sum(one, 0)
            found = tl.minimum(found, CAP)
            if stale != 0:
                tl.atomic_max(info_ptr + which * 4 + 2, stale)
        else:
            tl.store(state_ptr + lane, CORRUPT)
        if expert_slot == 0:
            tl.store(got_ptr + which, tl.where(sound, flag, 0))
            tl.store(info_ptr + which * 4, tl.where(sound, rows, 0).to(tl.int32))
            tl.store(info_ptr + which * 4 + 1, tl.where(sound, pairs, 0).to(tl.int32))
    elif expert_slot == 0:
        tl.store(got_ptr + which, tl.full((), 0, tl.int64))
        tl.store(info_ptr + which * 4, 0)
        tl.store(info_ptr + which * 4 + 1, 0)
    tl.store(count_ptr + expert_slot * lanes + which, found)


def arrive(end: End, slot: int, held: torch.Tensor, arrived: Arrived) -> None:
    """Launch ``arrive_kernel``."""
    shape = tile("arrive", end.architecture)
    arrive_kernel[(arrived.lanes.shape[0], held.shape[0])](
        end.inbox.address,
        arrived.lanes,
        arrived.lanes.shape[0],
        slot,
        held,
        held.shape[0],
        end.seen,
        arrived.got,
        arrived.info,
        arrived.index,
        arrived.home,
        arrived.count,
        end.state,
        end.abort,
        end.limit_ns,
        num_warps=shape.num_warps,
        **constants_of(end.layout, shape),
    )


def constants_of(layout: InboxLayout, shape: Tile) -> dict[str, int]:
    return {
        "CAP": layout.shape.capacity_rows,
        "PAIR_CAP": layout.shape.capacity_pairs,
        "SLOTS": layout.shape.ring_slots,
        "FLAG_STRIDE": layout.flag_stride,
        "HEADERS": layout.headers,
        "PAIR_AT": layout.pairs,
        "PAIR_STRIDE": layout.pair_stride,
        "BLOCK_P": shape["BLOCK_P"],
    }
