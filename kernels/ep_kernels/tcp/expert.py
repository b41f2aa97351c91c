"""``TcpExpertPlane``: an expert worker's end of lanes over TCP and in shared memory."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterable

from ep_kernels.plane import PlaneError
from ep_kernels.shm.doorbell import SPIN_NS
from ep_kernels.shm.expert import ExpertLane, ShmExpertPlane
from ep_kernels.shm.handshake import Offer, Reply, decode, encode
from ep_kernels.shm.lane import LaneMemory
from ep_kernels.tcp import handshake
from ep_kernels.tcp.carrier import BEATS, Carrier, Kind, Lost, own_memory
from ep_kernels.tcp.dial import prepare
from ep_kernels.tcp.handshake import Session

_log = logging.getLogger(__name__)


class _Caller:
    """A connection that has not proven yet who it is."""

    __slots__ = ("age_beats", "challenged", "data")

    def __init__(self) -> None:
        self.challenged = handshake.new_nonce()
        self.data = b""
        self.age_beats = 0


class TcpExpertPlane(ShmExpertPlane):
    """A ``ShmExpertPlane`` that also takes lanes at ``host``, on the first of ``ports`` that is
    free (0: any); ``port`` says which. Its Unix socket is left out for an empty ``path``.

    A router must prove that it knows ``key`` (32 bytes), and is refused for the reasons that
    ``ShmExpertPlane`` has. One that says nothing for ``silence_s`` seconds is lost.
    """

    def __init__(
        self,
        expert_id: str,
        incarnation: int,
        path: str,
        hidden: int,
        digest: str,
        max_lanes: int = 64,
        *,
        host: str,
        ports: Iterable[int] = (0,),
        key: bytes,
        silence_s: float = 3.0,
        spin_ns: int = SPIN_NS,
    ) -> None:
        if len(key) != handshake.KEY_BYTES:
            raise PlaneError(f"a lane key has {handshake.KEY_BYTES} bytes, not {len(key)}")
        self._key = key
        self._silence_s = silence_s
        self._callers: dict[socket.socket, _Caller] = {}
        self._tcp_listener = _listen_tcp(host, ports)
        self.port: int = self._tcp_listener.getsockname()[1]
        try:
            super().__init__(
                expert_id, incarnation, path, hidden, digest, max_lanes, spin_ns=spin_ns
            )
        except PlaneError:
            self._tcp_listener.close()
            raise
        self._watch_listener(self._tcp_listener, self._hear)
        self._watcher.every(silence_s / BEATS, self._tick)

    def close(self) -> None:
        super().close()
        self._tcp_listener.close()

    def _hang_up(self, connection: socket.socket) -> None:
        self._callers.pop(connection, None)
        super()._hang_up(connection)

    def _tick(self) -> None:
        for lane in self._lanes.values():
            if isinstance(lane.bell, Carrier):
                lane.bell.tick()
        for connection, caller in tuple(self._callers.items()):
            caller.age_beats += 1
            if caller.age_beats > BEATS:
                self._hang_up(connection)

    # -------------------------------------------------------------- a router calls

    def _hear(self, connection: socket.socket) -> None:
        """A connection is new, or has said something."""
        caller = self._callers.get(connection)
        try:
            if caller is None:
                caller = self._callers[connection] = _Caller()
                prepare(connection, self._silence_s)
                connection.send(handshake.challenge(caller.challenged))
            if not self._heard_out(connection, caller):
                return
        except BlockingIOError:
            return
        except PlaneError as error:
            _log.warning("lane.refused router=unknown: %s", error)
            self._hang_up(connection)
            return
        except (EOFError, OSError):
            self._hang_up(connection)
            return
        self._answer_offer(connection, caller)

    def _heard_out(self, connection: socket.socket, caller: _Caller) -> bool:
        """Whether the whole offer is there. Raises ``PlaneError``, ``EOFError``, ``OSError``."""
        while True:
            wanted = handshake.HEAD_BYTES
            if len(caller.data) >= wanted:
                wanted += handshake.body_bytes(caller.data[:wanted])
            if len(caller.data) == wanted:
                return True
            more = connection.recv(wanted - len(caller.data))
            if not more:
                raise EOFError
            caller.data += more

    def _answer_offer(self, connection: socket.socket, caller: _Caller) -> None:
        """Open the lane or say why not."""
        head, body = caller.data[: handshake.HEAD_BYTES], caller.data[handshake.HEAD_BYTES :]
        router, nonce, refusal = "unknown", b"", ""
        try:
            nonce = handshake.read_offer(head, body, self._key, caller.challenged)
            offer = decode(body, Offer)
            router = offer.router
            self._take(connection, offer, Session(self._key, caller.challenged, nonce))
        except PlaneError as error:
            refusal = str(error)
        if refusal:
            _log.warning("lane.refused router=%s: %s", router, refusal)
            if nonce:  # a stranger is told nothing
                with contextlib.suppress(OSError):
                    connection.send(reply(Session(self._key, caller.challenged, nonce), refusal))
            self._hang_up(connection)

    def _take(self, connection: socket.socket, offer: Offer, session: Session) -> None:
        """Open the lane that is offered. Raises ``PlaneError`` for one that is refused."""
        layout = self._examine(offer)
        sender = self._free_sender(offer)
        try:
            mapping = own_memory(layout.total_bytes)
        except OSError as error:
            raise PlaneError(f"the lane's memory: {error}") from error

        def carry(lost: Lost) -> Carrier:
            return Carrier(
                connection, mapping, LaneMemory(mapping, layout), Kind.ANSWER, self._watcher,
                self._doorbell, lost,
            )  # fmt: skip

        self._known(connection)
        self._open_lane(connection, offer, sender, carry, reply(session, ""))

    def _known(self, connection: socket.socket) -> None:
        """Its caller has proven who it is."""
        del self._callers[connection], self._silent[connection]

    def _open_lane(
        self,
        connection: socket.socket,
        offer: Offer,
        sender: int,
        carry: Callable[[Lost], Carrier],
        accepted: bytes,
    ) -> None:
        """Add the lane that ``carry`` makes the carrier of, and tell the router so."""

        def lost(reason: str, corrupt: bool) -> None:
            self.corrupt_lanes += corrupt
            self._drop(lane, reason)

        carrier = carry(lost)
        lane = ExpertLane(
            next(self._lane_ids), offer, connection, sender, carrier.memory, carrier, carrier.close
        )
        self._add(lane)
        try:
            connection.send(accepted)
        except OSError as error:
            self._drop(lane, f"the router did not take the reply: {error}")
            return
        self._watcher.watch(connection, carrier.on_event)
        _log.info("lane.opened router=%s incarnation=%d", offer.router, offer.router_incarnation)


def reply(session: Session, refusal: str) -> bytes:
    """The message that accepts an offer or says why not."""
    body = encode(Reply(sender=0, refusal=refusal))
    return handshake.pack_reply(body, session.key, session.challenged, session.own)


def _listen_tcp(host: str, ports: Iterable[int]) -> socket.socket:
    """A non-blocking listener on the first port that is free. Raises ``PlaneError``."""
    tried: list[int] = []
    reason = "no port is given"
    for port in ports:
        try:
            family, *_, at = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.create_server(at, family=family, backlog=128)
        except OSError as error:
            tried.append(port)
            reason = str(error)
        else:
            listener.setblocking(False)
            return listener
    shown = f"{tried[0]}-{tried[-1]}" if len(tried) > 1 else "".join(map(str, tried))
    raise PlaneError(f"cannot listen for lanes at {host}, port {shown}: {reason}")
