"""One end's memory of a lane whose rows go through process groups.

Flags, headers and pairs lie in host memory as on any lane; x and out of all ring slots in two
buffers on the back end's device, allocated once when the lane opens.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ep_kernels.group.backend import Backend
from ep_kernels.plane import LaneShape, Part
from ep_kernels.shm.lane import LaneMemory, RingSlot, publish_part
from ep_kernels.shm.layout import LaneLayout, lay_out_apart
from ep_kernels.tcp.carrier import own_memory


class GroupMemory(LaneMemory):
    """Raises ``OSError``, or ``RuntimeError`` of a device that has not that much memory."""

    __slots__ = ("mapping",)

    def __init__(self, layout: LaneLayout, device: torch.device) -> None:
        shape = layout.shape
        ring, hidden = shape.ring_slots, shape.hidden
        x = torch.zeros(ring, shape.capacity_tokens, hidden, dtype=shape.wire, device=device)
        out = torch.zeros(ring, layout.out_rows, hidden, device=device)
        self.mapping = own_memory(layout.total_bytes)
        super().__init__(self.mapping, layout, tuple(zip(x, out, strict=True)))

    @classmethod
    def lay_out(cls, shape: LaneShape) -> LaneLayout:
        return lay_out_apart(shape)


class DeviceMemory(GroupMemory):
    """The same on the device that computes, whose memory C neither reads nor writes. What a thread
    sends is written by what it has queued there; the group waits for that, and the host does not.
    """

    __slots__ = ()

    out_in_slot: ClassVar[bool] = False

    def __init__(self, layout: LaneLayout, device: torch.device) -> None:
        super().__init__(layout, device)
        if device.type == "cuda":
            # Other streams write here next, and know nothing of this one's zeros.
            torch.cuda.current_stream(device).synchronize()

    def send(self, slot: RingSlot, part: Part, sequence: int) -> None:
        write_rows(slot, part)
        publish_part(slot, part, sequence)


def write_rows(slot: RingSlot, part: Part) -> None:
    """Queue the part's rows into its slot, both of one device."""
    into = slot.x.first(part.block.num_tokens)
    if part.x.dtype is into.dtype:
        torch.index_select(part.x, 0, part.rows, out=into)
    else:
        into.copy_(torch.index_select(part.x, 0, part.rows))


def new_memory(layout: LaneLayout, backend: Backend) -> GroupMemory:
    """Raises ``OSError``, ``RuntimeError``, as the classes do."""
    return (DeviceMemory if backend.on_device else GroupMemory)(layout, backend.device)
