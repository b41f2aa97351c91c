"""``ShmExpertPlane``: an expert worker's end of its lanes."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from ep_kernels.plane import AnswerStatus, Arrival, PlaneError
from ep_kernels.serve import Served, ServedBanks
from ep_kernels.shm import handshake, memory
from ep_kernels.shm.doorbell import MAX_SENDERS, SPIN_NS, Bell, Doorbell, Signal
from ep_kernels.shm.handshake import Offer, Reply
from ep_kernels.shm.lane import LaneEnds, LaneMemory, Request
from ep_kernels.shm.layout import LaneLayout
from ep_kernels.shm.watcher import Watcher, is_closed

_log = logging.getLogger(__name__)

_MAX_SILENT = 16
"""Connections that have not made an offer yet; a further one evicts the oldest."""

_ACCEPT_PAUSE_S = 0.1

_MAX_FENCED = 1024
"""Routers whose highest incarnation is remembered."""


class ExpertLane:
    """A lane as the expert worker sees it. ``bell`` is rung once an answer's flag is set, ``close``
    ends the connection.
    """

    __slots__ = (
        "answered",
        "bell",
        "close",
        "connection",
        "id",
        "memory",
        "offer",
        "pending",
        "seen",
        "sender",
    )

    def __init__(
        self,
        lane_id: int,
        offer: Offer,
        connection: socket.socket,
        sender: int,
        lane_memory: LaneMemory,
        bell: Signal,
        close: Callable[[], None],
    ) -> None:
        self.id = lane_id
        self.offer = offer
        self.connection = connection
        self.sender = sender
        self.memory = lane_memory
        self.bell = bell
        self.close = close
        self.seen = np.zeros(offer.ring_slots, dtype=np.int64)
        """Newest request flag read from each ring slot."""
        self.answered = np.zeros(offer.ring_slots, dtype=np.int64)
        """Of these the newest that was answered."""
        self.pending: dict[int, Arrival] = {}
        """Arrivals not answered yet, by ring slot."""


class ShmExpertPlane:
    """``ExpertPlane`` over shared memory; listens at the Unix socket ``path`` (mode 0600; an empty
    one: nowhere).

    One thread calls ``poll``, ``answer`` and ``wait``; ``wake`` and ``peers`` may be called on
    any thread. ``wait`` returns at once when anything happened since the last ``poll`` began.
    Lanes open and close on the plane's own thread.

    A router is refused, with the reason, when it means another expert worker, incarnation, model
    (``digest``) or ``hidden`` size, when it is an older incarnation than one seen before, or when
    ``max_lanes`` are open. ``corrupt_lanes`` counts lanes dropped because the peer wrote nonsense.

    Raises ``PlaneError`` when it cannot listen at ``path``.
    """

    _memory: ClassVar[type[LaneMemory]] = LaneMemory
    _memory_fds: ClassVar[int] = 1
    """Descriptors that come with an offer and from which ``_map`` makes the lane's memory."""

    on_device: bool = False

    def __init__(
        self,
        expert_id: str,
        incarnation: int,
        path: str,
        hidden: int,
        digest: str,
        max_lanes: int = 64,
        *,
        spin_ns: int = SPIN_NS,
    ) -> None:
        if not 0 < max_lanes < MAX_SENDERS:
            raise PlaneError(f"max_lanes is 1 to {MAX_SENDERS - 1}, not {max_lanes}")
        self._id = expert_id
        self._incarnation = incarnation
        self._hidden = hidden
        self._digest = digest
        self._max_lanes = max_lanes
        self._path = path
        self._listener = _listen(path) if path else None
        self._inode = Path(path).stat().st_ino if path else 0
        self._doorbell = Doorbell("moemesh-expert-bell", spin_ns=spin_ns)
        self._seen = self._doorbell.value()
        self._woken = False
        self._lock = threading.Lock()  # guards changes of the lane table
        # Both are replaced, never changed: readers take no lock.
        self._lanes: dict[int, ExpertLane] = {}
        self._ends: tuple[LaneEnds, tuple[ExpertLane, ...]] = (LaneEnds(), ())
        self._lane_ids = itertools.count(1)
        self._silent: dict[socket.socket, None] = {}
        self._newest_incarnation: dict[str, int] = {}
        self._closed = False
        self.corrupt_lanes = 0
        self._watcher = Watcher(f"lanes-{expert_id}")
        if self._listener is not None:
            self._watch_listener(self._listener, self._greet)

    # -------------------------------------------------------------- messages

    def serve(self, banks: ServedBanks) -> Served | None:
        self._seen = self._doorbell.value()
        ends, lanes = self._ends
        served = ends.serve(banks)
        if served is not None:
            lanes[served.lane].bell.ring()
        return served

    def poll(self) -> list[Arrival]:
        self._seen = self._doorbell.value()
        ends, lanes = self._ends
        arrived: list[tuple[int, Arrival]] = []
        for number, index, request, fault in ends.look():
            lane = lanes[number]
            if lane.id not in self._lanes:
                continue
            if fault or index in lane.pending:
                self.corrupt_lanes += 1
                early = f"ring slot {index} was written before it was answered"
                self._drop(lane, fault or early)
                continue
            arrival = lane.pending[index] = _arrival(lane, index, request)
            arrived.append((request.sent_ns, arrival))
        if len(arrived) > 1:
            arrived.sort(key=_sent_ns)
        return [arrival for _, arrival in arrived]

    def answer(
        self, arrival: Arrival, status: AnswerStatus, began_ns: int, compute_ns: int
    ) -> None:
        lane = self._lanes.get(arrival.lane)
        if lane is None:
            return  # the router is gone and has given this part up
        if lane.pending.pop(arrival.ring_slot, None) is not arrival:
            raise PlaneError(f"message {arrival.sequence} of {arrival.peer} was answered already")
        slot = lane.memory.slots[arrival.ring_slot]
        lane.answered[arrival.ring_slot] = arrival.sequence
        times_ns = (began_ns, compute_ns)
        lane.memory.publish_answer(slot, arrival.sequence, status, times_ns, arrival.out)
        lane.bell.ring()

    def wait(self, timeout_s: float) -> None:
        """Block until a part arrives, a lane is lost, ``wake()`` or the time-out. May wake
        spuriously.
        """
        if not self._woken:
            self._doorbell.wait(self._seen, timeout_s)
        self._woken = False

    def wake(self) -> None:
        self._woken = True
        self._doorbell.ring()

    def peers(self) -> list[str]:
        return [lane.offer.router for lane in self._lanes.values()]

    def close(self) -> None:
        """Close all lanes, stop listening and remove the socket. Arrivals stay readable."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._watcher.close()
        for lane in self._lanes.values():
            self._remove(lane)
        for connection in self._silent:
            connection.close()
        if self._listener is not None:
            self._listener.close()
        self._doorbell.close_fd()
        if not self._path:
            return
        with contextlib.suppress(FileNotFoundError):
            # Another worker may have taken the path over since.
            if Path(self._path).stat().st_ino == self._inode:
                Path(self._path).unlink()

    # -------------------------------------------------------------- lanes come and go

    def _watch_listener(
        self, listener: socket.socket, greet: Callable[[socket.socket], None]
    ) -> None:
        """Have ``greet`` called for each new connection now and whenever it says something."""
        self._watcher.watch(listener, lambda: self._accept(listener, greet))

    def _accept(self, listener: socket.socket, greet: Callable[[socket.socket], None]) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            _log.warning("lane.accept_failed: %s", error)
            # Out of file descriptors, say: the peer waits in the backlog, and nobody spins.
            time.sleep(_ACCEPT_PAUSE_S)
            return
        connection.setblocking(False)
        if len(self._silent) >= _MAX_SILENT:
            self._hang_up(next(iter(self._silent)))
        self._silent[connection] = None
        self._watcher.watch(connection, lambda: greet(connection))
        greet(connection)

    def _hang_up(self, connection: socket.socket) -> None:
        self._silent.pop(connection, None)
        self._watcher.forget(connection)
        connection.close()

    def _greet(self, connection: socket.socket) -> None:
        """Read the offer of a new connection; open the lane or say why not."""
        try:
            offer, fds = handshake.receive(connection, Offer, 1 + self._memory_fds)
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._hang_up(connection)
            return
        except PlaneError as error:
            self._refuse(connection, "unknown", str(error))
            return
        try:
            lane = self._open(connection, offer, fds)
        except PlaneError as error:
            self._refuse(connection, offer.router, str(error))
            return
        del self._silent[connection]
        self._watcher.watch(connection, lambda: self._check(lane))
        # First the table, then the reply: the router may send as soon as it reads that.
        self._add(lane)
        try:
            handshake.send(connection, Reply(sender=lane.sender), [self._doorbell.fd])
        except OSError as error:
            self._drop(lane, f"the router did not take the reply: {error}")
            return
        _log.info("lane.opened router=%s incarnation=%d", offer.router, offer.router_incarnation)

    def _refuse(self, connection: socket.socket, router: str, reason: str) -> None:
        _log.warning("lane.refused router=%s: %s", router, reason)
        with contextlib.suppress(OSError):
            handshake.send(connection, Reply(sender=0, refusal=reason), [])
        self._hang_up(connection)

    def _open(self, connection: socket.socket, offer: Offer, fds: list[int]) -> ExpertLane:
        """Check the offer and map its memory; takes over ``fds``. Raises ``PlaneError``."""
        lane_fd, bell_fd, *others = fds
        try:
            layout = self._examine(offer)
            sender = self._free_sender(offer)
        except PlaneError:
            for fd in fds:
                os.close(fd)
            raise
        try:
            lane_memory = self._map(layout, [lane_fd, *others])
        except (PlaneError, OSError) as error:
            os.close(bell_fd)
            raise PlaneError(f"the lane's memory: {error}") from error
        bell = Bell(bell_fd, offer.sender)
        return ExpertLane(
            next(self._lane_ids), offer, connection, sender, lane_memory, bell, connection.close
        )

    def _map(self, layout: LaneLayout, fds: list[int]) -> LaneMemory:
        """The lane's memory; takes over ``fds``. Raises ``PlaneError``, ``OSError``."""
        return self._memory(memory.attach(fds[0], layout.total_bytes), layout)

    def _examine(self, offer: Offer) -> LaneLayout:
        if offer.expert != self._id:
            raise PlaneError(f"this is expert worker {self._id}, not {offer.expert}")
        if offer.expert_incarnation != self._incarnation:
            raise PlaneError(
                f"this is incarnation {self._incarnation} of {self._id}, "
                f"not {offer.expert_incarnation}"
            )
        if offer.digest != self._digest:
            raise PlaneError(
                f"{self._id} serves model {self._digest}, router {offer.router} {offer.digest}"
            )
        if offer.hidden != self._hidden:
            raise PlaneError(
                f"{self._id} has hidden size {self._hidden}, router {offer.router} {offer.hidden}"
            )
        newest = self._newest_incarnation.get(offer.router, offer.router_incarnation)
        if offer.router_incarnation < newest:
            raise PlaneError(
                f"incarnation {offer.router_incarnation} of router {offer.router} is fenced: "
                f"{newest} has been seen"
            )
        return self._memory.lay_out(offer.shape())

    def _free_sender(self, offer: Offer) -> int:
        """A sender index that no lane uses but one this offer replaces. Raises ``PlaneError``."""
        taken = {lane.sender for lane in self._lanes.values() if lane.offer.router != offer.router}
        if len(taken) >= self._max_lanes:
            raise PlaneError(f"{self._id} has its {self._max_lanes} lanes open already")
        return next(index for index in range(1, MAX_SENDERS) if index not in taken)

    def _add(self, lane: ExpertLane) -> None:
        router = lane.offer.router
        for other in self._lanes.values():
            if other.offer.router == router:
                self._remove(other)
        self._newest_incarnation.pop(router, None)
        while len(self._newest_incarnation) >= _MAX_FENCED:
            del self._newest_incarnation[next(iter(self._newest_incarnation))]
        self._newest_incarnation[router] = lane.offer.router_incarnation
        with self._lock:
            self._set_lanes({**self._lanes, lane.id: lane})

    def _set_lanes(self, lanes: dict[int, ExpertLane]) -> None:
        """Under the lock."""
        self._lanes = lanes
        ends = tuple(lanes.values())
        looked_at = [
            (
                lane.memory,
                lane.seen,
                lane.answered,
                not lane.offer.exact and lane.offer.shape().wire is torch.float32,
            )
            for lane in ends
        ]
        self._ends = LaneEnds(looked_at), ends

    def _check(self, lane: ExpertLane) -> None:
        if is_closed(lane.connection):
            self._drop(lane, "the router closed the connection or died")

    def _drop(self, lane: ExpertLane, reason: str) -> None:
        if self._remove(lane):
            _log.warning("lane.lost router=%s: %s", lane.offer.router, reason)
            self._doorbell.ring()

    def _remove(self, lane: ExpertLane) -> bool:
        """Any thread; whether the lane was there."""
        with self._lock:
            if lane.id not in self._lanes:
                return False
            self._set_lanes({key: other for key, other in self._lanes.items() if key != lane.id})
        self._watcher.forget(lane.connection)
        lane.close()
        return True


