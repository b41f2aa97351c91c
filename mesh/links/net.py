"""The process's ZeroMQ context, and its sockets as the event loop reads and guards them.

Sockets are read in the event loop's own poll, without ``zmq.asyncio``'s future per message.
ZeroMQ's file descriptor is edge-triggered: after every call that may have taken its signal we
must look at ``EVENTS`` ourselves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from mesh.addresses import IPC, NEEDS_KEYS, TCP, leaves_host, ports_of
from mesh.curve import CurveError, Identity, Keyring, answer_zap, open_keyring
from mesh.inbox import Counters, LinkError
from mesh.messages import Role
from mesh.settings import SecuritySettings

SEND_QUEUE = 1024
"""Messages per connection that may be unsent."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
LINGER_MS = 200
"""How long closing waits to hand a last message (Goodbye) to the kernel."""
_HANDSHAKE_MS = 5_000
"""A peer that connects and then says nothing is let go of after this."""
_REDIAL_S = 1.0
_BEAT_MS = 500
_SILENT_MS = 3_000
"""Over TCP a client asks its server for a sign of life, and connects anew when none comes. Without
that TCP would try the old connection ever more rarely, and a link that was cut for a minute would
stay useless for another one."""
_CONNECT_MS = 1_000
"""How long one attempt may take."""
_DRAIN_BATCH = 256
"""Messages read before other callbacks of the loop get their turn."""
_ZAP = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks who may connect (its RFC 27)."""


def new_key_pair() -> tuple[str, str]:
    """A fresh CURVE key pair, (public, secret) in ZeroMQ's text form."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


class Net:
    """The process's ZeroMQ context: one I/O thread, asleep while nothing moves.

    ``security``, with the process's ``id`` and ``role``, says which keys TCP sockets use; they are
    read when the first of these is opened. None: TCP stays on this machine, without keys.
    """

    def __init__(
        self,
        security: SecuritySettings | None = None,
        id: str = "",  # noqa: A002
        role: Role = "admin",
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._bound: dict[Path, int] = {}
        """Socket file -> its inode."""
        self._security = security or SecuritySettings()
        self._id = id
        self._role: Role = role
        self._keyring: Keyring | None = None
        self._guarded: set[str] = set()
        """Addresses at which we listen with CURVE."""
        self._guard: _Guard | None = None
        self.open_sockets: set[EventSocket] = set()
        """Those that the event loop watches; they enter and leave by themselves."""

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket with the bounds that all links share."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        socket.setsockopt(zmq.RCVHWM, SEND_QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        return socket

    def bind(self, socket: zmq.Socket[bytes], address: str) -> str:
        """Listen; returns the address as bound. The file of an ``ipc://`` one is private, a
        ``tcp://`` one takes listed keys only, on the first free port of a range (``LOW-HIGH``).
        Raises ``LinkError`` and closes the socket.
        """
        try:
            keyring = self.keyring(address)
            if keyring is not None:
                if self._guard is None:
                    self._guard = _Guard(self, self.socket(zmq.ROUTER), keyring)
                socket.setsockopt(zmq.CURVE_SERVER, 1)
                socket.setsockopt(zmq.CURVE_SECRETKEY, keyring.own.secret.encode())
                socket.setsockopt(zmq.ZAP_DOMAIN, b"mesh")
                # Should the guard ever be missing, nobody is let in rather than everybody.
                socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            _bind(socket, address)
        except (zmq.ZMQError, LinkError) as error:
            socket.close(linger=0)
            self._release_guard()
            raise LinkError(f"cannot listen at {address}: {error}") from None
        last = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(last, bytes)
        bound = last.rstrip(b"\0").decode()
        if address.startswith(IPC):
            path = Path(address.removeprefix(IPC))
            path.chmod(0o600)
            self._bound[path] = path.stat().st_ino
        elif keyring is not None:
            self._guarded.add(bound)
        return bound

    def connect(self, socket: zmq.Socket[bytes], address: str, server: str) -> str:
        """Connect to ``server``, a process's id or a role that one process only has. Returns the
        key that it must prove to hold; empty where none is needed. Raises ``LinkError``.
        """
        try:
            key = self.server_key(address, server)
            keyring = self.keyring(address)
            if keyring is not None:
                socket.setsockopt(zmq.CURVE_SERVERKEY, key.encode())
                socket.setsockopt(zmq.CURVE_PUBLICKEY, keyring.own.public.encode())
                socket.setsockopt(zmq.CURVE_SECRETKEY, keyring.own.secret.encode())
            if address.startswith(TCP):
                socket.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MS)
                socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
                socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
            socket.connect(address)
        except (zmq.ZMQError, LinkError) as error:
            raise LinkError(f"cannot connect to {address}: {error}") from None
        return key

    def server_key(self, address: str, server: str) -> str:
        """The key by which ``server`` is known now; empty where none is needed. Raises
        ``LinkError``.
        """
        keyring = self.keyring(address)
        return "" if keyring is None else keyring.server_key(server)

    def keyring(self, address: str) -> Keyring | None:
        """The keys that a socket at ``address`` needs. Raises ``LinkError`` where there are none
        and must be.
        """
        if not address.startswith(TCP):
            return None
        if self._keyring is None:
            keyring = open_keyring(self._security, self._id, self._role)
            if keyring is not None:
                own = keyring.own
                if zmq.curve_public(own.secret.encode()) != own.public.encode():
                    raise CurveError(f"the two keys of {own.name} do not belong together")
            self._keyring = keyring
        if self._keyring is None and leaves_host(address) and not self._security.allow_insecure:
            raise CurveError(f"expected a loopback host, or {NEEDS_KEYS}")
        return self._keyring

    def unbind(self, address: str) -> None:
        """Forget an address at which nobody listens any more. The file that ZeroMQ leaves behind
        is removed, unless another process has bound it since.
        """
        self._guarded.discard(address)
        self._release_guard()
        path = Path(address.removeprefix(IPC))
        inode = self._bound.pop(path, None)
        with contextlib.suppress(FileNotFoundError):
            if inode is not None and path.stat().st_ino == inode:
                path.unlink()

    def _release_guard(self) -> None:
        if not self._guarded and self._guard is not None:
            self._guard.close()
            self._guard = None

    def close(self) -> None:
        """Close what is still open and wait, at most the linger time, for unsent messages."""
        for path in tuple(self._bound):
            self.unbind(f"{IPC}{path}")
        for socket in tuple(self.open_sockets):
            socket.close()  # the loop must not watch descriptors that are gone
        self._context.destroy(linger=LINGER_MS)


