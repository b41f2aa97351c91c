"""Typed ZeroMQ links for asyncio. The only module that imports zmq.

API (all calls on the event loop's thread; ``Net`` is made once per process)
    ``Net()``                                   owns the ZeroMQ context; ``close()`` last
    ``ServerLink[In, Out](net, address, receives=In)``    ROUTER, binds
        ``await recv() -> (peer, In)``; ``send(peer, Out) -> bool``; ``on_lost(peer)`` callback
    ``ClientLink[In, Out](net, address, receives=In)``    DEALER, connects, reconnects by itself
        ``await recv() -> In``; ``send(Out) -> bool``; ``up``; ``await wait_up()``;
        ``on_up()`` / ``on_down()`` callbacks
    ``Publisher[Out](net, address)``            ``send(Out)``
    ``Subscriber[In](net, address, receives=In)``   ``await recv() -> In``, only the newest
    ``await request(net, address, message, receives=U, want=T) -> T``   one question, one answer

``peer`` is the ROUTER's name for one *connection*: a client that reconnects, or restarts, is
another peer. A message sent on a lost connection is never delivered late.

Bounds. ``send`` never waits: it returns False, and the message is dropped and counted, when the
peer is not connected or ``SEND_QUEUE`` messages are unsent; the caller decides what that means.
Received messages wait in a queue of ``receive_queue``; when it is full the link stops reading, so
that the peer's own queue fills and its ``send`` returns False.

Bytes that cannot be decoded are counted, logged (1st, 2nd, 4th, 8th ... time) and dropped: a
corrupt peer must not end a service. ``counters`` has the figures.

Sockets are read in the event loop's own poll, without ``zmq.asyncio``'s future per message.
ZeroMQ's file descriptor is edge-triggered: after every call that may have taken its signal we
must look at ``EVENTS`` ourselves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from mesh.inbox import Codec, Counters, Inbox, LinkClosed, LinkError

__all__ = [
    "ClientLink",
    "Counters",
    "LinkClosed",
    "LinkError",
    "Net",
    "Publisher",
    "ServerLink",
    "Subscriber",
    "request",
]

In = TypeVar("In")
Out = TypeVar("Out")
T = TypeVar("T")

SEND_QUEUE = 1024
"""Messages per connection that may be unsent."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_IPC = "ipc://"
_LINGER_MS = 200
"""How long closing waits to hand a last message (Goodbye) to the kernel."""
_DRAIN_BATCH = 256
"""Messages read before other callbacks of the loop get their turn."""


class Net:
    """The process's ZeroMQ context: one I/O thread, asleep while nothing moves."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._bound: dict[Path, int] = {}
        """Socket file -> its inode."""

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket with the bounds that all links share."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        socket.setsockopt(zmq.RCVHWM, SEND_QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        return socket

    def bind(self, socket: zmq.Socket[bytes], address: str) -> str:
        """Listen; returns the address as bound. The file of an ``ipc://`` one is private."""
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise LinkError(f"cannot listen at {address}: {error}") from None
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        if address.startswith(_IPC):
            path = Path(address.removeprefix(_IPC))
            path.chmod(0o600)
            self._bound[path] = path.stat().st_ino
        return bound.rstrip(b"\0").decode()

    def unbind(self, address: str) -> None:
        """Remove the file that ZeroMQ leaves behind, unless another process has bound it since."""
        path = Path(address.removeprefix(_IPC))
        inode = self._bound.pop(path, None)
        with contextlib.suppress(FileNotFoundError):
            if inode is not None and path.stat().st_ino == inode:
                path.unlink()

    def close(self) -> None:
        """Close what is still open and wait, at most the linger time, for unsent messages."""
        for path in tuple(self._bound):
            self.unbind(f"{_IPC}{path}")
        self._context.destroy(linger=_LINGER_MS)


