"""One end's memory of a lane whose rows go through process groups.

Flags, headers and pairs lie in host memory as on any lane; x and out of all ring slots in two
buffers on the back end's device, allocated once when the lane opens.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ep_kernels.plane import LaneShape
from ep_kernels.shm.lane import LaneMemory
from ep_kernels.shm.layout import LaneLayout
from ep_kernels.shm.layout import lay_out as lay_out_whole
from ep_kernels.tcp.carrier import own_memory


def lay_out(shape: LaneShape) -> LaneLayout:
    """What lies in host memory. Raises ``PlaneError`` for a lane that cannot be; a lane is as large
    as one in shared memory may be.
    """
    whole = lay_out_whole(shape)
    total_bytes = whole.slots + shape.ring_slots * whole.x
    return replace(whole, slot_bytes=whole.x, total_bytes=total_bytes)


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
        return lay_out(shape)
