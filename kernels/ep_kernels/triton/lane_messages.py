"""Messages over lanes whose rows lie in device memory and all else in host memory, by kernels.

``send`` writes rows, pairs, header and flag of one message to each lane; ``await_answers`` waits
until the lanes' hosts have answered theirs. A lane is known to both by a column of a table, int64
``[FIELDS, lanes]``: where the ring slot's regions are, as this device addresses them, and the
sequence of the lane's first message. All messages of a step go through one slot of each lane, one
after the other: ``number`` counts them.

What goes wrong is written into one word, ``status``, by whoever finds it first: nothing is sent and
nothing waited for any more while it is not 0.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from ep_kernels.triton.all_to_all.end import columns_of
from ep_kernels.triton.all_to_all.plan import Lists
from ep_kernels.triton.all_to_all.put import copy_words
from ep_kernels.triton.all_to_all.rounding import bf16_bits
from ep_kernels.triton.all_to_all.signals import array, last_to_finish
from ep_kernels.triton.host_words import clock_ns, load_word, store_word
from ep_kernels.triton.registry import Variant
from ep_kernels.triton.tuning import Tile, tile


class Field(IntEnum):
    """Rows of the table of lanes."""

    X = 0
    OUT = 1
    REQUEST = 2
    """The header."""
    PAIRS = 3
    """The first of the four arrays."""
    REQUEST_FLAG = 4
    ANSWER = 5
    """The header."""
    ANSWER_FLAG = 6
    FIRST = 7
    """Sequence of the message that counts as number 0."""


FIELDS: Final = len(Field)


class Stamp(IntEnum):
    """Words that change from step to step."""

    STEP = 0
    EPOCH = 1
    SENT_NS = 2
    """When the step began, on the hosts' monotonic clock."""
    LIMIT_NS = 3
    """How long an answer is waited for."""
    LIVE = 4
    """Tokens that have pairs."""
    ABORT = 5
    """Address of a word of host memory; not 0: wait no longer."""


STAMPS: Final = len(Stamp)


class Fault(IntEnum):
    """Why a step was given up."""

    NONE = 0
    STALE = 1
    TIMED_OUT = 2
    ABORTED = 3
    CORRUPT = 4
    UNPLACED = 5
    """Some pairs' experts have no place."""


class Verdict(NamedTuple):
    """What a step's ``status`` says: the fault, and the lane and the message at which it showed."""

    fault: Fault
    lane: int
    number: int

    @staticmethod
    def of(status: int) -> Verdict:
        return Verdict(Fault(status & 0xFF), status >> 8 & 0xFFF, status >> 20)


MOST_LANES: Final = 1 << 12
MOST_NUMBERS: Final = 1 << 11
"""That a verdict can tell."""

_X = tl.constexpr(int(Field.X))
_REQUEST = tl.constexpr(int(Field.REQUEST))
_PAIRS = tl.constexpr(int(Field.PAIRS))
_REQUEST_FLAG = tl.constexpr(int(Field.REQUEST_FLAG))
_ANSWER = tl.constexpr(int(Field.ANSWER))
_ANSWER_FLAG = tl.constexpr(int(Field.ANSWER_FLAG))
_FIRST = tl.constexpr(int(Field.FIRST))
_STEP = tl.constexpr(int(Stamp.STEP))
_EPOCH = tl.constexpr(int(Stamp.EPOCH))
_SENT_NS = tl.constexpr(int(Stamp.SENT_NS))
_LIMIT_NS = tl.constexpr(int(Stamp.LIMIT_NS))
_LIVE = tl.constexpr(int(Stamp.LIVE))
_ABORT = tl.constexpr(int(Stamp.ABORT))
_STALE = tl.constexpr(int(Fault.STALE))
_TIMED_OUT = tl.constexpr(int(Fault.TIMED_OUT))
_ABORTED = tl.constexpr(int(Fault.ABORTED))
_CORRUPT = tl.constexpr(int(Fault.CORRUPT))
_UNPLACED = tl.constexpr(int(Fault.UNPLACED))
_GIVEN_UP = tl.constexpr(255)
"""Another program found a fault: there is nothing to report."""


