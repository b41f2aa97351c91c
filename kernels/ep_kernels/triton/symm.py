"""The ``symm`` plane: lanes whose rows lie in memory that both ends' devices address.

A lane opens, sleeps, wakes and dies as a ``shm`` lane does, and its flags, headers and pairs lie in
a memfd as there. x and out of all ring slots lie in one allocation of the router's device, whose
descriptor travels with the offer (``Shared``): on a GPU memory that CUDA shares between processes,
in Triton's interpreter another memfd.

A part's rows are written by one launch of ``lane_messages.send``: gathered, rounded to the wire's
type. The host waits until the device has written them, and then publishes the message. Or it lets
its device send by itself (``SymmRouterPlane.take``): then the kernel writes header, pairs and flag
too, into the lane's host memory, which the worker's host looks at as ever, and another one waits
for the answer. An expert worker's device reads rows in place and writes its sums where they belong;
they are there when it answers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from time import perf_counter_ns
from typing import ClassVar, Final, Protocol

import numpy as np
import torch

from ep_kernels.plane import LaneShape, Part, PlaneError
from ep_kernels.shm import memory
from ep_kernels.shm import router as shm
from ep_kernels.shm.doorbell import SPIN_NS
from ep_kernels.shm.expert import ShmExpertPlane
from ep_kernels.shm.lane import LaneMemory, RingSlot, publish_part
from ep_kernels.shm.layout import LaneLayout, lay_out_apart
from ep_kernels.shm.router import ShmRouterPlane
from ep_kernels.triton.all_to_all.plan import Lists
from ep_kernels.triton.all_to_all.symmetric import SymmetricBuffer, attach_shared, create_shared
from ep_kernels.triton.device import Device, wait_for
from ep_kernels.triton.lane_messages import FIELDS, send
from ep_kernels.triton.transfer import Fixed
from ep_kernels.triton.tuning import architecture_of

_WIRES: Final = (torch.float32, torch.bfloat16)
_ALIGN: Final = 256
_ATTEND_S: Final = 5.0
"""How long a router's busy mark is believed while nothing comes under it."""
_ATTEND_SPIN_NS: Final = 300_000
"""Longer than between two layers of a decode step, where a core is to be had."""

_log = logging.getLogger(__name__)


class Shared(Protocol):
    """Memory that the devices of two processes address. Any thread."""

    def create(self, nbytes: int) -> tuple[SymmetricBuffer, int]:
        """Zeros, and the descriptor that the other process attaches them by; the caller closes
        that. Raises ``PlaneError``.
        """

    def attach(self, fd: int, nbytes: int) -> SymmetricBuffer:
        """A peer's memory; takes over ``fd``. Raises ``PlaneError`` for what is no such memory."""

    def window(self, mapping: mmap) -> HostWindow:
        """Host memory that this process has mapped, for its device as well. Raises ``PlaneError``
        where the driver does not give it that.
        """


class HostWindow(Protocol):
    """Host memory as a device addresses it, as long as this is referred to."""

    address: int


class _SameAddress:
    """The device is the CPU."""

    def __init__(self, mapping: mmap) -> None:
        self.address = _address_of(mapping)
        self._mapping = mapping


def _address_of(mapping: mmap) -> int:
    return int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)


class HostShared:
    """For Triton's interpreter, whose device is the CPU: a memfd."""

    def create(self, nbytes: int) -> tuple[SymmetricBuffer, int]:
        return create_shared("moemesh-rows", nbytes)

    def attach(self, fd: int, nbytes: int) -> SymmetricBuffer:
        return attach_shared(fd, nbytes)

    def window(self, mapping: mmap) -> HostWindow:
        return _SameAddress(mapping)


def shared_memory(device: Device) -> Shared:
    """Raises ``PlaneError`` where the device's driver cannot share memory."""
    if device.place.type == "cpu":
        return HostShared()
    from ep_kernels.triton.cuda_shared import CudaShared  # noqa: PLC0415 - needs CUDA's driver

    return CudaShared(device.place)


@dataclass(frozen=True, slots=True)
class RowsLayout:
    """Byte offsets in a lane's shared memory: x of all ring slots, then out of all."""

    out: int
    total_bytes: int


