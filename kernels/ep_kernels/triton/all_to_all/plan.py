"""Who gets which token: each lane's message as lists, and the ring slots they go into."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_kernels.triton.all_to_all.end import End
from ep_kernels.triton.all_to_all.inbox import InboxLayout
from ep_kernels.triton.all_to_all.signals import flag_at, wait_for_flag
from ep_kernels.triton.arguments import check_tensor
from ep_kernels.triton.parts import part_of_kernel
from ep_kernels.triton.tuning import Tile, tile

SEQUENCE_MASK = tl.constexpr(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Where a batch's pairs go, each ``[tokens, top_k]`` contiguous: expert rank (or -1: nowhere),
    that rank's slot, logical expert (int32) and the gate's weight (fp32).
    """

    rank: torch.Tensor
    slot: torch.Tensor
    expert: torch.Tensor
    weight: torch.Tensor

    def check(self, x: torch.Tensor, top_k: int) -> None:
        """Raises ``KernelArgumentError``. Ranks and slots are not looked at: that would wait."""
        wanted = (x.shape[0], top_k)
        for name in ("rank", "slot", "expert"):
            check_tensor(name, getattr(self, name), wanted, torch.int32, like=x)
        check_tensor("weight", self.weight, wanted, torch.float32, like=x)


class Lists:
    """Messages of a batch as ``plan_kernel`` makes them; ``[lanes, ...]`` each."""

    def __init__(self, lanes: int, tokens: int, top_k: int, device: torch.device) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        self.tokens = tokens
        """Most tokens of a batch."""
        self.row_token = ints(lanes, tokens)
        self.begin = ints(lanes, tokens + 1)
        self.pair_row = ints(lanes, tokens * top_k)
        self.pair_slot = ints(lanes, tokens * top_k)
        self.pair_expert = ints(lanes, tokens * top_k)
        self.pair_weight = torch.empty((lanes, tokens * top_k), device=device)
        self.counts = ints(lanes, 2)
        self.home = ints(tokens, top_k)


@part_of_kernel
def claim(
    lane: tl.tensor,
    slot: tl.tensor,
    stamp_ptr: tl.tensor,
    inbox: tl.tensor,
    sent_ptr: tl.tensor,
    go_ptr: tl.tensor,
    state_ptr: tl.tensor,
    abort_ptr: tl.tensor,
    limit_ns: tl.tensor,
    SLOTS: tl.constexpr,
    FLAG_STRIDE: tl.constexpr,
    TAKEN: tl.constexpr,
) -> None:
    """Take the lane's ring slot for the next message once the last one in it has been read."""
    sent = tl.load(sent_ptr + lane * SLOTS + slot)
    taken_ptr = flag_at(inbox + TAKEN + lane * FLAG_STRIDE + slot * 8)
    seen = wait_for_flag(taken_ptr, sent, state_ptr + lane, abort_ptr + lane, limit_ns)
    flag = tl.full((), 0, tl.int64)
    if (seen >= sent) & (tl.load(state_ptr + lane, volatile=True) == 0):
        flag = (tl.load(stamp_ptr + 1) << 32) | ((sent & SEQUENCE_MASK) + 1)
        tl.store(sent_ptr + lane * SLOTS + slot, flag)
    tl.store(go_ptr + lane, flag)


