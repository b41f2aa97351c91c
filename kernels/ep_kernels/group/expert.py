"""``GroupExpertPlane``: an expert worker's end of lanes over process groups."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterable
from time import monotonic
from typing import ClassVar

from ep_kernels.group.backend import Backend
from ep_kernels.group.carrier import GroupCarrier, forget_ended, join_all
from ep_kernels.group.memory import GroupMemory, new_memory
from ep_kernels.group.rendezvous import Groups, LaneStore, admission, meet
from ep_kernels.plane import PlaneError
from ep_kernels.shm.doorbell import SPIN_NS
from ep_kernels.shm.handshake import Offer
from ep_kernels.shm.lane import LaneMemory
from ep_kernels.shm.layout import lay_out_apart
from ep_kernels.tcp.carrier import Carrier, Kind, Lost
from ep_kernels.tcp.expert import TcpExpertPlane, reply
from ep_kernels.tcp.handshake import Session

_log = logging.getLogger(__name__)


class Meeting:
    """A lane that opens: its groups are made on a thread of their own, ``met`` says what has become
    of them there. It owns the connection until somebody takes that.
    """

    def __init__(self, connection: socket.socket, offer: Offer, session: Session) -> None:
        self.connection = connection
        self.offer = offer
        self.session = session
        self.groups: Groups | None = None
        self.memory: GroupMemory | None = None
        self._thread: threading.Thread | None = None

    def start(self, plane: GroupExpertPlane) -> None:
        name = f"meet-{self.offer.router}"
        self._thread = threading.Thread(target=plane.meet, args=(self,), name=name, daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """End it soon. Never blocks."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(1.0)
        self.connection.close()


class GroupExpertPlane(TcpExpertPlane):
    """``ExpertPlane`` over process groups; listens and refuses as a ``TcpExpertPlane`` without a
    Unix socket does. Its address is ``gloo://HOST:PORT#KEY`` (or ``nccl://``).

    What arrives, and where its answer belongs, lies on ``backend.device``.
    """

    _memory: ClassVar[type[LaneMemory]] = GroupMemory

    def __init__(
        self,
        expert_id: str,
        incarnation: int,
        hidden: int,
        digest: str,
        max_lanes: int = 64,
        *,
        backend: Backend,
        host: str,
        ports: Iterable[int] = (0,),
        key: bytes,
        silence_s: float = 3.0,
        spin_ns: int = SPIN_NS,
    ) -> None:
        self._backend = backend
        self.on_device = backend.on_device
        self._meetings: dict[str, Meeting] = {}
        """By router; the watching thread's."""
        self._carriers: list[GroupCarrier] = []
        super().__init__(
            expert_id, incarnation, "", hidden, digest, max_lanes,
            host=host, ports=ports, key=key, silence_s=silence_s, spin_ns=spin_ns,
        )  # fmt: skip

    def close(self) -> None:
        super().close()
        for meeting in self._meetings.values():
            meeting.cancel()
        for meeting in self._meetings.values():
            meeting.join()
        self._meetings.clear()
        join_all(self._carriers)

    def _tick(self) -> None:
        super()._tick()
        forget_ended(self._carriers)

    def _take(self, connection: socket.socket, offer: Offer, session: Session) -> None:
        self._examine(offer)
        self._free_sender(offer)
        if offer.router not in self._meetings and len(self._meetings) >= self._max_lanes:
            raise PlaneError(f"{self._id} opens {self._max_lanes} lanes at this moment")
        self._known(connection)
        self._watcher.forget(connection)
        try:
            connection.send(reply(session, ""))
        except OSError:
            connection.close()
            return
        if (other := self._meetings.get(offer.router)) is not None:
            other.cancel()
        meeting = self._meetings[offer.router] = Meeting(connection, offer, session)
        meeting.start(self)

    def meet(self, meeting: Meeting) -> None:
        """A meeting's thread."""
        connection, offer = meeting.connection, meeting.offer
        deadline = monotonic() + self._backend.limit_s
        store = LaneStore(connection, meeting.session, deadline, of_router=False)
        reason = ""
        try:
            meeting.groups = meet(self._backend, store, connection, deadline)
            meeting.memory = new_memory(lay_out_apart(offer.shape()), self._backend)
        except TimeoutError:
            reason = f"it took more than {self._backend.limit_s:g} s"
        except EOFError:
            reason = "the router closed the connection"
        except (PlaneError, OSError, RuntimeError) as error:
            reason = str(error)
        store.seal()
        self._watcher.call(lambda: self._met(meeting, reason))

    def _met(self, meeting: Meeting, reason: str) -> None:
        """Admit the router whose lane has its groups, or say why not."""
        connection, offer = meeting.connection, meeting.offer
        if self._meetings.get(offer.router) is meeting:
            del self._meetings[offer.router]
        elif not reason:
            reason = "a newer offer of the router took its place"
        try:
            connection.setblocking(False)
            if not reason:
                # Another incarnation or other lanes may have come about meanwhile.
                self._examine(offer)
                sender = self._free_sender(offer)
        except (PlaneError, OSError) as error:
            reason = str(error)
        if reason:
            _log.warning("lane.refused router=%s: %s", offer.router, reason)
            with contextlib.suppress(OSError):
                connection.send(admission(meeting.session, reason))
            connection.close()
            return

        def carry(lost: Lost) -> Carrier:
            assert meeting.groups is not None, "it has met"
            assert meeting.memory is not None, "it has met"
            carrier = GroupCarrier(
                connection,
                meeting.memory,
                Kind.ANSWER,
                self._watcher,
                self._doorbell,
                lost,
                meeting.groups,
                self._backend,
                self._silence_s,
            )
            self._carriers.append(carrier)
            return carrier

        self._open_lane(connection, offer, sender, carry, admission(meeting.session))
