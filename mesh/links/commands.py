"""Commands and answers: ROUTER and DEALER."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import zmq

from mesh.authority import forbidden
from mesh.inbox import Codec, Counters, Inbox, LinkError
from mesh.links.net import Dialer, EventSocket, Monitor, Net, identity_of

In = TypeVar("In")
Out = TypeVar("Out")
T = TypeVar("T")


class ServerLink(Generic[In, Out]):
    """ROUTER end: many clients, each answered by the ``peer`` it was received from."""

    def __init__(
        self,
        net: Net,
        address: str,
        *,
        receives: Any,
        receive_queue: int = 4096,
        on_lost: Callable[[bytes], None] | None = None,
        refusal: Callable[[str], Out] | None = None,
    ) -> None:
        """Bind; raises ``LinkError``. ``receives`` is the union ``In`` as a value.

        ``on_lost(peer)`` is called, from within ``recv``, once for each peer that has sent
        something and whose connection is then gone: after its last message was received, normally
        some 20 ms after the close. ``refusal(reason)`` makes the answer to a message that its
        sender's key does not allow; None: it gets none.
        """
        socket = net.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.address = net.bind(socket, address)
        """As bound: a ``tcp://...:0`` shows its port."""
        self._keyring = net.keyring(address)
        self.counters = Counters()
        self._codec: Codec[In, Out] = Codec(receives, address, self.counters)
        self._inbox: Inbox[tuple[bytes, In | None]] = Inbox(receive_queue, self._resume)
        self._peers: set[bytes] = set()
        self._on_lost = on_lost
        self._refusal = refusal
        self._loop = asyncio.get_running_loop()
        self._probes: set[asyncio.TimerHandle] = set()
        self._net = net
        self._socket = EventSocket(net, socket, self._on_frames)
        self._monitor = Monitor(net, socket, self.counters, address, self._on_connection)

    async def recv(self) -> tuple[bytes, In]:
        """The next message and the peer it came from. Raises ``LinkClosed``."""
        while True:
            peer, message = await self._inbox.get()
            if message is not None:
                return peer, message
            if self._on_lost is not None:
                self._on_lost(peer)

    def send(self, peer: bytes, message: Out) -> bool:
        """Queue a message. False: the peer is gone or its queue is full, and nothing was sent."""
        if self._socket.closed:
            return False
        sent = self._try_send(peer, self._codec.encode(message))
        if sent:
            self.counters.sent += 1
        else:
            self.counters.unsent += 1
        self._socket.look()
        return sent

    def _try_send(self, peer: bytes, body: bytes) -> bool:
        try:
            self._socket.raw.send_multipart((peer, body), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _resume(self) -> None:
        self._socket.resume()

    def _on_frames(self, frames: Sequence[zmq.Frame]) -> bool:
        peer = frames[0].bytes
        self._peers.add(peer)
        message = self._codec.decode([frame.bytes for frame in frames[1:]])
        if message is None:
            return True
        if self._keyring is not None:
            identity = identity_of(frames[1], self._keyring)
            reason = forbidden(identity, message) if identity else "the sender's key is not listed"
            if reason:
                self._codec.refuse(reason)
                if self._refusal is not None:
                    self.send(peer, self._refusal(reason))
                return True
        return self._inbox.put((peer, message))

    def _on_connection(self, up: bool) -> None:
        # ZeroMQ says that a connection closed but not whose. It says so a moment before the
        # socket forgets the peer, and what the peer sent last is to be read first: ask twice.
        if not up and self._on_lost is not None:
            for delay_s in (0.02, 0.5):
                self._probe_in(delay_s)

    def _probe_in(self, delay_s: float) -> None:
        self._probes.add(self._loop.call_later(delay_s, self._find_lost))

    def _find_lost(self) -> None:
        self._probes = {h for h in self._probes if h.when() > self._loop.time()}
        if self._socket.closed:
            return
        if self._socket.readable():
            self._socket.look()
            self._probe_in(0.02)
            return
        for peer in tuple(self._peers):
            try:
                # An empty message, which clients skip, tells a live peer from a lost one.
                self._socket.raw.send_multipart((peer, b""), zmq.NOBLOCK)
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._peers.discard(peer)
                self._inbox.put((peer, None))
        self._socket.look()

    def close(self) -> None:
        for handle in self._probes:
            handle.cancel()
        self._monitor.close()
        self._socket.close()
        self._net.unbind(self.address)
        self._inbox.close()


class ClientLink(Generic[In, Out]):
    """DEALER end: one server, connected in the background for as long as the link is open."""

    def __init__(
        self,
        net: Net,
        address: str,
        *,
        receives: Any,
        server: str = "planner",
        receive_queue: int = 4096,
        on_up: Callable[[], None] | None = None,
        on_down: Callable[[], None] | None = None,
    ) -> None:
        """Start to connect; raises ``LinkError`` for a malformed address or a missing key only.

        ``server``: the id (or the role, if one process only has it) of who listens there; over
        CURVE it must prove to hold that process's key. ``on_up`` and ``on_down`` are called when
        the connection is made and lost, each time; the server knows a new connection as a new peer.
        """
        socket = net.socket(zmq.DEALER)
        # Queue only on a live connection: what was meant for a dead server must not reach its heir.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        self.address = address
        self.up = False
        self.counters = Counters()
        self._codec: Codec[In, Out] = Codec(receives, address, self.counters)
        self._inbox: Inbox[In] = Inbox(receive_queue, self._resume)
        self._on_up = on_up
        self._on_down = on_down
        self._is_up = asyncio.Event()
        self._socket = EventSocket(net, socket, self._on_frames)
        self._dialer = Dialer(net, socket, address, server)
        self._monitor = Monitor(
            net, socket, self.counters, address, self._on_connection, self._dialer
        )
        try:
            self._dialer.dial()
        except LinkError:
            self.close()
            raise

    async def recv(self) -> In:
        """The next message. Raises ``LinkClosed``."""
        return await self._inbox.get()

    def send(self, message: Out) -> bool:
        """Queue a message. False: not connected, or the queue is full, and nothing was sent."""
        if not self.up:
            # ZeroMQ would for a moment still take messages for a connection that is lost.
            self.counters.unsent += 1
            return False
        try:
            self._socket.raw.send(self._codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.counters.unsent += 1
            sent = False
        else:
            self.counters.sent += 1
            sent = True
        self._socket.look()
        return sent

    async def wait_up(self) -> None:
        """Until the connection stands; put it under the caller's ``asyncio.timeout``."""
        await self._is_up.wait()

    def _resume(self) -> None:
        self._socket.resume()

    def _on_frames(self, frames: Sequence[zmq.Frame]) -> bool:
        bodies = [frame.bytes for frame in frames]
        if bodies == [b""]:
            return True  # the server only asked whether we live
        message = self._codec.decode(bodies)
        return True if message is None else self._inbox.put(message)

    def _on_connection(self, up: bool) -> None:
        if self._socket.closed or up == self.up:
            return
        self._socket.look()  # lets the socket take the new connection into use
        self.up = up
        if up:
            self._is_up.set()
            if self._on_up is not None:
                self._on_up()
        else:
            self._is_up.clear()
            if self._on_down is not None:
                self._on_down()

    def close(self) -> None:
        self.up = False
        self._dialer.close()
        self._monitor.close()
        self._socket.close()
        self._inbox.close()


async def request(
    net: Net,
    address: str,
    message: Any,
    *,
    receives: Any,
    want: type[T],
    timeout_s: float,
    server: str = "planner",
) -> T:
    """Ask a server once and return the first answer of type ``want``.

    Raises ``TimeoutError`` when nobody answers within ``timeout_s``.
    """
    link: ClientLink[Any, Any] = ClientLink(net, address, receives=receives, server=server)
    try:
        async with asyncio.timeout(timeout_s):
            await link.wait_up()
            link.send(message)
            while True:
                answer = await link.recv()
                if isinstance(answer, want):
                    return answer
    finally:
        link.close()