class EventSocket:
    """A socket read from the event loop: calls ``on_frames`` for each message, in order."""

    def __init__(
        self,
        net: Net,
        socket: zmq.Socket[bytes],
        on_frames: Callable[[Sequence[zmq.Frame]], bool],
    ) -> None:
        """``on_frames`` returns False to stop reading until ``resume``."""
        self.raw = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = _int_option(socket, zmq.FD)
        self._reading = False
        self._scheduled = False
        self.closed = False
        self._open_sockets = net.open_sockets
        self._open_sockets.add(self)
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
                frames = self.raw.recv_multipart(zmq.NOBLOCK, copy=False)
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
        if self._reading and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._reading = False
        self.closed = True
        self._open_sockets.discard(self)
        self.raw.close()


class Dialer:
    """Connects a socket, and again where ZeroMQ gives up for good (a handshake that failed on
    account of keys: ours may be listed later) or would go on with a key that is no longer the
    server's.
    """

    def __init__(self, net: Net, socket: zmq.Socket[bytes], address: str, server: str) -> None:
        self._net = net
        self._socket = socket
        self._address = address
        self._server = server
        self._key = ""
        self._again: asyncio.TimerHandle | None = None

    def dial(self) -> None:
        """Start to connect, once the socket's monitor listens; raises ``LinkError``."""
        self._key = self._net.connect(self._socket, self._address, self._server)

    def refused(self, *, for_good: bool) -> None:
        """A handshake has failed; ``for_good``: ZeroMQ itself does not try again."""
        if self._again is None and (for_good or self._outdated()):
            loop = asyncio.get_running_loop()
            self._again = loop.call_later(_REDIAL_S, self._dial_again)

    def _dial_again(self) -> None:
        self._again = None
        if self._socket.closed:
            return
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disconnect(self._address)
        try:
            self.dial()
        except LinkError as error:
            structlog.get_logger("mesh.links").warning("link.cannot_redial", error=str(error))
            self.refused(for_good=True)

    def _outdated(self) -> bool:
        try:
            return self._net.server_key(self._address, self._server) != self._key
        except LinkError:
            return False

    def close(self) -> None:
        """Do not connect again: we are connected, or done."""
        if self._again is not None:
            self._again.cancel()
            self._again = None


