"""Carries one lane's messages: heads and pairs on its connection, rows through its groups.

The sender hands the rows to a group and says on the connection, in a frame as ``tcp.carrier``
describes it but for the rows, that they are coming. The receiver checks the frame as on any lane
and only then posts a receive, of just these rows, on a thread of the lane's own; once they are
there it sets the flag and rings the process's doorbell. Frames and rows keep the same order, and
each group carries one direction.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Final

import torch

from ep_kernels.group.backend import Backend
from ep_kernels.group.memory import GroupMemory
from ep_kernels.group.rendezvous import Groups, first_line
from ep_kernels.plane import AnswerStatus
from ep_kernels.shm.doorbell import Doorbell
from ep_kernels.shm.lane import CorruptLaneError, Request
from ep_kernels.shm.watcher import Watcher
from ep_kernels.tcp.carrier import Carrier, Kind, Lost

if TYPE_CHECKING:
    from torch.distributed import Work

_log = logging.getLogger(__name__)

_LEAST_BYTES_PER_S: Final = 4_000_000
"""Rows that come more slowly than this, and not within the silence that a lane may keep, are given
up."""

_END_S: Final = 5.0
"""For what the back end takes to give groups up, when a plane closes."""

_Awaited = tuple[int, torch.Tensor, Callable[[], None]]


class GroupCarrier(Carrier):
    """One end of a lane, as ``Carrier``. ``close`` gives the groups up in the background; ``join``
    waits for that.
    """

    def __init__(
        self,
        connection: socket.socket,
        memory: GroupMemory,
        sends: Kind,
        watcher: Watcher,
        doorbell: Doorbell,
        lost: Lost,
        groups: Groups,
        backend: Backend,
        silence_s: float,
    ) -> None:
        super().__init__(connection, memory.mapping, memory, sends, watcher, doorbell, lost)
        self._groups = groups
        self._backend = backend
        self._silence_s = silence_s
        self._broken = ""
        self._sending: list[Work | None] = [None] * len(memory.slots)
        """What holds each ring slot's rows until they have been sent: until its next message."""
        self._announced: set[int] = set()
        """Ring slots whose rows have not come."""
        self._awaited: SimpleQueue[_Awaited | None] = SimpleQueue()
        self._too_late = float("inf")
        """Monotonic time at which the rows that are awaited count as lost."""
        self._ending = threading.Thread(target=self._end, name="lane-end", daemon=True)
        self._receiver = threading.Thread(target=self._run, name="lane-rows", daemon=True)
        self._receiver.start()

    def ring(self) -> None:
        super().ring()
        if self._broken:
            self._lose(self._broken)

    def tick(self) -> None:
        super().tick()
        if monotonic() > self._too_late:
            self._lose("rows were announced and did not come")

    def close(self) -> None:
        with self._send_lock:
            if self._closed:
                return
        super().close()
        with contextlib.suppress(RuntimeError):  # another thread closes it too
            self._ending.start()

    @property
    def ended(self) -> bool:
        """Nothing of the lane is left."""
        return self._ending.ident is not None and not self._ending.is_alive()

    def join(self, timeout_s: float) -> None:
        """After ``close``: wait until nothing of the lane is left, or that long."""
        if self._ending.ident is not None:
            self._ending.join(timeout_s)

    # -------------------------------------------------------------- sending, under the lock

    def _frame(self, index: int) -> list[memoryview]:
        slot = self.memory.slots[index]
        if self._sends is Kind.REQUEST:
            rows = slot.x.first(slot.read_request().tokens)
        else:
            _, status, _, _, count = slot.answer_header()
            rows = slot.out.first(count if self._has_rows(status) else 0)
        if rows.shape[0] and not self._closed:
            try:
                self._sending[index] = self._groups.send(rows)
            except RuntimeError as error:
                self._broken = f"cannot send: {first_line(error)}"
        return super()._frame(index)

    # -------------------------------------------------------------- receiving

    def _begin_request(self, index: int, request: Request) -> Callable[[], None]:
        self._check_announced(index)
        arrived = super()._begin_request(index, request)
        rows = self.memory.slots[index].x.first(request.tokens)
        return self._once_there(index, rows, arrived)

    def _begin_answer(self, index: int, header: list[int]) -> Callable[[], None]:
        self._check_announced(index)
        arrived = super()._begin_answer(index, header)
        count = header[4] if self._has_rows(header[1]) else 0
        return self._once_there(index, self.memory.slots[index].out.first(count), arrived)

    def _check_announced(self, index: int) -> None:
        if index in self._announced:
            raise CorruptLaneError(f"ring slot {index} was announced again before its rows came")

    def _once_there(
        self, index: int, rows: torch.Tensor, arrived: Callable[[], None]
    ) -> Callable[[], None]:
        if not rows.shape[0]:
            return arrived

        def announced() -> None:
            self._announced.add(index)
            self._awaited.put((index, rows, arrived))

        return announced

    def _run(self) -> None:
        with self._backend.receiving():
            while (awaited := self._awaited.get()) is not None and not self._closed:
                index, rows, arrived = awaited
                limit_s = self._silence_s + rows.nbytes / _LEAST_BYTES_PER_S
                self._too_late = monotonic() + limit_s
                try:
                    # ``tick`` looks at the limit. What it cannot end ends by itself soon after.
                    self._groups.receive(rows, limit_s + self._silence_s / 2)
                except RuntimeError as error:
                    self._lose(f"cannot receive: {first_line(error)}")
                    return
                self._too_late = float("inf")
                # In this order: once the flag is set, the slot may carry another message.
                self._announced.discard(index)
                arrived()

    def _end(self) -> None:
        """Free the thread that receives, and then all that the groups hold."""
        self._awaited.put(None)
        try:
            self._groups.give_up()
        except Exception:  # noqa: BLE001 - a back end's clean-up must not end anything else
            _log.exception("lane.abort_failed")
        self._receiver.join()
        self._sending.clear()
        del self._groups

    # -------------------------------------------------------------- what the connection carries

    @staticmethod
    def _has_rows(status: int) -> bool:
        return status == AnswerStatus.OK

    def _request_views(
        self,
        index: int,
        tokens: int,  # noqa: ARG002
        pairs: int,
    ) -> list[memoryview]:
        return super()._request_views(index, 0, pairs)

    def _answer_views(self, index: int, status: int, rows: int) -> list[memoryview]:  # noqa: ARG002
        return []


def forget_ended(carriers: list[GroupCarrier]) -> None:
    """Keep no memory of lanes that are gone. Others may append meanwhile."""
    for carrier in tuple(carriers):
        if carrier.ended:
            carriers.remove(carrier)


def join_all(carriers: list[GroupCarrier]) -> None:
    """Wait a moment for the end of lanes that are closed, and forget them."""
    deadline = monotonic() + _END_S
    for carrier in carriers:
        carrier.join(max(0.0, deadline - monotonic()))
    carriers.clear()