def lay_out_rows(shape: LaneShape) -> RowsLayout:
    """Raises ``PlaneError`` for a wire that ``send`` does not write."""
    if shape.wire not in _WIRES:
        raise PlaneError(f"the symm plane carries one of {_WIRES}, not {shape.wire}")
    row_bytes = shape.hidden * shape.wire.itemsize
    out_rows = shape.capacity_pairs if shape.exact else shape.capacity_tokens
    out = -(-shape.ring_slots * shape.capacity_tokens * row_bytes // _ALIGN) * _ALIGN
    return RowsLayout(out, out + 4 * shape.ring_slots * out_rows * shape.hidden)


class _Sender:
    """What ``send`` needs to write the rows of one lane's parts."""

    def __init__(self, shape: LaneShape, x: torch.Tensor, device: Device) -> None:
        """``x``: of all ring slots."""
        place, capacity = device.place, shape.capacity_tokens
        self._wire = shape.wire
        self._architecture = architecture_of(place)
        self._picked = np.zeros((1, capacity), dtype=np.int32)
        self._message = Fixed(
            device, torch.from_numpy(self._picked), torch.zeros((1, 2), dtype=torch.int32)
        )
        self._lists = Lists(1, capacity, 1, place)
        self._lists.row_token, self._lists.counts = self._message.views
        # Of the table's fields only the first is used: where x of the one lane lies.
        self._lanes = [torch.tensor([[rows.data_ptr()]], device=place) for rows in x]
        self._stamp = torch.zeros(1, dtype=torch.int64, device=place)
        self._status, self._counter = (
            torch.zeros(1, dtype=torch.int32, device=place) for _ in range(2)
        )

    def __call__(self, slot: int, part: Part) -> None:
        """Write a part's rows to a slot, behind what the device does for the last one."""
        tokens = part.block.num_tokens
        self._picked[0, :tokens] = part.block.rows
        self._message.send(
            torch.from_numpy(self._picked), torch.tensor([[tokens, 0]], dtype=torch.int32)
        )
        # A kernel must not be given an address of nothing.
        x = part.x if part.x.numel() else part.x.new_zeros(1, part.x.shape[1])
        send(
            x if x.stride(1) == 1 else x.contiguous(),
            self._lists,
            self._lanes[slot],
            self._stamp,
            self._status,
            self._counter,
            0,
            part.layer,
            wire=self._wire,
            pair_stride=0,
            post=False,
            architecture=self._architecture,
        )


class SymmMemory(LaneMemory):
    """One end's memory of a lane: ``mapping`` has all but the rows, ``rows`` has these."""

    __slots__ = ("_device", "_mapping", "_rows", "_sender", "_window", "_x")

    out_in_slot: ClassVar[bool] = False

    def __init__(
        self, mapping: mmap, layout: LaneLayout, rows: SymmetricBuffer, device: Device
    ) -> None:
        shape, parts = layout.shape, lay_out_rows(layout.shape)
        ring, hidden = shape.ring_slots, shape.hidden
        x = rows.view(0, shape.wire, ring, shape.capacity_tokens, hidden)
        out = rows.view(parts.out, torch.float32, ring, layout.out_rows, hidden)
        super().__init__(mapping, layout, tuple(zip(x, out, strict=True)))
        self._device = device
        self._mapping = mapping
        self._rows = rows
        self._x = x
        self._sender: _Sender | None = None
        """Made by the thread that sends, on whose stream it is used."""
        self._window: HostWindow | None = None

    @classmethod
    def lay_out(cls, shape: LaneShape) -> LaneLayout:
        lay_out_rows(shape)
        return lay_out_apart(shape)

    def send(self, slot: RingSlot, part: Part, sequence: int) -> None:
        """Raises ``DeviceHung``."""
        if self._sender is None:
            self._sender = _Sender(self.layout.shape, self._x, self._device)
        self._sender(slot.index, part)
        wait_for(self._device, self._device.mark())
        publish_part(slot, part, sequence)

    def fields(self, slot: RingSlot, first: int, shared: Shared) -> list[int]:
        """A slot as kernels of this end's device know it: see ``lane_messages.Field``. Raises
        ``PlaneError`` where the device cannot address the lane's host memory.
        """
        if self._window is None:
            self._window = shared.window(self._mapping)
        moved = self._window.address - _address_of(self._mapping)
        at = slot.addresses
        return [
            at.x,
            at.out,
            *(moved + host for host in (at.request, at.pair_token, at.request_flag)),
            *(moved + host for host in (at.answer, at.answer_flag)),
            first,
        ]


@dataclass(slots=True, eq=False)
class Taken(shm.Taken):
    """As kernels know them: ``fields`` is int64 ``[FIELDS, lanes]``; of peers that are not asked
    for zeros.
    """

    fields: np.ndarray


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
        self._steps = 0
        self._out_of_reach = False
        super().__init__(router_id, incarnation, shape, _own(digest, device), spin_ns=spin_ns)

    @property
    def pair_stride(self) -> int:
        """Bytes from one of a message's pair arrays to the next."""
        return self._layout.pair_array_bytes

    def take(self, peers: Sequence[str | None], messages: int) -> Taken | None:
        """As ``ShmRouterPlane``, for this process's device. Workers look for its messages until
        ``give_back``, though nobody rings. None too where a lane's host memory is out of the
        device's reach.
        """
        if self._out_of_reach:
            return None
        taken = super().take(peers, messages)
        if taken is None:
            return None
        fields = np.zeros((FIELDS, len(peers)), dtype=np.int64)
        try:
            for index, entry in enumerate(taken.lanes):
                if entry is not None:
                    lane, slot, first = entry
                    assert isinstance(lane.memory, SymmMemory), "this plane's own"
                    fields[:, index] = lane.memory.fields(slot, first, self._shared)
        except PlaneError as error:
            self._out_of_reach = True
            _log.warning("lane.out_of_reach: %s", error)
            super().give_back(taken)
            return None
        began = perf_counter_ns()
        self._steps += 1
        for entry in taken.lanes:
            if entry is not None:
                lane = entry[0]
                lane.memory.busy[0] = self._steps
                lane.bell.ring()
        self.signal_ns += perf_counter_ns() - began
        return Taken(taken.lanes, fields)

    def give_back(self, taken: shm.Taken, corrupt: int = -1) -> None:
        for entry in taken.lanes:
            if entry is not None:
                entry[0].memory.busy[0] = 0
        super().give_back(taken, corrupt)
        for lane in self._lanes.values():
            if lane.in_flight:
                lane.bell.ring()  # the mark is gone, and the worker may not have looked yet

    def _new_abort_word(self) -> torch.Tensor:
        """Host memory: kernels read it while they wait."""
        return torch.zeros(1, dtype=torch.int64, pin_memory=self._device.place.type == "cuda")

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

    def wait(self, timeout_s: float) -> None:
        """As ``ShmExpertPlane``; while a router's device sends by itself this looks for parts."""
        if not self._woken:
            ends, _ = self._ends
            spin_ns = _ATTEND_SPIN_NS if (os.cpu_count() or 1) > 1 else 0
            if ends.attend(
                self._doorbell,
                self._seen,
                spin_ns=spin_ns,
                timeout_s=timeout_s,
                give_up_s=_ATTEND_S,
            ):
                return
        super().wait(timeout_s)

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