class Monitor:
    """Calls ``on_event`` for connections made and lost of one socket, and counts and logs the
    handshakes that fail: on our side or the peer's a key or its owner is not what it should be.
    """

    _REFUSALS: Mapping[int, str] = MappingProxyType(
        {
            zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the key is not listed",
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "no CURVE, a wrong key, or no ZeroMQ",
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the peer ended it",
        }
    )
    _EVENTS = (
        zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    )

    def __init__(
        self,
        net: Net,
        socket: zmq.Socket[bytes],
        counters: Counters,
        address: str,
        on_event: Callable[[bool], None] | None = None,
        dialer: Dialer | None = None,
    ) -> None:
        self._watched = socket
        self._counters = counters
        self._on_event = on_event
        self._dialer = dialer
        self._log = structlog.get_logger("mesh.links").bind(address=address)
        self._socket = EventSocket(net, socket.get_monitor_socket(self._EVENTS), self._on_frames)

    def _on_frames(self, frames: Sequence[zmq.Frame]) -> bool:
        event = parse_monitor_message([frame.bytes for frame in frames])["event"]
        if event in self._REFUSALS:
            self._counters.handshakes_failed += 1
            count = self._counters.handshakes_failed
            if count & (count - 1) == 0:
                self._log.warning(
                    "link.handshake_failed", reason=self._REFUSALS[event], count=count
                )
            if self._dialer is not None:
                for_good = event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                self._dialer.refused(for_good=for_good)
            return True
        up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if up and self._dialer is not None:
            self._dialer.close()
        if self._on_event is not None:
            self._on_event(up)
        return True

    def close(self) -> None:
        if not self._watched.closed:
            self._watched.disable_monitor()
        self._socket.close()


class _Guard:
    """Answers ZeroMQ's questions about who may connect, for all sockets of the context."""

    def __init__(self, net: Net, socket: zmq.Socket[bytes], keyring: Keyring) -> None:
        self._keyring = keyring
        self._refused = 0
        self._log = structlog.get_logger("mesh.links")
        socket.bind(_ZAP)
        self._socket = EventSocket(net, socket, self._on_frames)

    def _on_frames(self, frames: Sequence[zmq.Frame]) -> bool:
        asker, empty, *request = (frame.bytes for frame in frames)
        verdict = answer_zap(request, self._keyring)
        if verdict.reason:
            self._refused += 1
            if self._refused & (self._refused - 1) == 0:
                self._log.warning(
                    "curve.refused",
                    peer=verdict.address,
                    reason=verdict.reason,
                    count=self._refused,
                )
        with contextlib.suppress(zmq.Again):
            self._socket.raw.send_multipart((asker, empty, *verdict.frames), zmq.NOBLOCK)
        return True

    def close(self) -> None:
        self._socket.close()


def _bind(socket: zmq.Socket[bytes], address: str) -> None:
    host, _, ports = address.rpartition(":")
    if not (address.startswith(TCP) and "-" in ports):
        socket.bind(address)
        return
    for port in ports_of(ports):
        try:
            socket.bind(f"{host}:{port}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
        else:
            return
    raise LinkError("none of these ports is free")


def identity_of(frame: zmq.Frame, keyring: Keyring) -> Identity | None:
    """Who sent a message over CURVE, if its key is still listed."""
    try:
        name = frame.get("User-Id")
    except zmq.ZMQError:
        return None
    return keyring.named(name) if isinstance(name, str) else None


def _int_option(socket: zmq.Socket[bytes], option: int) -> int:
    value = socket.getsockopt(option)
    assert isinstance(value, int)
    return value
