"""One lane's memory, as ready-made views for Python and as addresses for C.

A message is written, read and checked by one call into C. Views are built once when the lane opens,
row counts' views at their first use. Flags are the lane's sequence numbers: they only grow, and a
slot's flag names the message that the slot carries.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from struct import Struct
from typing import ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ep_kernels.native_library import load
from ep_kernels.plane import (
    AnswerStatus,
    FloatArray,
    IntArray,
    LaneShape,
    Part,
    PlaneError,
)
from ep_kernels.serve import Served, ServedBanks
from ep_kernels.shm.doorbell import Doorbell
from ep_kernels.shm.layout import LaneLayout, Layout, lay_out

Int64Array = npt.NDArray[np.int64]

_REQUEST: Final = Struct("=7q")
_ANSWER: Final = Struct("=5q")
Rows = tuple[torch.Tensor, torch.Tensor]
_STATUSES: Final = {int(status): status for status in AnswerStatus}
_REQUEST_INTS: Final = 7
_BAD_SEQUENCE, _BAD_TOKENS, _BAD_PAIRS = 1, 2, 3  # else a pair's token
_ARRIVAL_INTS: Final = 4 + _REQUEST_INTS

_POINTER, _NUMBER, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_library: Final = load("lane")
_send: Final = _library.moemesh_lane_send
_send.restype = None
_send.argtypes = (*(_POINTER,) * 3, *(_NUMBER,) * 2, *(_LONG,) * 4)
_request: Final = _library.moemesh_lane_request
_request.restype = _NUMBER
_request.argtypes = (_POINTER, _LONG, _POINTER)
_arrivals: Final = _library.moemesh_lane_arrivals
_arrivals.restype = _NUMBER
_arrivals.argtypes = (_POINTER, _NUMBER, _POINTER)
_attend: Final = load("lane", keeps_lock=False).moemesh_lane_attend
_attend.restype = _NUMBER
_attend.argtypes = (_POINTER, _NUMBER, _POINTER, ctypes.c_uint32, _LONG, _LONG, _LONG)
_answer: Final = _library.moemesh_lane_answer
_answer.restype = None
_answer.argtypes = (_POINTER, *(_LONG,) * 5)
acquire: Final = _library.moemesh_lane_acquire
"""What was read before this was read before what is read after it, as other cores see it."""
acquire.restype = None
acquire.argtypes = ()


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


class _Slot(ctypes.Structure):
    """``ring_slot`` of ``native/lane.h``."""

    _fields_ = (
        *((name, _POINTER) for name in ("request", "answer", "request_flag", "answer_flag")),
        *((name, _POINTER) for name in ("pair_token", "pair_slot", "pair_expert", "pair_weight")),
        *((name, _POINTER) for name in ("x", "out")),
        *((name, _NUMBER) for name in ("hidden", "capacity_tokens", "capacity_pairs", "index")),
    )


class RingSlot:
    """One message slot: the request's arrays, the answer's rows and both headers. ``at`` is the
    address of its addresses.

    ``rows``: x ``[capacity_tokens, hidden]`` and out ``[out_rows, hidden]``, where they do not lie
    in the mapping.
    """

    __slots__ = (
        "_answer_at",
        "_held",
        "_mapping",
        "_request_at",
        "at",
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
        base = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        self._held = _Slot(
            base + offsets.request_header,
            base + offsets.answer_header,
            base + 8 * index,
            base + layout.answer_flags + 8 * index,
            *(base + offset for offset in offsets.pairs),
            x.data_ptr(),
            out.data_ptr(),
            *(shape.hidden, shape.capacity_tokens, shape.capacity_pairs, index),
        )
        self.at = ctypes.addressof(self._held)

    @property
    def addresses(self) -> _Slot:
        """Where its regions are in this process."""
        return self._held

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

    __slots__ = ("answer_flags", "busy", "layout", "request_flags", "slots")

    out_in_slot: ClassVar[bool] = True
    """Whether ``out`` lies in the slot, where C can write it."""

    def __init__(
        self, mapping: mmap.mmap, layout: LaneLayout, rows: Sequence[Rows | None] | None = None
    ) -> None:
        count = layout.shape.ring_slots
        view = memoryview(mapping)
        self.layout = layout
        self.request_flags = view[: 8 * count].cast("q")
        self.answer_flags = view[layout.answer_flags : layout.answer_flags + 8 * count].cast("q")
        self.busy = view[layout.busy : layout.busy + 8].cast("q")
        """``[1]``: not 0 while the router's device sends parts by itself, which rings no doorbell;
        another number each time."""
        self.slots = tuple(
            RingSlot(mapping, layout, index, rows[index] if rows else None)
            for index in range(count)
        )

    @classmethod
    def lay_out(cls, shape: LaneShape) -> LaneLayout:
        """Raises ``PlaneError`` for a lane that cannot be."""
        return lay_out(shape)

    def send(self, slot: RingSlot, part: Part, sequence: int) -> None:
        """Copy a part, which fits, into its slot, and publish it."""
        x, block = part.x, part.block
        if x.dtype is self.layout.shape.wire is torch.float32 and x.is_contiguous():
            rows = x.data_ptr()
        else:
            rows = None
            picked = torch.index_select(x, 0, torch.from_numpy(block.rows))
            slot.x.first(block.num_tokens).copy_(picked)
        publish_part(slot, part, sequence, rows)

    def out(self, slot: RingSlot, rows: int) -> torch.Tensor:
        """Where an expert worker writes an answer of this many rows."""
        return slot.out.first(rows)

    def publish_answer(
        self, slot: RingSlot, sequence: int, status: AnswerStatus, times_ns: tuple[int, int],
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """``times_ns``: begin and duration of computing ``out``, which ``out()`` returned."""
        _answer(slot.at, sequence, status, *times_ns, out.shape[0])


def publish_part(slot: RingSlot, part: Part, sequence: int, rows: int | None = None) -> None:
    """Copy a part's pairs into its slot, and its rows from the address ``rows`` unless they are
    there; publish it.
    """
    block = part.block
    _send(
        slot.at,
        rows,
        block.address,
        block.num_tokens,
        block.num_pairs,
        sequence,
        part.step,
        part.layer,
        part.epoch,
    )


class Came(NamedTuple):
    """A request that came, and what is wrong with it or nothing."""

    lane: int
    slot: int
    request: Request
    fault: str


class LaneEnds:
    """An expert worker's lanes, all looked at by one call. One thread at a time.

    Each lane comes with the newest flag seen and the newest answered in each of its ring slots,
    ``[ring_slots]``, and whether it carries fp32 and sums.
    """

    def __init__(
        self, lanes: Sequence[tuple[LaneMemory, Int64Array, Int64Array, bool]] = ()
    ) -> None:
        self._lanes = tuple(lanes)
        self._slots = [
            np.array([slot.at for slot in memory.slots], dtype=np.uintp) for memory, *_ in lanes
        ]
        self._given_up = np.zeros(max(1, len(self._lanes)), dtype=np.int64)
        self._ends = np.array(
            [
                (
                    *(array.ctypes.data for array in (slots, seen, answered)),
                    slots.size,
                    sums and memory.out_in_slot,
                    np.frombuffer(memory.busy, dtype=np.int64).ctypes.data,
                    self._given_up[number:].ctypes.data,
                )
                for number, (slots, (memory, seen, answered, sums)) in enumerate(
                    zip(self._slots, lanes, strict=True)
                )
            ],
            dtype=np.int64,
        )
        most = sum(slots.size for slots in self._slots)
        self._found = np.zeros(max(1, most) * _ARRIVAL_INTS, dtype=np.int64)
        self._at = self._ends.ctypes.data
        self._arguments = (self._at, len(self._lanes), self._found.ctypes.data)

    def serve(self, banks: ServedBanks) -> Served | None:
        """See ``ExpertPlane``."""
        return banks.serve(self._at, len(self._lanes))

    def attend(
        self, bell: Doorbell, seen: int, *, spin_ns: int, timeout_s: float, give_up_s: float
    ) -> bool:
        """Wait for what comes over lanes that are marked busy, without their ringing ``bell``; at
        first for ``spin_ns`` without sleeping. False at once when there is none such; else whether
        to look: something may have come, ``bell`` has rung since it was ``seen``, or ``timeout_s``
        are over.

        Under marks that have stood for ``give_up_s`` in here, without a part, nothing is expected
        any more until they change: False then, and who sleeps is woken by the doorbell alone.
        """
        limits_ns = (int(timeout_s * 1e9), int(give_up_s * 1e9))
        return bool(_attend(self._at, len(self._lanes), bell.address, seen, spin_ns, *limits_ns))

    def look(self) -> list[Came]:
        """Requests whose flag is not the one last seen, which becomes the one last seen."""
        count = _arrivals(*self._arguments)
        if not count:
            return []
        numbers = self._found[: count * _ARRIVAL_INTS].tolist()
        came = []
        for first in range(0, len(numbers), _ARRIVAL_INTS):
            lane, slot, code, flag, *header = numbers[first : first + _ARRIVAL_INTS]
            request = Request(*header)
            fault = ""
            if code:
                fault = _fault(code, flag, request, self._lanes[lane][0].layout.shape)
            came.append(Came(lane, slot, request, fault))
        return came


def read_request(slot: RingSlot, flag: int, shape: LaneShape) -> Request:
    """The request under ``flag``. Raises ``CorruptLaneError`` unless it fits its lane of ``shape``
    and its own numbers.
    """
    header = np.zeros(_REQUEST_INTS, dtype=np.int64)
    code = _request(slot.at, flag, header.ctypes.data)
    request = Request(*header.tolist())
    if code:
        raise CorruptLaneError(_fault(code, flag, request, shape))
    return request


def _fault(code: int, flag: int, request: Request, shape: LaneShape) -> str:
    """In words what C found."""
    if code == _BAD_SEQUENCE:
        return f"flag {flag} stands over the header of message {request.sequence}"
    if code == _BAD_TOKENS:
        return f"{request.tokens} tokens, capacity {shape.capacity_tokens}"
    if code == _BAD_PAIRS:
        return f"{request.pairs} pairs, capacity {shape.capacity_pairs}"
    return f"a pair names token {request.sent_ns} of {request.tokens}"


def _rows(
    mapping: mmap.mmap, offset: int, dtype: torch.dtype, rows: int, hidden: int
) -> torch.Tensor:
    flat = torch.frombuffer(mapping, dtype=dtype, count=rows * hidden, offset=offset)
    return flat.view(rows, hidden)


def _int_array(mapping: mmap.mmap, offset: int, count: int) -> IntArray:
    return np.frombuffer(mapping, dtype=np.int32, count=count, offset=offset)
