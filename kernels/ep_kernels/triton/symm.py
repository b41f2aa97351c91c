"""The ``symm`` plane: lanes whose rows lie in memory that both ends' devices address.

A lane opens, sleeps, wakes and dies as a ``shm`` lane does, and its flags, headers and pairs lie in
a memfd as there. x and out of all ring slots lie in one allocation of the router's device, whose
descriptor travels with the offer (``Shared``): on a GPU memory that CUDA shares between processes,
in Triton's interpreter another memfd.

A part's rows are written by one launch of ``put`` into an inbox there: gathered, rounded to the
wire's type. The host waits until the device has written them, and then publishes the message: the
peer's device would not wait for a flag that the peer's host has read. An expert worker's device
reads them in place and writes its sums where they belong; they are there when it answers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from mmap import mmap
from time import monotonic_ns
from typing import ClassVar, Final, Protocol

import numpy as np
import torch

from ep_kernels.plane import LaneShape, Part, PlaneError
from ep_kernels.shm import memory
from ep_kernels.shm.doorbell import SPIN_NS
from ep_kernels.shm.expert import ShmExpertPlane
from ep_kernels.shm.lane import LaneMemory, RingSlot, publish_part
from ep_kernels.shm.layout import LaneLayout, lay_out_apart
from ep_kernels.shm.router import ShmRouterPlane
from ep_kernels.triton.all_to_all import inbox
from ep_kernels.triton.all_to_all.inbox import InboxLayout, InboxShape, Wire
from ep_kernels.triton.all_to_all.plan import Lists
from ep_kernels.triton.all_to_all.put import put
from ep_kernels.triton.all_to_all.symmetric import SymmetricBuffer, attach_shared, create_shared
from ep_kernels.triton.device import Device, wait_for
from ep_kernels.triton.transfer import Fixed
from ep_kernels.triton.tuning import architecture_of

_WIRES: Final = {torch.float32: Wire.FP32, torch.bfloat16: Wire.BF16}


class Shared(Protocol):
    """Memory that the devices of two processes address. Any thread."""

    def create(self, nbytes: int) -> tuple[SymmetricBuffer, int]:
        """Zeros, and the descriptor that the other process attaches them by; the caller closes
        that. Raises ``PlaneError``.
        """

    def attach(self, fd: int, nbytes: int) -> SymmetricBuffer:
        """A peer's memory; takes over ``fd``. Raises ``PlaneError`` for what is no such memory."""


class HostShared:
    """For Triton's interpreter, whose device is the CPU: a memfd."""

    def create(self, nbytes: int) -> tuple[SymmetricBuffer, int]:
        return create_shared("moemesh-rows", nbytes)

    def attach(self, fd: int, nbytes: int) -> SymmetricBuffer:
        return attach_shared(fd, nbytes)


def shared_memory(device: Device) -> Shared:
    """Raises ``PlaneError`` where the device's driver cannot share memory."""
    if device.place.type == "cpu":
        return HostShared()
    from ep_kernels.triton.cuda_shared import CudaShared  # noqa: PLC0415 - needs CUDA's driver

    return CudaShared(device.place)


@dataclass(frozen=True, slots=True)
class RowsLayout:
    """Byte offsets in a lane's shared memory: an inbox of parts, and out of all ring slots."""

    requests: InboxLayout
    out: int
    total_bytes: int


def lay_out_rows(shape: LaneShape) -> RowsLayout:
    """Raises ``PlaneError`` for a wire that ``put`` does not write."""
    if shape.wire not in _WIRES:
        raise PlaneError(f"the symm plane carries one of {tuple(_WIRES)}, not {shape.wire}")
    # Pairs travel in host memory, where both ends look at them.
    requests = inbox.lay_out(
        InboxShape(1, shape.ring_slots, shape.capacity_tokens, 1, shape.hidden, _WIRES[shape.wire])
    )
    out_rows = shape.capacity_pairs if shape.exact else shape.capacity_tokens
    out_bytes = 4 * shape.ring_slots * out_rows * shape.hidden
    return RowsLayout(requests, requests.total_bytes, requests.total_bytes + out_bytes)


