"""One lane's memory as ready-made views.

Views are built once when the lane opens, row counts' views at their first use, so that a message
costs few Python operations. Flags are the lane's sequence numbers: they only grow, and a slot's
flag names the message that the slot carries.
"""

from __future__ import annotations

import mmap
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
import torch

from ep_kernels.plane import AnswerStatus, FloatArray, IntArray, PlaneError
from ep_kernels.shm.layout import LaneLayout

_REQUEST: Final = Struct("=7q")
_ANSWER: Final = Struct("=5q")
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
    """One message slot: the request's arrays, the answer's rows and both headers."""

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

    def __init__(self, mapping: mmap.mmap, layout: LaneLayout, index: int) -> None:
        shape = layout.shape
        base = layout.slots + index * layout.slot_bytes
        self.index = index
        self._mapping = mapping
        self._request_at = base
        self._answer_at = base + layout.answer_header
        self.pair_token, self.pair_slot, self.pair_expert = (
            _int_array(
                mapping, base + layout.pairs + i * layout.pair_array_bytes, shape.capacity_pairs
            )
            for i in range(3)
        )
        self.pair_weight: FloatArray = _int_array(
            mapping, base + layout.pairs + 3 * layout.pair_array_bytes, shape.capacity_pairs
        ).view(np.float32)
        self.x = _Rows(
            torch.frombuffer(
                mapping,
                dtype=shape.wire,
                count=shape.capacity_tokens * shape.hidden,
                offset=base + layout.x,
            ).view(shape.capacity_tokens, shape.hidden)
        )
        self.out = _Rows(
            torch.frombuffer(
                mapping,
                dtype=torch.float32,
                count=layout.out_rows * shape.hidden,
                offset=base + layout.out,
            ).view(layout.out_rows, shape.hidden)
        )

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
    """All of a lane: flags and ring slots over one mapping."""

    __slots__ = ("answer_flags", "layout", "request_flags", "slots")

    def __init__(self, mapping: mmap.mmap, layout: LaneLayout) -> None:
        count = layout.shape.ring_slots
        view = memoryview(mapping)
        self.layout = layout
        self.request_flags = view[: 8 * count].cast("q")
        self.answer_flags = view[layout.answer_flags : layout.answer_flags + 8 * count].cast("q")
        self.slots = tuple(RingSlot(mapping, layout, index) for index in range(count))


def check_request(request: Request, flag: int, layout: LaneLayout, slot: RingSlot) -> None:
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


def _int_array(mapping: mmap.mmap, offset: int, count: int) -> IntArray:
    return np.frombuffer(mapping, dtype=np.int32, count=count, offset=offset)