def _sent_ns(item: tuple[int, Arrival]) -> int:
    return item[0]


def _arrival(lane: ExpertLane, index: int, request: Request) -> Arrival:
    memory, offer = lane.memory, lane.offer
    slot = memory.slots[index]
    pairs, exact = request.pairs, offer.exact
    return Arrival(
        lane.id,
        index,
        request.sequence,
        offer.router,
        exact,
        request.step,
        request.layer,
        request.epoch,
        slot.x.first(request.tokens),
        slot.pair_token[:pairs],
        slot.pair_slot[:pairs],
        slot.pair_expert[:pairs],
        slot.pair_weight[:pairs],
        memory.out(slot, pairs if exact else request.tokens),
    )


def _listen(path: str) -> socket.socket:
    """A non-blocking listener at ``path``, in place of one whose process is gone."""
    handshake.check_path(path)
    _remove_stale(path)
    listener = handshake.new_socket()
    try:
        # Linux gives the new file the socket's mode: nobody else can connect even for a moment.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(path)
        Path(path).chmod(0o600)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise PlaneError(f"cannot listen at {path}: {error}") from error
    listener.setblocking(False)
    return listener


def _remove_stale(path: str) -> None:
    try:
        found = Path(path).stat()
    except OSError:
        return  # bind says what is wrong with the path
    if not stat.S_ISSOCK(found.st_mode):
        raise PlaneError(f"cannot listen at {path}: a file that is no socket is there")
    with handshake.new_socket() as probe:
        probe.settimeout(1.0)
        code = probe.connect_ex(path)
    if code != errno.ECONNREFUSED:
        raise PlaneError(f"cannot listen at {path}: another process does")
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()
