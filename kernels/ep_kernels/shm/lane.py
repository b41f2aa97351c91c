"""One lane's memory as ready-made views.

Views are built once when the lane opens, row counts' views at their first use, so that a message
costs few Python operations. Flags are the lane's sequence numbers: they only grow, and a slot's
flag names the message that the slot carries.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
import torch

from ep_kernels.plane import (
    AnswerStatus,
    FloatArray,
    IntArray,
    LaneShape,
    Part,
    PlaneError,
)
from ep_kernels.shm.doorbell import make_fence
from ep_kernels.shm.layout import LaneLayout, Layout, lay_out

_REQUEST: Final = Struct("=7q")
_ANSWER: Final = Struct("=5q")
Rows = tuple[torch.Tensor, torch.Tensor]
_STATUSES: Final = {int(status): status for status in AnswerStatus}


class CorruptLaneError(PlaneError):
    """A peer wrote something impossible into a lane; the reader drops the lane."""


class Request(NamedTuple):
    """A request's header."""

    sequence: int
    step: int
    layer: int
    epoch: int
    tokens: int
    pairs: int
    sent_ns: int
    """Monotonic clock, which all processes of a host share: the oldest part goes first."""


class _Rows:
    """The first ``n`` rows of a region; each ``n`` is sliced once."""

    __slots__ = ("_all", "_views")

    def __init__(self, region: torch.Tensor) -> None:
        self._all = region
        self._views: dict[int, torch.Tensor] = {}

    def first(self, count: int) -> torch.Tensor:
        view = self._views.get(count)
        if view is None:
            view = self._views[count] = self._all[:count]
        return view


class RingSlot:
    """One message slot: the request's arrays, the answer's rows and both headers.

    ``rows``: x ``[capacity_tokens, hidden]`` and out ``[out_rows, hidden]``, where they do not lie
    in the mapping.
    """

    __slots__ = (
        "_answer_at",
        "_mapping",
        "_request_at",
        "index",
        "out",
        "pair_expert",
        "pair_slot",
        "pair_token",
        "pair_weight",
        "x",
    )

    def __init__(
        self,
        mapping: mmap.mmap,
        layout: Layout,
        index: int,
        rows: Rows | None = None,
    ) -> None:
        shape, offsets = layout.shape, layout.slot(index)
        x, out = rows or (
            _rows(mapping, offsets.x, shape.wire, shape.capacity_tokens, shape.hidden),
            _rows(mapping, offsets.out, torch.float32, offsets.out_rows, shape.hidden),
        )
        self.index = index
        self._mapping = mapping
        self._request_at = offsets.request_header
        self._answer_at = offsets.answer_header
        self.pair_token, self.pair_slot, self.pair_expert, weight = (
            _int_array(mapping, offset, shape.capacity_pairs) for offset in offsets.pairs
        )
        self.pair_weight: FloatArray = weight.view(np.float32)
        self.x = _Rows(x)
        self.out = _Rows(out)

    def write_request(self, request: Request) -> None:
        _REQUEST.pack_into(self._mapping, self._request_at, *request)

    def read_request(self) -> Request:
        return Request._make(_REQUEST.unpack_from(self._mapping, self._request_at))

    def write_answer(
        self, sequence: int, status: AnswerStatus, began_ns: int, compute_ns: int, rows: int
    ) -> None:
        _ANSWER.pack_into(
            self._mapping, self._answer_at, sequence, status, began_ns, compute_ns, rows
        )

    def answer_header(self) -> tuple[int, int, int, int, int]:
        """Sequence, status, begin, duration and rows, as they stand there."""
        sequence, status, began_ns, compute_ns, rows = _ANSWER.unpack_from(
            self._mapping, self._answer_at
        )
        return sequence, status, began_ns, compute_ns, rows

    def read_answer(self, sequence: int, rows: int) -> tuple[AnswerStatus, int, int]:
        """Status, begin and duration of computing the answer to ``sequence`` of ``rows`` rows.

        Raises ``CorruptLaneError`` when the header says otherwise.
        """
        found, status, began_ns, compute_ns, found_rows = self.answer_header()
        if found != sequence or status not in _STATUSES or found_rows != rows:
            raise CorruptLaneError(
                f"ring slot {self.index} answers message {found} with status {status} and "
                f"{found_rows} rows, expected message {sequence} with {rows} rows"
            )
        return _STATUSES[status], began_ns, compute_ns