@triton.jit
def plan_kernel(
    rank_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    tokens: tl.tensor,
    row_token_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    pair_row_ptr: tl.tensor,
    pair_slot_ptr: tl.tensor,
    pair_expert_ptr: tl.tensor,
    pair_weight_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    home_ptr: tl.tensor,
    inbox: tl.tensor,
    ring_slot: tl.tensor,
    stamp_ptr: tl.tensor,
    sent_ptr: tl.tensor,
    go_ptr: tl.tensor,
    state_ptr: tl.tensor,
    abort_ptr: tl.tensor,
    limit_ns: tl.tensor,
    K: tl.constexpr,
    CAP: tl.constexpr,
    EXACT: tl.constexpr,
    CLAIM: tl.constexpr,
    SLOTS: tl.constexpr,
    FLAG_STRIDE: tl.constexpr,
    TAKEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Each lane's message: tokens in their order, each once, and their pairs in the gate's order.

    Grid: lanes. ``rank``, ``slot``, ``expert``, ``weight`` ``[tokens, K]``; rank -1 goes nowhere.
    Lists are ``[lanes, CAP]``, pairs ``[lanes, CAP * K]``, begins ``[lanes, CAP + 1]``.
    ``home [CAP, K]`` is a pair's place in its lane's answer: ``EXACT`` the pair's number, else the
    token's row, or -1 where an earlier pair stands for it. With ``CLAIM`` the ring slot is taken.
    """
    lane = tl.program_id(0)
    rows = tl.full((), 0, tl.int32)
    pairs = tl.full((), 0, tl.int32)
    k = tl.arange(0, BLOCK_K)[None, :]
    for first in range(0, tokens, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        live = (t < tokens)[:, None] & (k < K)
        at = t[:, None] * K + k
        mine = (tl.load(rank_ptr + at, live, -1) == lane).to(tl.int32)  # [BLOCK_T, BLOCK_K]
        count = tl.sum(mine, 1)
        has = (count > 0).to(tl.int32)
        row = rows + tl.cumsum(has, 0) - has
        begin = pairs + tl.cumsum(count, 0) - count
        before = tl.cumsum(mine, 1) - mine
        pair = begin[:, None] + before
        own_row = tl.broadcast_to(row[:, None], (BLOCK_T, BLOCK_K))
        tl.store(row_token_ptr + lane * CAP + row, t, has > 0)
        tl.store(begin_ptr + lane * (CAP + 1) + row, begin, has > 0)
        chosen = mine > 0
        to = lane * CAP * K + pair
        home = pair if EXACT else tl.where(before == 0, own_row, -1)
        tl.store(home_ptr + at, home, chosen)
        tl.store(pair_row_ptr + to, own_row, chosen)
        tl.store(pair_slot_ptr + to, tl.load(slot_ptr + at, chosen, 0), chosen)
        tl.store(pair_expert_ptr + to, tl.load(expert_ptr + at, chosen, 0), chosen)
        tl.store(pair_weight_ptr + to, tl.load(weight_ptr + at, chosen, 0.0), chosen)
        rows += tl.sum(has, 0)
        pairs += tl.sum(count, 0)
    tl.store(begin_ptr + lane * (CAP + 1) + rows, pairs)
    tl.store(counts_ptr + lane * 2, rows)
    tl.store(counts_ptr + lane * 2 + 1, pairs)
    if CLAIM:
        claim(
            lane,
            ring_slot,
            stamp_ptr,
            inbox,
            sent_ptr,
            go_ptr,
            state_ptr,
            abort_ptr,
            limit_ns,
            SLOTS,
            FLAG_STRIDE,
            TAKEN,
        )


def list_pairs(lists: Lists, pairs: Pairs, architecture: int) -> None:
    """Launch ``plan_kernel`` for partial sums, and nothing but the lists."""
    lanes, nothing = lists.counts.shape[0], lists.counts
    tokens, top_k = pairs.rank.shape
    shape = tile("plan", architecture)
    plan_kernel[(lanes,)](
        pairs.rank,
        pairs.slot,
        pairs.expert,
        pairs.weight,
        tokens,
        lists.row_token,
        lists.begin,
        lists.pair_row,
        lists.pair_slot,
        lists.pair_expert,
        lists.pair_weight,
        lists.counts,
        lists.home,
        0,
        0,
        *(nothing,) * 5,
        0,
        num_warps=shape.num_warps,
        **list_constants(lists.tokens, top_k, shape),
    )


def list_constants(tokens: int, top_k: int, shape: Tile) -> dict[str, int | bool]:
    """Those of ``list_pairs``."""
    return {
        "K": top_k,
        "CAP": tokens,
        "EXACT": False,
        "CLAIM": False,
        "SLOTS": 0,
        "FLAG_STRIDE": 0,
        "TAKEN": 0,
        "BLOCK_T": shape["BLOCK_T"],
        "BLOCK_K": triton.next_power_of_2(top_k),
    }


def plan(
    end: End,
    lists: Lists,
    slot: int,
    go: torch.Tensor,
    pairs: Pairs,
    *,
    exact: bool,
    claim: bool,
) -> None:
    """Launch ``plan_kernel``; with ``claim`` it also takes the ring slot on every lane."""
    tokens, top_k = pairs.rank.shape
    shape = tile("plan", end.architecture)
    plan_kernel[(len(end.peers),)](
        pairs.rank,
        pairs.slot,
        pairs.expert,
        pairs.weight,
        tokens,
        lists.row_token,
        lists.begin,
        lists.pair_row,
        lists.pair_slot,
        lists.pair_expert,
        lists.pair_weight,
        lists.counts,
        lists.home,
        end.inbox.address,
        slot,
        end.stamp,
        end.sent,
        go,
        end.state,
        end.abort,
        end.limit_ns,
        num_warps=shape.num_warps,
        **constants_of(end.layout, lists.tokens, top_k, shape, exact=exact, claim=claim),
    )


def constants_of(
    layout: InboxLayout, tokens: int, top_k: int, shape: Tile, *, exact: bool, claim: bool
) -> dict[str, int | bool]:
    return {
        "K": top_k,
        "CAP": tokens,
        "EXACT": exact,
        "CLAIM": claim,
        "SLOTS": layout.shape.ring_slots,
        "FLAG_STRIDE": layout.flag_stride,
        "TAKEN": layout.taken,
        "BLOCK_T": shape["BLOCK_T"],
        "BLOCK_K": triton.next_power_of_2(top_k),
    }
