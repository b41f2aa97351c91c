"""Where everything lies in a lane.

    request flags    [ring_slots] int64, written by the router
    answer flags     [ring_slots] int64, written by the expert worker
    busy mark        int64, written by the router
    ring slot 0..    request header, answer header,
                     pair token, slot, expert (int32), weight (fp32): [capacity_pairs] each,
                     x [capacity_tokens, hidden] in the wire dtype,
                     out [capacity_tokens or, exact, capacity_pairs, hidden] fp32

Every region starts on a cache line of its own, so that no two writers share a line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch

from ep_kernels.plane import LaneShape, PlaneError

LINE_BYTES: Final = 64
MAX_LANE_BYTES: Final = 1 << 30
MAX_RING_SLOTS: Final = 64

_HEADER_BYTES: Final = LINE_BYTES
_WIRES: Final = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class SlotOffsets:
    """Where a ring slot's regions begin in its lane; ``out`` has room for ``out_rows``."""

    request_header: int
    answer_header: int
    pairs: tuple[int, int, int, int]
    x: int
    out: int
    out_rows: int


class Layout(Protocol):
    """What a ring slot needs of a lane's layout."""

    @property
    def shape(self) -> LaneShape: ...

    @property
    def answer_flags(self) -> int: ...

    def slot(self, index: int) -> SlotOffsets: ...


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """Byte offsets in a lane of ``shape``; those of a ring slot count from the slot's start."""

    shape: LaneShape
    answer_flags: int
    busy: int
    slots: int
    slot_bytes: int
    answer_header: int
    pairs: int
    pair_array_bytes: int
    x: int
    out: int
    out_rows: int
    total_bytes: int

    def slot(self, index: int) -> SlotOffsets:
        base = self.slots + index * self.slot_bytes
        first, step = base + self.pairs, self.pair_array_bytes
        return SlotOffsets(
            request_header=base,
            answer_header=base + self.answer_header,
            pairs=(first, first + step, first + 2 * step, first + 3 * step),
            x=base + self.x,
            out=base + self.out,
            out_rows=self.out_rows,
        )


def lay_out_apart(shape: LaneShape) -> LaneLayout:
    """The same for a lane whose x and out lie elsewhere: flags, headers and pairs. Raises
    ``PlaneError`` for one that would be too large with them.
    """
    whole = lay_out(shape)
    total_bytes = whole.slots + shape.ring_slots * whole.x
    return replace(whole, slot_bytes=whole.x, total_bytes=total_bytes)


def _lines(size_bytes: int) -> int:
    return -(-size_bytes // LINE_BYTES) * LINE_BYTES


def lay_out(shape: LaneShape) -> LaneLayout:
    """Compute the layout. Raises ``PlaneError`` with the arithmetic when the lane is impossible
    or larger than ``MAX_LANE_BYTES``.
    """
    sizes = (shape.hidden, shape.top_k, shape.capacity_tokens, shape.ring_slots)
    if min(sizes) < 1:
        raise PlaneError(
            f"a lane needs hidden, top_k, capacity_tokens and ring_slots of at least 1, got {sizes}"
        )
    if shape.ring_slots > MAX_RING_SLOTS:
        raise PlaneError(f"a lane has at most {MAX_RING_SLOTS} ring slots, not {shape.ring_slots}")
    if shape.wire not in _WIRES:
        raise PlaneError(f"activations travel as one of {_WIRES}, not {shape.wire}")
    flags_bytes = _lines(8 * shape.ring_slots)
    pair_array_bytes = _lines(4 * shape.capacity_pairs)
    wire_bytes = shape.wire.itemsize
    x_bytes = _lines(shape.capacity_tokens * shape.hidden * wire_bytes)
    out_rows = shape.capacity_pairs if shape.exact else shape.capacity_tokens
    out_bytes = _lines(out_rows * shape.hidden * 4)
    slot_bytes = 2 * _HEADER_BYTES + 4 * pair_array_bytes + x_bytes + out_bytes
    total_bytes = 2 * flags_bytes + LINE_BYTES + shape.ring_slots * slot_bytes
    if total_bytes > MAX_LANE_BYTES:
        raise PlaneError(
            f"a lane may take {MAX_LANE_BYTES} bytes, this one needs {total_bytes}: "
            f"{shape.ring_slots} ring slots x ({shape.capacity_tokens} tokens x {shape.hidden} "
            f"hidden x {wire_bytes} bytes out + {out_rows} rows x {shape.hidden} x 4 bytes back + "
            f"{shape.capacity_pairs} pairs x 16 bytes); lower capacity_tokens or ring_slots"
        )
    pairs = 2 * _HEADER_BYTES
    x = pairs + 4 * pair_array_bytes
    return LaneLayout(
        shape=shape,
        answer_flags=flags_bytes,
        busy=2 * flags_bytes,
        slots=2 * flags_bytes + LINE_BYTES,
        slot_bytes=slot_bytes,
        answer_header=_HEADER_BYTES,
        pairs=pairs,
        pair_array_bytes=pair_array_bytes,
        x=x,
        out=x + x_bytes,
        out_rows=out_rows,
        total_bytes=total_bytes,
    )