class LaneMemory:
    """All of a lane: flags and ring slots over one mapping. Each end writes its own of the two
    kinds of messages, and publishes it by the flag, which it writes last. ``rows``: those of each
    ring slot, as it takes them.
    """

    __slots__ = ("_fence", "answer_flags", "layout", "request_flags", "slots")

    def __init__(
        self, mapping: mmap.mmap, layout: LaneLayout, rows: Sequence[Rows | None] | None = None
    ) -> None:
        count = layout.shape.ring_slots
        view = memoryview(mapping)
        self.layout = layout
        self.request_flags = view[: 8 * count].cast("q")
        self.answer_flags = view[layout.answer_flags : layout.answer_flags + 8 * count].cast("q")
        self.slots = tuple(
            RingSlot(mapping, layout, index, rows[index] if rows else None)
            for index in range(count)
        )
        self._fence = make_fence()

    @classmethod
    def lay_out(cls, shape: LaneShape) -> LaneLayout:
        """Raises ``PlaneError`` for a lane that cannot be."""
        return lay_out(shape)

    def write_part(self, slot: RingSlot, part: Part) -> None:
        """Copy a part, which fits, into its slot."""
        tokens, pairs = part.rows.shape[0], part.pair_token.shape[0]
        into = slot.x.first(tokens)
        if part.x.dtype is self.layout.shape.wire:
            torch.index_select(part.x, 0, part.rows, out=into)
        else:
            into.copy_(torch.index_select(part.x, 0, part.rows))
        slot.pair_token[:pairs] = part.pair_token
        slot.pair_slot[:pairs] = part.pair_slot
        slot.pair_expert[:pairs] = part.pair_expert
        slot.pair_weight[:pairs] = part.pair_weight

    def publish_part(self, slot: RingSlot, request: Request) -> None:
        slot.write_request(request)
        self._publish(self.request_flags, slot.index, request.sequence)

    def out(self, slot: RingSlot, rows: int) -> torch.Tensor:
        """Where an expert worker writes an answer of this many rows."""
        return slot.out.first(rows)

    def publish_answer(
        self, slot: RingSlot, sequence: int, status: AnswerStatus, times_ns: tuple[int, int],
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """``times_ns``: begin and duration of computing ``out``, which ``out()`` returned."""
        slot.write_answer(sequence, status, *times_ns, out.shape[0])
        self._publish(self.answer_flags, slot.index, sequence)

    def _publish(self, flags: memoryview[int], index: int, sequence: int) -> None:
        if self._fence is not None:
            self._fence()
        flags[index] = sequence
        if self._fence is not None:
            self._fence()


def check_request(request: Request, flag: int, layout: Layout, slot: RingSlot) -> None:
    """Raise ``CorruptLaneError`` unless the request fits its lane and its own numbers."""
    shape = layout.shape
    if request.sequence != flag:
        raise CorruptLaneError(f"flag {flag} stands over the header of message {request.sequence}")
    if not 0 <= request.tokens <= shape.capacity_tokens:
        raise CorruptLaneError(f"{request.tokens} tokens, capacity {shape.capacity_tokens}")
    if not 0 <= request.pairs <= shape.capacity_pairs:
        raise CorruptLaneError(f"{request.pairs} pairs, capacity {shape.capacity_pairs}")
    if request.pairs:
        # As unsigned numbers, negative ones are too large as well.
        highest = int(slot.pair_token[: request.pairs].view(np.uint32).max())
        if highest >= request.tokens:
            raise CorruptLaneError(f"a pair names token {highest} of {request.tokens}")


def _rows(
    mapping: mmap.mmap, offset: int, dtype: torch.dtype, rows: int, hidden: int
) -> torch.Tensor:
    flat = torch.frombuffer(mapping, dtype=dtype, count=rows * hidden, offset=offset)
    return flat.view(rows, hidden)


def _int_array(mapping: mmap.mmap, offset: int, count: int) -> IntArray:
    return np.frombuffer(mapping, dtype=np.int32, count=count, offset=offset)