class _Sender:
    """What ``put`` needs to know of one lane's router, and where it finds each message."""

    def __init__(self, shape: LaneShape, layout: InboxLayout, address: int, device: Device) -> None:
        place, capacity = device.place, shape.capacity_tokens
        self.peer_layout = layout
        self.architecture = architecture_of(place)
        self.addresses = torch.tensor([address]).to(place)
        self.me = torch.zeros(1, dtype=torch.int32, device=place)
        self.counter = torch.zeros(1, dtype=torch.int32, device=place)
        self.firsts = torch.zeros(1, dtype=torch.int32, device=place)
        self._picked = np.zeros((1, capacity), dtype=np.int32)
        self._message = Fixed(
            device,
            torch.from_numpy(self._picked),
            torch.zeros((1, 2), dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(3, dtype=torch.int64),
        )
        picked, self.counts, self.go, self.stamp = self._message.views
        self.lists = Lists(1, capacity, 1, place)
        self.lists.begin.zero_()  # no pairs
        self.lists.row_token = picked

    def load(self, part: Part, sequence: int) -> None:
        """Bring a message's rows and numbers to the device, behind what it does for the last."""
        tokens = part.block.num_tokens
        self._picked[0, :tokens] = part.block.rows
        self._message.send(
            torch.from_numpy(self._picked),
            torch.tensor([[tokens, 0]], dtype=torch.int32),
            torch.tensor([sequence]),
            torch.tensor([part.step, part.epoch, monotonic_ns()]),
        )


class SymmMemory(LaneMemory):
    """One end's memory of a lane: ``mapping`` has all but the rows, ``rows`` has these."""

    __slots__ = ("_device", "_requests", "_rows", "_sender")

    out_in_slot: ClassVar[bool] = False

    def __init__(
        self, mapping: mmap, layout: LaneLayout, rows: SymmetricBuffer, device: Device
    ) -> None:
        shape, parts = layout.shape, lay_out_rows(layout.shape)
        ring, hidden = shape.ring_slots, shape.hidden
        x = rows.view(parts.requests.rows, shape.wire, ring, shape.capacity_tokens, hidden)
        out = rows.view(parts.out, torch.float32, ring, layout.out_rows, hidden)
        super().__init__(mapping, layout, tuple(zip(x, out, strict=True)))
        self._device = device
        self._requests = parts.requests
        self._rows = rows
        self._sender: _Sender | None = None
        """Made by the thread that sends, on whose stream it is used."""

    @classmethod
    def lay_out(cls, shape: LaneShape) -> LaneLayout:
        lay_out_rows(shape)
        return lay_out_apart(shape)

    def send(self, slot: RingSlot, part: Part, sequence: int) -> None:
        """Raises ``DeviceHung``."""
        sender = self._sender
        if sender is None:
            sender = self._sender = _Sender(
                self.layout.shape, self._requests, self._rows.address, self._device
            )
        sender.load(part, sequence)
        # A kernel must not be given an address of nothing.
        x = part.x if part.x.numel() else part.x.new_zeros(1, part.x.shape[1])
        put(
            sender,
            x if x.stride(1) == 1 else x.contiguous(),
            sender.counts,
            slot.index,
            sender.go,
            part.layer,
            sender.firsts,
            lists=sender.lists,
        )
        wait_for(self._device, self._device.mark())
        publish_part(slot, part, sequence)


class SymmRouterPlane(ShmRouterPlane):
    """``RouterPlane`` whose rows lie in memory of ``device`` that expert workers' devices address;
    as ``ShmRouterPlane`` in all else. Raises ``PlaneError`` where the device cannot share memory.
    """

    _memory: ClassVar[type[LaneMemory]] = SymmMemory

    on_device: bool = True

    def __init__(
        self,
        router_id: str,
        incarnation: int,
        shape: LaneShape,
        digest: str,
        device: Device,
        *,
        spin_ns: int = SPIN_NS,
    ) -> None:
        self._device = device
        self._shared = shared_memory(device)
        super().__init__(router_id, incarnation, shape, _own(digest, device), spin_ns=spin_ns)

    def _new_memory(self) -> tuple[LaneMemory, list[int]]:
        layout = self._layout
        rows, rows_fd = self._shared.create(lay_out_rows(self._shape).total_bytes)
        try:
            lane_fd = memory.create("moemesh-lane", layout.total_bytes)
        except BaseException:
            os.close(rows_fd)
            raise
        fds = [lane_fd, rows_fd]
        try:
            mapping = memory.attach(os.dup(lane_fd), layout.total_bytes)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return SymmMemory(mapping, layout, rows, self._device), fds


class SymmExpertPlane(ShmExpertPlane):
    """``ExpertPlane`` whose rows lie in routers' memory that ``device`` addresses; as
    ``ShmExpertPlane`` in all else. Raises ``PlaneError`` where the device cannot share memory.
    """

    _memory: ClassVar[type[LaneMemory]] = SymmMemory
    _memory_fds: ClassVar[int] = 2

    on_device: bool = True

    def __init__(
        self,
        expert_id: str,
        incarnation: int,
        path: str,
        hidden: int,
        digest: str,
        max_lanes: int = 64,
        *,
        device: Device,
        spin_ns: int = SPIN_NS,
    ) -> None:
        self._device = device
        self._shared = shared_memory(device)
        super().__init__(
            expert_id, incarnation, path, hidden, _own(digest, device), max_lanes, spin_ns=spin_ns
        )

    def _map(self, layout: LaneLayout, fds: list[int]) -> LaneMemory:
        lane_fd, rows_fd = fds
        try:
            mapping = memory.attach(lane_fd, layout.total_bytes)
        except BaseException:
            os.close(rows_fd)
            raise
        rows = self._shared.attach(rows_fd, lay_out_rows(layout.shape).total_bytes)
        return SymmMemory(mapping, layout, rows, self._device)


def _own(digest: str, device: Device) -> str:
    """Lanes of this plane lie differently, and a device takes its own kind's: neither takes the
    others' offer.
    """
    return f"{digest} by symm on {device.place.type}"