@triton.jit(do_not_specialize=["number", "layer", "lanes"])
def send_kernel(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    row_token_ptr: tl.tensor,
    pair_row_ptr: tl.tensor,
    pair_slot_ptr: tl.tensor,
    pair_expert_ptr: tl.tensor,
    pair_weight_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    lane_ptr: tl.tensor,
    lanes: tl.tensor,
    stamp_ptr: tl.tensor,
    status_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    number: tl.tensor,
    layer: tl.tensor,
    POST: tl.constexpr,
    BF16: tl.constexpr,
    HIDDEN: tl.constexpr,
    LIST: tl.constexpr,
    PAIR_LIST: tl.constexpr,
    PAIR_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Write each lane's rows into its ring slot; with ``POST`` pairs, header and flag as well.

    Grid: lanes, ceil(most rows / ROWS). ``x`` fp32 ``[tokens, HIDDEN]``; a lane's rows are those
    of ``row_token [lanes, LIST]``, its pairs ``[lanes, PAIR_LIST]``, ``counts [lanes, 2]`` of each.
    Lanes without rows get no message.
    """
    lane = tl.program_id(0)
    block = tl.program_id(1)
    rows = tl.load(counts_ptr + lane * 2)
    programs = (rows + ROWS - 1) // ROWS
    if (tl.load(status_ptr) == 0) & (block < programs):
        i = block * ROWS + tl.arange(0, ROWS)
        live = i < rows
        to = tl.load(lane_ptr + _X * lanes + lane)
        source = tl.load(row_token_ptr + lane * LIST + i, live, 0).to(tl.int64)
        for h in range(0, HIDDEN, BLOCK_H):
            column = h + tl.arange(0, BLOCK_H)
            mask = live[:, None] & (column < HIDDEN)[None, :]
            values = tl.load(x_ptr + source[:, None] * x_stride + column[None, :], mask, 0.0)
            at = i[:, None] * HIDDEN + column[None, :]  # [ROWS, BLOCK_H]
            if BF16:
                tl.store(array(to, tl.uint16) + at, bf16_bits(values), mask)
            else:
                tl.store(array(to, tl.float32) + at, values, mask)
        if POST:  # noqa: SIM102 - one is known when it is compiled
            # The last one writes all that hosts read, so that one program's stores are in order.
            if last_to_finish(counter_ptr + lane, programs):
                pairs = tl.load(counts_ptr + lane * 2 + 1)
                sequence = tl.load(lane_ptr + _FIRST * lanes + lane) + number
                at = tl.load(lane_ptr + _PAIRS * lanes + lane)
                own = lane * PAIR_LIST
                copy_words(pair_row_ptr, at, own, pairs, 0, BLOCK_P)
                copy_words(pair_slot_ptr, at + PAIR_STRIDE, own, pairs, 0, BLOCK_P)
                copy_words(pair_expert_ptr, at + 2 * PAIR_STRIDE, own, pairs, 0, BLOCK_P)
                copy_words(pair_weight_ptr, at + 3 * PAIR_STRIDE, own, pairs, 0, BLOCK_P)
                header = array(tl.load(lane_ptr + _REQUEST * lanes + lane), tl.int64)
                tl.store(header, sequence)
                tl.store(header + 1, tl.load(stamp_ptr + _STEP))
                tl.store(header + 2, layer.to(tl.int64))
                tl.store(header + 3, tl.load(stamp_ptr + _EPOCH))
                tl.store(header + 4, rows.to(tl.int64))
                tl.store(header + 5, pairs.to(tl.int64))
                # Parts are served in the order in which they were sent.
                tl.store(header + 6, tl.load(stamp_ptr + _SENT_NS) + number)
                store_word(tl.load(lane_ptr + _REQUEST_FLAG * lanes + lane), sequence)


@triton.jit(do_not_specialize=["number", "lanes"])
def await_kernel(
    counts_ptr: tl.tensor,
    lane_ptr: tl.tensor,
    lanes: tl.tensor,
    stamp_ptr: tl.tensor,
    status_ptr: tl.tensor,
    answered_ptr: tl.tensor,
    number: tl.tensor,
    K: tl.constexpr,
    LANES_P2: tl.constexpr,
) -> None:
    """Wait for each lane's answer to message ``number``; ``answered [lanes]`` becomes 1 where its
    rows are there. Lanes that got none are not waited for.

    Grid: lanes; one warp a program.
    """
    lane = tl.program_id(0)
    rows = tl.load(counts_ptr + lane * 2)
    fault = tl.full((), 0, tl.int32)
    answered = tl.full((), 0, tl.int32)
    if lane == 0:
        each = tl.arange(0, LANES_P2)
        pairs = tl.sum(tl.load(counts_ptr + each * 2 + 1, each < lanes, 0), 0)
        if pairs != tl.load(stamp_ptr + _LIVE).to(tl.int32) * K:
            fault = tl.full((), _UNPLACED, tl.int32)
    if (rows > 0) & (fault == 0) & (tl.load(status_ptr, volatile=True) == 0):
        wanted = tl.load(lane_ptr + _FIRST * lanes + lane) + number
        flag = tl.load(lane_ptr + _ANSWER_FLAG * lanes + lane)
        abort = tl.load(stamp_ptr + _ABORT)
        limit_ns = tl.load(stamp_ptr + _LIMIT_NS)
        seen = load_word(flag)
        begin = clock_ns()
        while (seen < wanted) & (fault == 0):
            late = clock_ns() - begin >= limit_ns
            stopped = load_word(abort) != 0
            given_up = tl.load(status_ptr, volatile=True) != 0
            seen = load_word(flag)
            why = tl.where(given_up, _GIVEN_UP, tl.where(stopped, _ABORTED, _TIMED_OUT))
            fault = tl.where((seen < wanted) & (late | stopped | given_up), why, 0).to(tl.int32)
        if fault == 0:
            header = array(tl.load(lane_ptr + _ANSWER * lanes + lane), tl.int64)
            status = tl.load(header + 1)
            sound = (seen == wanted) & (tl.load(header) == wanted)
            sound = sound & (tl.load(header + 4) == rows) & ((status == 1) | (status == 2))
            answered = (sound & (status == 1)).to(tl.int32)
            why = tl.where(sound, _STALE, _CORRUPT)
            fault = tl.where(answered == 1, 0, why).to(tl.int32)
    tl.store(answered_ptr + lane, answered)
    if (fault != 0) & (fault != _GIVEN_UP):
        told = fault | (lane << 8) | (number << 20)
        tl.atomic_cas(status_ptr, tl.full((), 0, tl.int32), told)


def send(
    x: torch.Tensor,
    lists: Lists,
    lanes: torch.Tensor,
    stamp: torch.Tensor,
    status: torch.Tensor,
    counter: torch.Tensor,
    number: int,
    layer: int,
    *,
    wire: torch.dtype,
    pair_stride: int,
    post: bool,
    architecture: int,
) -> None:
    """Launch ``send_kernel``: ``lists`` of each of ``lanes`` ``[FIELDS, n]``. ``counter`` int32
    ``[n]`` is 0 before and after. ``pair_stride``: bytes from one of a message's pair arrays to the
    next.
    """
    shape = tile("put", architecture)
    count = lanes.shape[1]
    send_kernel[(count, triton.cdiv(lists.tokens, shape["ROWS"]))](
        x,
        x.stride(0),
        lists.row_token,
        lists.pair_row,
        lists.pair_slot,
        lists.pair_expert,
        lists.pair_weight.view(torch.int32),
        lists.counts,
        lanes,
        count,
        stamp,
        status,
        counter,
        number,
        layer,
        num_warps=shape.num_warps,
        **_send_constants(
            shape,
            x.shape[1],
            lists.tokens,
            lists.pair_row.shape[1],
            pair_stride,
            wire=wire,
            post=post,
        ),
    )


def _send_constants(
    shape: Tile,
    hidden: int,
    rows: int,
    pairs: int,
    pair_stride: int,
    *,
    wire: torch.dtype,
    post: bool,
) -> dict[str, Any]:
    return {
        "POST": post,
        "BF16": wire is torch.bfloat16,
        "HIDDEN": hidden,
        "LIST": rows,
        "PAIR_LIST": pairs,
        "PAIR_STRIDE": pair_stride,
        "ROWS": shape["ROWS"],
        "BLOCK_H": columns_of(shape["BLOCK_BYTES"] // wire.itemsize, hidden, scaled=False),
        "BLOCK_P": shape["BLOCK_P"],
    }


def await_answers(
    counts: torch.Tensor,
    lanes: torch.Tensor,
    stamp: torch.Tensor,
    status: torch.Tensor,
    answered: torch.Tensor,
    number: int,
    *,
    top_k: int,
    architecture: int,
) -> None:
    """Launch ``await_kernel``."""
    shape = tile("await", architecture)
    count = lanes.shape[1]
    await_kernel[(count,)](
        counts,
        lanes,
        count,
        stamp,
        status,
        answered,
        number,
        K=top_k,
        LANES_P2=triton.next_power_of_2(count),
        num_warps=shape.num_warps,
    )


def variants(architecture: int) -> tuple[Variant, ...]:
    """A frame of 64 tokens of DeepSeek-V3 over 32 lanes, for both wires."""
    shape, waiting = tile("put", architecture), tile("await", architecture)
    names = ("row_token", "pair_row", "pair_slot", "pair_expert", "pair_weight", "counts")
    pointers = {f"{name}_ptr": "*i32:16" for name in (*names, "status", "counter")}
    words = {"lane_ptr": "*i64:16", "lanes": "i32", "stamp_ptr": "*i64:16"}
    sent = {"x_ptr": "*fp32:16", "x_stride": "i32:16", **pointers, **words}
    given = [p.name for p in send_kernel.params if not p.is_constexpr]
    wires = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return (
        *(
            Variant(
                kernel="lane_messages.send",
                name=f"64 tokens, {name}",
                function=send_kernel,
                signature={key: sent.get(key, "i32") for key in given},
                constexprs=_send_constants(
                    shape, 7168, 64, 64 * 8, 4 * 256 * 8, wire=wire, post=True
                ),
                num_warps=shape.num_warps,
                num_stages=shape.num_stages,
                hot=True,
                expects=r"STG\.E\.128\S*",
            )
            for name, wire in wires.items()
        ),
        Variant(
            kernel="lane_messages.await",
            name="32 lanes",
            function=await_kernel,
            signature={
                "counts_ptr": "*i32:16",
                **words,
                "status_ptr": "*i32:16",
                "answered_ptr": "*i32:16",
                "number": "i32",
            },
            constexprs={"K": 8, "LANES_P2": 32},
            num_warps=waiting.num_warps,
            num_stages=waiting.num_stages,
            hot=True,
            expects=r"LDG?\.E\.64\.STRONG\.SYS",
        ),
    )
