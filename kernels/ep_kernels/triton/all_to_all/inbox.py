"""What lies where in the memory that a rank's peers write into.

    posted       [peers, ring_slots] int64: a peer's message in the slot is complete
    taken        [peers, ring_slots] int64: a peer has read our message in its slot
    headers      [peers, ring_slots, 16] int64
    pair begins  [peers, ring_slots, capacity_rows + 1] int32: a row's first pair
    pair arrays  [peers, ring_slots, capacity_pairs]: row, slot, expert (int32), weight (fp32)
    rows         [peers, ring_slots, capacity_rows, hidden] in the wire's format
    scales       [peers, ring_slots, capacity_rows, hidden / 128] fp32, of an FP8 wire only

A flag holds ``epoch << 32 | sequence``. It only grows and is never reset, so that a wait names the
message it is for. The flags of each peer have a line of their own. Rows of one rank are one array:
row ``(peer * ring_slots + slot) * capacity_rows + i``, which a kernel gathers from in place.
Imports no triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from ep_kernels.plane import PlaneError

HEADER_WORDS: Final = 16
SCALED_VALUES: Final = 128
"""Values that share one scale on an FP8 wire."""

_LINE_BYTES: Final = 128
_WORD_BYTES: Final = 8


class Wire(IntEnum):
    """How activations travel. ``FP8`` is e4m3 with one fp32 scale for 128 values of a row."""

    FP32 = 0
    BF16 = 1
    FP8 = 2

    @property
    def value_bytes(self) -> int:
        return (4, 2, 1)[self]


class Header(IntEnum):
    """Words of a message's header; ``FIRST_ROW`` and following describe a stream's chunk."""

    FLAG = 0
    STEP = 1
    LAYER = 2
    EPOCH = 3
    ROWS = 4
    PAIRS = 5
    STATUS = 6
    FIRST_ROW = 7
    TOTAL_ROWS = 8
    FIRST_PAIR = 9
    TOTAL_PAIRS = 10


class LaneState(IntEnum):
    """What a rank's kernels say of a lane; anything but ``OPEN`` is final."""

    OPEN = 0
    TIMED_OUT = 1
    ABORTED = 2
    CORRUPT = 3


@dataclass(frozen=True, slots=True)
class InboxShape:
    """``capacity_pairs`` is 0 for an inbox of answers."""

    peers: int
    ring_slots: int
    capacity_rows: int
    capacity_pairs: int
    hidden: int
    wire: Wire


@dataclass(frozen=True, slots=True)
class InboxLayout:
    """Byte offsets of an inbox's regions, and the bytes from one message to the next in each."""

    shape: InboxShape
    flag_stride: int
    taken: int
    headers: int
    begins: int
    begin_stride: int
    pairs: int
    pair_stride: int
    """Of one pair array; the four of a message lie one behind the other."""
    rows: int
    row_bytes: int
    scales: int
    scale_row_bytes: int
    total_bytes: int

    def message(self, peer: int, slot: int) -> int:
        return peer * self.shape.ring_slots + slot


def lay_out(shape: InboxShape) -> InboxLayout:
    """Compute the layout. Raises ``PlaneError`` for a shape that cannot be."""
    sizes = (shape.peers, shape.ring_slots, shape.capacity_rows, shape.hidden)
    if min(sizes) < 1 or shape.capacity_pairs < 0:
        raise PlaneError(
            f"an inbox needs peers, ring slots, rows and hidden of at least 1, got {sizes}"
        )
    if shape.wire is Wire.FP8 and shape.hidden % SCALED_VALUES:
        raise PlaneError(f"an FP8 wire needs hidden divisible by {SCALED_VALUES}: {shape.hidden}")
    messages = shape.peers * shape.ring_slots
    flag_stride = _lines(_WORD_BYTES * shape.ring_slots)
    taken = shape.peers * flag_stride
    headers = 2 * taken
    begins = headers + messages * HEADER_WORDS * _WORD_BYTES
    begin_stride = _lines(4 * (shape.capacity_rows + 1)) if shape.capacity_pairs else 0
    pairs = begins + messages * begin_stride
    pair_stride = _lines(4 * shape.capacity_pairs)
    rows = pairs + messages * 4 * pair_stride
    row_bytes = shape.hidden * shape.wire.value_bytes
    scales = rows + _lines(messages * shape.capacity_rows * row_bytes)
    scale_row_bytes = 4 * shape.hidden // SCALED_VALUES if shape.wire is Wire.FP8 else 0
    total = scales + _lines(messages * shape.capacity_rows * scale_row_bytes)
    return InboxLayout(
        shape=shape,
        flag_stride=flag_stride,
        taken=taken,
        headers=headers,
        begins=begins,
        begin_stride=begin_stride,
        pairs=pairs,
        pair_stride=pair_stride,
        rows=rows,
        row_bytes=row_bytes,
        scales=scales,
        scale_row_bytes=scale_row_bytes,
        total_bytes=total,
    )


def _lines(size_bytes: int) -> int:
    return -(-size_bytes // _LINE_BYTES) * _LINE_BYTES