class _Socket:
    """A socket read from the event loop: calls ``on_frames`` for each message, in order."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], bool]) -> None:
        """``on_frames`` returns False to stop reading until ``resume``."""
        self.raw = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = _int_option(socket, zmq.FD)
        self._reading = False
        self._scheduled = False
        self.closed = False
        self.resume()

    def resume(self) -> None:
        if not self._reading and not self.closed:
            self._reading = True
            self._loop.add_reader(self._fd, self._drain)
            self.look()

    def readable(self) -> bool:
        return bool(_int_option(self.raw, zmq.EVENTS) & zmq.POLLIN)

    def look(self) -> None:
        """Read soon if something is there; call it after each use of the socket."""
        if self._reading and not self._scheduled and self.readable():
            self._scheduled = True
            self._loop.call_soon(self._drain_scheduled)

    def _drain_scheduled(self) -> None:
        self._scheduled = False
        self._drain()

    def _drain(self) -> None:
        for _ in range(_DRAIN_BATCH):
            if not self._reading:
                return
            try:
                frames = self.raw.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not self._on_frames(frames):
                # The descriptor would stay readable: watching it on would spin.
                self._reading = False
                self._loop.remove_reader(self._fd)
                return
        self.look()

    def close(self) -> None:
        if self.closed:
            return
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)
        self.closed = True
        self.raw.close()


class _Monitor:
    """Calls ``on_event`` for connections made and lost of one socket."""

    _EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

    def __init__(self, socket: zmq.Socket[bytes], on_event: Callable[[bool], None]) -> None:
        self._watched = socket
        self._on_event = on_event
        self._socket = _Socket(socket.get_monitor_socket(self._EVENTS), self._on_frames)

    def _on_frames(self, frames: list[bytes]) -> bool:
        event = parse_monitor_message(frames)["event"]
        self._on_event(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        return True

    def close(self) -> None:
        if not self._watched.closed:
            self._watched.disable_monitor()
        self._socket.close()


def _int_option(socket: zmq.Socket[bytes], option: int) -> int:
    value = socket.getsockopt(option)
    assert isinstance(value, int)
    return value


def _connect(socket: zmq.Socket[bytes], address: str) -> None:
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise LinkError(f"cannot connect to {address}: {error}") from None


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
    ) -> None:
        """Bind; raises ``LinkError``. ``receives`` is the union ``In`` as a value.

        ``on_lost(peer)`` is called, from within ``recv``, once for each peer that has sent
        something and whose connection is then gone: after its last message was received, normally
        some 20 ms after the close.
        """
        socket = net.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.address = net.bind(socket, address)
        """As bound: a ``tcp://...:0`` shows its port."""
        self.counters = Counters()
        self._codec: Codec[In, Out] = Codec(receives, address, self.counters)
        self._inbox: Inbox[tuple[bytes, In | None]] = Inbox(receive_queue, self._resume)
        self._peers: set[bytes] = set()
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._probes: set[asyncio.TimerHandle] = set()
        self._net = net
        self._socket = _Socket(socket, self._on_frames)
        self._monitor = _Monitor(socket, self._on_connection)

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

    def _on_frames(self, frames: list[bytes]) -> bool:
        peer, body = frames[0], frames[-1]
        self._peers.add(peer)
        message = self._codec.decode(body)
        return True if message is None else self._inbox.put((peer, message))

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
        self._net.unbind(self.address)
        self._monitor.close()
        self._socket.close()
        self._inbox.close()


class ClientLink(Generic[In, Out]):
    """DEALER end: one server, connected in the background for as long as the link is open."""

    def __init__(
        self,
        net: Net,
        address: str,
        *,
        receives: Any,
        receive_queue: int = 4096,
        on_up: Callable[[], None] | None = None,
        on_down: Callable[[], None] | None = None,
    ) -> None:
        """Start to connect; raises ``LinkError`` for a malformed address only.

        ``on_up`` and ``on_down`` are called when the connection is made and lost, each time; the
        server knows a new connection as a new peer.
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
        self._socket = _Socket(socket, self._on_frames)
        self._monitor = _Monitor(socket, self._on_connection)
        try:
            _connect(socket, address)
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

    def _on_frames(self, frames: list[bytes]) -> bool:
        body = frames[-1]
        if not body:
            return True  # the server only asked whether we live
        message = self._codec.decode(body)
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
        self._monitor.close()
        self._socket.close()
        self._inbox.close()


class Publisher(Generic[Out]):
    """PUB end. A subscriber that is slow or absent misses messages; a snapshot repairs that."""

    def __init__(self, net: Net, address: str) -> None:
        self._raw = net.socket(zmq.PUB)
        self._net = net
        self.address = net.bind(self._raw, address)
        self.counters = Counters()
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, message: Out) -> None:
        self._raw.send(self._encode(message), zmq.NOBLOCK)
        self.counters.sent += 1

    def close(self) -> None:
        self._net.unbind(self.address)
        self._raw.close()


class Subscriber(Generic[In]):
    """SUB end for snapshots: a newer message replaces one that was not yet received."""

    def __init__(self, net: Net, address: str, *, receives: Any) -> None:
        socket = net.socket(zmq.SUB)
        socket.setsockopt(zmq.CONFLATE, 1)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        _connect(socket, address)
        self.address = address
        self.counters = Counters()
        self._codec: Codec[In, None] = Codec(receives, address, self.counters)
        self._newest: In | None = None
        self._arrived = asyncio.Event()
        self._socket = _Socket(socket, self._on_frames)

    async def recv(self) -> In:
        """The newest message that has not been received yet. Raises ``LinkClosed``."""
        while self._newest is None:
            if self._socket.closed:
                raise LinkClosed(f"the subscription to {self.address} is closed")
            self._arrived.clear()
            await self._arrived.wait()
        newest, self._newest = self._newest, None
        return newest

    def _on_frames(self, frames: list[bytes]) -> bool:
        message = self._codec.decode(frames[-1])
        if message is not None:
            self._newest = message
            self._arrived.set()
        return True

    def close(self) -> None:
        self._socket.close()
        self._arrived.set()


async def request(
    net: Net, address: str, message: Any, *, receives: Any, want: type[T], timeout_s: float
) -> T:
    """Ask a server once and return the first answer of type ``want``.

    Raises ``TimeoutError`` when nobody answers within ``timeout_s``.
    """
    link: ClientLink[Any, Any] = ClientLink(net, address, receives=receives)
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
