"""``ShmRouterPlane``: a router's end of its lanes."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import ClassVar

import torch

from ep_kernels.plane import (
    Answer,
    LaneLost,
    LaneRefused,
    LaneShape,
    Part,
    PlaneError,
)
from ep_kernels.shm import handshake, memory
from ep_kernels.shm.doorbell import MAX_SENDERS, SPIN_NS, Bell, Doorbell, Signal, ring_all
from ep_kernels.shm.handshake import Offer, Reply
from ep_kernels.shm.lane import CorruptLaneError, LaneMemory, RingSlot, acquire
from ep_kernels.shm.watcher import Watcher, is_closed

_log = logging.getLogger(__name__)


class InFlight:
    """A message that the expert worker has not answered."""

    __slots__ = ("rows", "sequence", "slot", "ticket")

    def __init__(self, slot: RingSlot, sequence: int, rows: int, ticket: int) -> None:
        self.slot = slot
        self.sequence = sequence
        self.rows = rows
        self.ticket = ticket


class RouterLane:
    """A lane as the router sees it. ``bell`` is rung once a request's flag is set, ``close`` ends
    the connection.
    """

    __slots__ = (
        "bell",
        "close",
        "connection",
        "free",
        "in_flight",
        "incarnation",
        "memory",
        "next_sequence",
        "peer",
        "sender",
    )

    def __init__(
        self,
        peer: str,
        incarnation: int,
        connection: socket.socket,
        sender: int,
        lane_memory: LaneMemory,
        bell: Signal,
        close: Callable[[], None],
    ) -> None:
        self.peer = peer
        self.incarnation = incarnation
        self.connection = connection
        self.sender = sender
        self.memory = lane_memory
        self.bell = bell
        self.close = close
        self.free = list(reversed(lane_memory.slots))  # the last freed is the warmest
        self.in_flight: list[InFlight] = []
        self.next_sequence = 1


@dataclass(slots=True, eq=False)
class Taken:
    """A ring slot of each of some lanes, for the messages of one step; None for ranks that are not
    asked.
    """

    lanes: list[tuple[RouterLane, RingSlot, int] | None]
    """With the sequence of the first message."""


class ShmRouterPlane:
    """``RouterPlane`` over shared memory.

    One thread calls ``try_send``, ``poll``, ``release``, ``lost``, ``wait`` and ``in_flight``;
    ``connect``, ``disconnect``, ``peers`` and ``wake`` may be called on any thread. ``wait``
    returns at once when anything happened since the last ``poll`` began, so a loop polls between
    two waits.

    ``digest`` identifies the model: an expert worker that serves another one refuses the lane.
    ``corrupt_lanes`` counts lanes dropped because the peer wrote nonsense.
    """

    _memory: ClassVar[type[LaneMemory]] = LaneMemory

    on_device: bool = False

    def __init__(
        self,
        router_id: str,
        incarnation: int,
        shape: LaneShape,
        digest: str,
        *,
        spin_ns: int = SPIN_NS,
    ) -> None:
        self._id = router_id
        self._incarnation = incarnation
        self._shape = shape
        self._digest = digest
        self._layout = self._memory.lay_out(shape)
        self._doorbell = Doorbell("moemesh-router-bell", spin_ns=spin_ns)
        self._seen = self._doorbell.value()
        self._woken = False
        self._watcher = Watcher(f"lanes-{router_id}")
        self._lock = threading.Lock()  # guards changes of the lane tables and the list of the lost
        self._lanes: dict[str, RouterLane] = {}  # replaced, never changed: readers take no lock
        self._senders: set[int] = set()
        self._lost: list[LaneLost] = []
        self._answered: dict[int, tuple[RouterLane, RingSlot]] = {}
        self._tickets = itertools.count(1)
        self._to_ring: dict[Signal, None] | None = None
        self._closed = False
        self._abort = self._new_abort_word()
        self._abort_word = self._abort.numpy()
        self.corrupt_lanes = 0
        self.copy_ns = 0
        self.signal_ns = 0

    # -------------------------------------------------------------- lanes come and go

    def connect(self, peer: str, address: str, incarnation: int, timeout_s: float) -> None:
        """Open a lane to ``incarnation`` of ``peer``, which listens at the Unix path ``address``.

        A lane that exists already is closed first and its tickets are never answered. Raises
        ``LaneRefused`` with the peer's reason, ``PlaneError`` when it cannot be reached in time.
        """
        handshake.check_path(address)
        self.disconnect(peer)
        sender = self._take_sender(peer)
        connection = handshake.new_socket()
        try:
            connection.settimeout(timeout_s)
            lane = self._open(peer, address, incarnation, connection, sender)
            connection.setblocking(False)
            self._add(lane, lambda: self._check(lane))
        except BaseException as error:
            connection.close()
            self._give_back_sender(sender)
            if isinstance(error, TimeoutError):
                raise PlaneError(
                    f"{peer} at {address} did not answer in {timeout_s:g} s"
                ) from error
            if isinstance(error, OSError):
                raise PlaneError(f"cannot reach {peer} at {address}: {error}") from error
            if isinstance(error, EOFError):
                raise PlaneError(f"{peer} at {address} closed the connection") from error
            raise

    def disconnect(self, peer: str) -> None:
        """Close the lane to ``peer``, if there is one; it is not reported as lost."""
        with self._lock:
            lane = self._lanes.get(peer)
            if lane is not None:
                self._remove(lane)

    def peers(self) -> dict[str, int]:
        return {peer: lane.incarnation for peer, lane in self._lanes.items()}

    def lost(self) -> list[LaneLost]:
        if not self._lost:
            return []
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        """Close all lanes and stop the watching thread. Answers not released stay readable."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for lane in self._lanes.values():
                self._remove(lane)
        self._watcher.close()
        self._doorbell.close_fd()

    # -------------------------------------------------------------- messages

    def try_send(self, peer: str, part: Part) -> int | None:
        lane = self._lanes.get(peer)
        if lane is None:
            raise LaneLost(peer, "no lane is open")
        tokens, pairs = part.block.num_tokens, part.block.num_pairs
        shape = self._shape
        if tokens > shape.capacity_tokens or pairs > shape.capacity_pairs:
            raise PlaneError(
                f"a part of {tokens} tokens and {pairs} pairs exceeds the lane to {peer}: "
                f"{shape.capacity_tokens} tokens, {shape.capacity_pairs} pairs"
            )
        if not lane.free:
            return None
        began = perf_counter_ns()
        slot = lane.free.pop()
        sequence = lane.next_sequence
        lane.next_sequence = sequence + 1
        ticket = next(self._tickets)
        lane.in_flight.append(InFlight(slot, sequence, pairs if shape.exact else tokens, ticket))
        lane.memory.send(slot, part, sequence)
        copied = perf_counter_ns()
        self.copy_ns += copied - began
        if self._to_ring is None:
            lane.bell.ring()
            self.signal_ns += perf_counter_ns() - copied
        else:
            self._to_ring[lane.bell] = None
        return ticket

    @contextmanager
    def together(self) -> Iterator[None]:
        bells = self._to_ring = {}
        try:
            yield
        finally:
            self._to_ring = None
            began = perf_counter_ns()
            ring_all(tuple(bells))
            self.signal_ns += perf_counter_ns() - began

    def poll(self) -> list[Answer]:
        self._seen = self._doorbell.value()
        acquire()
        answers: list[Answer] = []
        for lane in self._lanes.values():
            flags = lane.memory.answer_flags
            done = [
                message
                for message in lane.in_flight
                if flags[message.slot.index] == message.sequence
            ]
            if done:
                self._collect(lane, done, answers)
        return answers

    def release(self, answer: Answer) -> None:
        lane, slot = self._answered.pop(answer.ticket)
        lane.free.append(slot)

    def wait(self, timeout_s: float) -> None:
        if not self._woken and not self._lost:
            self._doorbell.wait(self._seen, timeout_s)
        self._woken = False

    def wake(self) -> None:
        self._woken = True
        self._doorbell.ring()

    def in_flight(self) -> int:
        return sum(self._shape.ring_slots - len(lane.free) for lane in self._lanes.values())

    def _collect(self, lane: RouterLane, done: list[InFlight], answers: list[Answer]) -> None:
        acquire()
        for message in done:
            slot = message.slot
            try:
                status, began_ns, compute_ns = slot.read_answer(message.sequence, message.rows)
            except CorruptLaneError as error:
                self.corrupt_lanes += 1
                self._lose(lane, str(error))
                return
            lane.in_flight.remove(message)
            self._answered[message.ticket] = (lane, slot)
            out = slot.out.first(message.rows)
            answers.append(Answer(lane.peer, message.ticket, status, out, began_ns, compute_ns))

    # -------------------------------------------------------------- steps that send by themselves

    @property
    def shape(self) -> LaneShape:
        """Of its lanes."""
        return self._shape

    @property
    def doorbell(self) -> Doorbell:
        """Rung by workers that have answered."""
        return self._doorbell

    def in_memory(self, peers: Iterable[str]) -> bool:
        """Whether the lanes to these peers, as far as there are any, are in shared memory."""
        lanes = (self._lanes.get(peer) for peer in peers)
        return all(lane is None or isinstance(lane.bell, Bell) for lane in lanes)

    def take(self, peers: Sequence[str | None], messages: int) -> Taken | None:
        """A ring slot of the lane to each of ``peers`` (None: there is none to it), through which
        C or a device of this process may send so many messages, one after the other, until
        ``give_back``. None where a lane is missing, not in shared memory, or has no free slot.
        """
        self._abort_word[0] = 0
        lanes = [None if peer is None else self._lanes.get(peer) for peer in peers]
        if any(
            peer is not None and (lane is None or not lane.free or not isinstance(lane.bell, Bell))
            for peer, lane in zip(peers, lanes, strict=True)
        ):
            return None
        return Taken([None if lane is None else self._lend(lane, messages) for lane in lanes])

    def give_back(self, taken: Taken, corrupt: int = -1) -> None:
        """Whoever sent through what was taken is done: nothing of it waits or sends any more. Slots
        whose last message was not answered come free when it is, as an answer to a ticket that
        nobody knows. ``corrupt``: the lane over which nonsense came, which is dropped.
        """
        acquire()
        for index, entry in enumerate(taken.lanes):
            if entry is None:
                continue
            lane, slot, first = entry
            if self._lanes.get(lane.peer) is not lane:
                continue
            sent = lane.memory.request_flags[slot.index]
            if index == corrupt:
                self.corrupt_lanes += 1
                self._lose(lane, f"the answer to message {sent} is none: {slot.answer_header()}")
            elif sent < first or lane.memory.answer_flags[slot.index] == sent:
                lane.free.append(slot)
            else:
                rows = slot.read_request().tokens
                lane.in_flight.append(InFlight(slot, sent, rows, next(self._tickets)))

    def abort(self) -> None:
        """Have who waits for answers to what was taken, now or until the next ``take``, give up."""
        self._abort_word[0] = 1
        self._doorbell.ring()

    @property
    def abort_address(self) -> int:
        """Of an int64 that is not 0 after ``abort``, and once a lane is gone that was open at the
        last ``take``.
        """
        return self._abort.data_ptr()

    def _new_abort_word(self) -> torch.Tensor:
        """``[1]`` int64, 0."""
        return torch.zeros(1, dtype=torch.int64)

    def _lend(self, lane: RouterLane, messages: int) -> tuple[RouterLane, RingSlot, int]:
        first = lane.next_sequence
        lane.next_sequence += messages
        return lane, lane.free.pop(), first

    # -------------------------------------------------------------- opening and losing a lane

    def _open(
        self, peer: str, address: str, incarnation: int, connection: socket.socket, sender: int
    ) -> RouterLane:
        connection.connect(address)
        lane_memory, fds = self._new_memory()
        try:
            offer = self._offer(peer, incarnation, sender)
            handshake.send(connection, offer, [fds[0], self._doorbell.fd, *fds[1:]])
        finally:
            for fd in fds:
                os.close(fd)
        reply, fds = handshake.receive(connection, Reply, 1)
        if reply.refusal:
            raise LaneRefused(peer, reply.refusal)
        bell = Bell(fds[0], reply.sender)
        return RouterLane(
            peer, incarnation, connection, sender, lane_memory, bell, connection.close
        )

    def _new_memory(self) -> tuple[LaneMemory, list[int]]:
        """A lane's memory, and the descriptors by which the other end maps it; the caller closes
        them. Raises ``PlaneError``, ``OSError``.
        """
        fd = memory.create("moemesh-lane", self._layout.total_bytes)
        try:
            mapping = memory.attach(os.dup(fd), self._layout.total_bytes)
        except BaseException:
            os.close(fd)
            raise
        return self._memory(mapping, self._layout), [fd]

    def _offer(self, peer: str, incarnation: int, sender: int) -> Offer:
        shape = self._shape
        return Offer(
            router=self._id,
            router_incarnation=self._incarnation,
            expert=peer,
            expert_incarnation=incarnation,
            digest=self._digest,
            sender=sender,
            hidden=shape.hidden,
            top_k=shape.top_k,
            capacity_tokens=shape.capacity_tokens,
            ring_slots=shape.ring_slots,
            exact=shape.exact,
            wire=handshake.wire_name(shape.wire),
        )

    def _add(self, lane: RouterLane, on_event: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise PlaneError("the plane is closed")
            self._lanes = {**self._lanes, lane.peer: lane}
        self._watcher.watch(lane.connection, on_event)

    def _check(self, lane: RouterLane) -> None:
        if is_closed(lane.connection):
            self._lose(lane, "the expert worker closed the connection or died")

    def _lose(self, lane: RouterLane, reason: str) -> None:
        with self._lock:
            if self._lanes.get(lane.peer) is not lane:
                return
            self._remove(lane)
            self._lost.append(LaneLost(lane.peer, reason))
        _log.warning("lane.lost peer=%s incarnation=%d: %s", lane.peer, lane.incarnation, reason)
        self._doorbell.ring()

    def _remove(self, lane: RouterLane) -> None:
        """Under the lock."""
        self._lanes = {peer: other for peer, other in self._lanes.items() if other is not lane}
        self._senders.discard(lane.sender)
        self._watcher.forget(lane.connection)
        lane.close()
        self.abort()

    def _take_sender(self, peer: str) -> int:
        with self._lock:
            for sender in range(1, MAX_SENDERS):
                if sender not in self._senders:
                    self._senders.add(sender)
                    return sender
        raise PlaneError(f"no room for a lane to {peer}: {MAX_SENDERS - 1} lanes are open")

    def _give_back_sender(self, sender: int) -> None:
        with self._lock:
            self._senders.discard(sender)
