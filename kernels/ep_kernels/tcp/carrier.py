"""Carries one lane's messages between the memories of its two ends.

A frame is a head of 64 bytes, in the machine's byte order, and a body:

    kind       uint16   ``REQUEST``, ``ANSWER`` or ``BEAT``
    ring slot  uint16
    size       uint32   bytes of the body
    header     7 int64  the message's header as in the lane; an answer's has 5, then zeros
    body       request  pair token, slot, expert (int32) and weight (fp32) ``[pairs]`` each, then
                        x ``[tokens, hidden]`` in the wire dtype
               answer   out ``[rows, hidden]`` fp32; nothing when it is ``STALE``
               beat     nothing

``ring``, on the compute thread, hands the kernel what it takes at once; the plane's watching thread
sends the rest, and receives. A slot's memory is not written again before the answer has come, so
nothing is copied on the way. The peer is lost when its connection ends, when it sends nonsense, and
when it has said nothing for ``BEATS`` times the pause between two beats. That is counted in beats
of our own, so that a process which slept does not take it for its peers' silence.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import threading
from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from time import monotonic_ns, perf_counter_ns
from typing import Final

import torch

from ep_kernels.plane import AnswerStatus
from ep_kernels.shm.doorbell import Doorbell
from ep_kernels.shm.lane import CorruptLaneError, LaneMemory, Request
from ep_kernels.shm.layout import LaneLayout
from ep_kernels.shm.watcher import Watcher

BEATS: Final = 4

_HEAD: Final = Struct("=HHI7q")
_BEAT: Final = memoryview(_HEAD.pack(3, 0, 0, *[0] * 7))
_MOST_BUFFERS: Final = 64
"""Handed to the kernel at once; it takes up to 1024 (``IOV_MAX``)."""

Lost = Callable[[str, bool], None]
"""Called with the reason, and whether the peer sent nonsense; on any thread, perhaps repeatedly."""


class Kind(IntEnum):
    REQUEST = 1
    ANSWER = 2
    BEAT = 3


class Carrier:
    """One end of a lane. ``sends`` REQUEST at the router, ANSWER at the expert worker.

    It takes over the connection, which does not block; ``on_event`` and ``tick`` (once a beat) are
    for the watching thread, ``ring`` for the compute thread, ``close`` for any.
    """

    def __init__(
        self,
        connection: socket.socket,
        mapping: mmap.mmap,
        memory: LaneMemory,
        sends: Kind,
        watcher: Watcher,
        doorbell: Doorbell,
        lost: Lost,
    ) -> None:
        self._connection = connection
        self._watcher = watcher
        self._doorbell = doorbell
        self._lost: Lost | None = lost
        self.memory = memory
        self._bytes = memoryview(mapping)
        self._sends = sends
        at_router = sends is Kind.REQUEST
        self._out_flags = memory.request_flags if at_router else memory.answer_flags
        self._sent = [0] * len(memory.slots)
        self._send_lock = threading.Lock()  # guards the four below
        self._out: list[memoryview] = []
        self._blocked = False
        self._spoke = False
        self._closed = False
        self._receive_lock = threading.Lock()  # so that nobody closes what is being read
        self._head = memoryview(bytearray(_HEAD.size))
        self._head_got = 0
        self._body: list[memoryview] = []
        self._arriving: Callable[[], None] | None = None
        self._silent_beats = 0

    @property
    def wakes_on(self) -> int:
        return -1

    def ring(self) -> None:
        """Send every message whose flag was set since the last call. Never blocks or raises."""
        with self._send_lock:
            for index, flag in enumerate(self._out_flags.tolist()):
                if flag != self._sent[index]:
                    self._sent[index] = flag
                    self._out += self._frame(index)
            reason = self._flush()
        if reason:
            self._lose(reason)

    def on_event(self) -> None:
        """The connection can be read or, where that was waited for, written."""
        reason, corrupt = "", False
        with self._send_lock:
            if self._blocked:
                reason = self._flush()
        if not reason:
            with self._receive_lock:
                try:
                    reason = self._receive()
                except CorruptLaneError as error:
                    reason, corrupt = str(error), True
        if reason:
            self._lose(reason, corrupt=corrupt)

    def tick(self) -> None:
        """Another beat: speak if we have not since the last one, and count the peer's silence."""
        self._silent_beats += 1
        reason = ""
        if self._silent_beats > BEATS:
            reason = "the peer has gone silent"
        else:
            with self._send_lock:
                # A peer that takes nothing gets no beats on top of what it has not taken.
                if not self._spoke and not self._out:
                    self._out.append(_BEAT)
                    reason = self._flush()
                self._spoke = False
        if reason:
            self._lose(reason)

    def close(self) -> None:
        """End the connection; what was not sent is dropped."""
        with self._send_lock, self._receive_lock:
            if self._closed:
                return
            self._closed = True
            self._lost = None  # it may hold the lane, and the lane holds us
            self._out.clear()
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()

    def _lose(self, reason: str, *, corrupt: bool = False) -> None:
        lost = self._lost
        if lost is not None:
            lost(reason, corrupt)

    # -------------------------------------------------------------- sending, under the lock

    def _frame(self, index: int) -> list[memoryview]:
        slot = self.memory.slots[index]
        if self._sends is Kind.REQUEST:
            request = slot.read_request()
            body = self._request_views(index, request.tokens, request.pairs)
            size = sum(view.nbytes for view in body)
            head = _HEAD.pack(Kind.REQUEST, index, size, *request)
        else:
            answer = slot.answer_header()
            body = self._answer_views(index, answer[1], answer[4])
            size = sum(view.nbytes for view in body)
            head = _HEAD.pack(Kind.ANSWER, index, size, *answer, 0, 0)
        return [memoryview(head), *body]

    def _flush(self) -> str:
        """Returns why the peer is lost, or nothing."""
        if self._closed:
            return ""
        out = self._out
        while out:
            try:
                sent = self._connection.sendmsg(out[:_MOST_BUFFERS])
            except BlockingIOError:
                if not self._blocked:
                    self._blocked = True
                    self._watcher.want_write(self._connection, wanted=True)
                return ""
            except OSError as error:
                return f"cannot send: {error.strerror}"
            self._spoke = True
            _drop(out, sent)
        if self._blocked:
            self._blocked = False
            self._watcher.want_write(self._connection, wanted=False)
        return ""

    # -------------------------------------------------------------- receiving, under the lock

    def _receive(self) -> str:
        """Receive up to one message. Returns why the peer is lost, or nothing. Raises
        ``CorruptLaneError``.
        """
        if self._closed:
            return ""
        try:
            if self._arriving is None:
                got = self._connection.recv_into(self._head[self._head_got :])
                if got == 0:
                    return "the peer closed the connection or died"
                self._silent_beats = 0
                self._head_got += got
                if self._head_got < len(self._head):
                    return ""
                self._head_got = 0
                self._arriving = self._begin()
            while self._body:
                got = self._connection.recvmsg_into(self._body)[0]
                if got == 0:
                    return "the peer closed the connection or died"
                self._silent_beats = 0
                _drop(self._body, got)
        except BlockingIOError:
            return ""
        except OSError as error:
            return f"cannot receive: {error.strerror}"
        arrived, self._arriving = self._arriving, None
        if arrived is not None:
            arrived()
        return ""

    def _begin(self) -> Callable[[], None] | None:
        """Look at a whole head: where its body goes, and what to do once that is there."""
        number, index, size, *header = _HEAD.unpack(self._head)
        if number == Kind.BEAT:
            if size:
                raise CorruptLaneError(f"a beat of {size} bytes")
            return None
        expected = Kind.ANSWER if self._sends is Kind.REQUEST else Kind.REQUEST
        if number != expected:
            raise CorruptLaneError(f"a frame of kind {number}, expected {expected.name}")
        if index >= len(self.memory.slots):
            raise CorruptLaneError(f"ring slot {index} of {len(self.memory.slots)}")
        if expected is Kind.REQUEST:
            arrived = self._begin_request(index, Request._make(header))
        else:
            arrived = self._begin_answer(index, header)
        if (found := sum(view.nbytes for view in self._body)) != size:
            raise CorruptLaneError(f"a body of {size} bytes where its header makes {found}")
        return arrived

    def _begin_request(self, index: int, request: Request) -> Callable[[], None]:
        memory, shape = self.memory, self.memory.layout.shape
        newest = memory.request_flags[index]
        if memory.answer_flags[index] != newest:
            raise CorruptLaneError(f"ring slot {index} was written before it was answered")
        if request.sequence <= newest:
            raise CorruptLaneError(f"message {request.sequence} came after {newest}")
        if not 0 <= request.tokens <= shape.capacity_tokens:
            raise CorruptLaneError(f"{request.tokens} tokens, capacity {shape.capacity_tokens}")
        if not 0 <= request.pairs <= shape.capacity_pairs:
            raise CorruptLaneError(f"{request.pairs} pairs, capacity {shape.capacity_pairs}")
        self._body = self._request_views(index, request.tokens, request.pairs)

        def arrived() -> None:
            # Its sender's clock means nothing here.
            memory.slots[index].write_request(request._replace(sent_ns=monotonic_ns()))
            memory.request_flags[index] = request.sequence
            self._doorbell.ring()

        return arrived

    def _begin_answer(self, index: int, header: list[int]) -> Callable[[], None]:
        memory = self.memory
        sequence, status, _, compute_ns, rows, *_ = header
        if sequence != memory.request_flags[index] or sequence == memory.answer_flags[index]:
            raise CorruptLaneError(f"ring slot {index} has no message {sequence} to answer")
        if status not in set(AnswerStatus) or not 0 <= rows <= memory.layout.out_rows:
            raise CorruptLaneError(f"an answer with status {status} and {rows} rows")
        self._body = self._answer_views(index, status, rows)

        def arrived() -> None:
            # As if the answer had taken no time to come: its sender's clock means nothing here.
            began_ns = perf_counter_ns() - compute_ns
            memory.slots[index].write_answer(
                sequence, AnswerStatus(status), began_ns, compute_ns, rows
            )
            memory.answer_flags[index] = sequence
            self._doorbell.ring()

        return arrived

    # -------------------------------------------------------------- where messages lie

    def _request_views(self, index: int, tokens: int, pairs: int) -> list[memoryview]:
        layout = self.memory.layout
        first = _slot_at(layout, index) + layout.pairs
        spans = [(first + i * layout.pair_array_bytes, 4 * pairs) for i in range(4)]
        x_bytes = tokens * layout.shape.hidden * layout.shape.wire.itemsize
        spans.append((_slot_at(layout, index) + layout.x, x_bytes))
        return [self._bytes[at : at + size] for at, size in spans if size]

    def _answer_views(self, index: int, status: int, rows: int) -> list[memoryview]:
        layout = self.memory.layout
        size = rows * layout.shape.hidden * torch.float32.itemsize
        if status != AnswerStatus.OK or not size:
            return []
        at = _slot_at(layout, index) + layout.out
        return [self._bytes[at : at + size]]


def own_memory(size_bytes: int) -> mmap.mmap:
    """One end's memory of a lane, all there: a first touch would cost. Raises ``OSError``."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return mmap.mmap(-1, size_bytes, flags=flags)


def _slot_at(layout: LaneLayout, index: int) -> int:
    return layout.slots + index * layout.slot_bytes


def _drop(views: list[memoryview], count: int) -> None:
    """Take the first ``count`` bytes away."""
    done = 0
    for view in views:
        if view.nbytes > count:
            break
        count -= view.nbytes
        done += 1
    del views[:done]
    if count:
        views[0] = views[0][count:]
