"""Opens a lane's connection in the background.

A network may take longer than a router whose tokens wait can. So a dial goes on by itself, and who
asked for it comes back for what became of it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from time import monotonic
from typing import Final

from ep_kernels.plane import LaneRefused, PlaneError
from ep_kernels.shm.handshake import Offer, Reply, decode, encode
from ep_kernels.tcp import handshake
from ep_kernels.tcp.handshake import LaneAddress, Session

DIAL_S: Final = 5.0
"""For the connection and the handshake together; looking a name up is the system's own affair."""


class Dial:
    """One attempt to reach ``offer.expert`` at ``address``, begun at once on a thread of its own.

    ``wait`` for it, then take the ``result`` once: it is the caller's to close.
    """

    limit_s: float = DIAL_S

    def __init__(self, address: LaneAddress, offer: Offer, silence_s: float) -> None:
        self.address = address
        self.offer = offer
        self._silence_s = silence_s
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._cancelled = False
        self._error: PlaneError | None = None
        self._thread = threading.Thread(target=self._run, name=f"dial-{offer.expert}", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether the attempt has ended, within that time."""
        return self._done.wait(timeout_s)

    def result(self) -> socket.socket:
        """The connection, which does not block. Raises ``LaneRefused``, ``PlaneError``."""
        with self._lock:
            connection, self._connection = self._connection, None
        if self._error is not None:
            raise self._error
        assert connection is not None, "a dial ends once, with a connection or an error"
        return connection

    def cancel(self) -> None:
        """End the attempt soon, and whatever it has opened. Never blocks."""
        with self._lock:
            self._cancelled = True
            if self._connection is None:
                return
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            if self._done.is_set():
                self._connection.close()
                self._connection = None

    def join(self) -> None:
        """After ``cancel``: wait a moment for the thread. Only looking a name up takes longer."""
        self._thread.join(1.0)

    def _run(self) -> None:
        peer = self.offer.expert
        deadline = monotonic() + self.limit_s
        try:
            connection = self._connect(deadline)
            self._greet(connection, deadline)
            connection.setblocking(False)
        except LaneRefused as error:
            self._error = error
        except PlaneError as error:
            self._error = PlaneError(f"{peer} at {self.address}: {error}")
        except TimeoutError:
            self._error = PlaneError(
                f"{peer} at {self.address} did not answer in {self.limit_s:g} s"
            )
        except EOFError:
            self._error = PlaneError(f"{peer} at {self.address} closed the connection")
        except OSError as error:
            self._error = PlaneError(f"cannot reach {peer} at {self.address}: {error}")
        finally:
            with self._lock:
                if self._connection is not None and (self._error or self._cancelled):
                    self._connection.close()
                    self._connection = None
                    self._error = self._error or PlaneError("the attempt was cancelled")
                self._done.set()

    def _connect(self, deadline: float) -> socket.socket:
        """To the first of the host's addresses that answers. Raises ``OSError``."""
        host, port = self.address.host, self.address.port
        error: OSError | None = None
        for family, kind, protocol, _, at in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        ):
            connection = socket.socket(family, kind, protocol)
            with self._lock:
                if self._cancelled:
                    connection.close()
                    raise PlaneError("the attempt was cancelled")
                self._connection = connection
            try:
                connection.settimeout(max(0.0, deadline - monotonic()) or 1e-3)
                connection.connect(at)
            except OSError as failed:
                error = failed
                with self._lock:
                    connection.close()
                    self._connection = None
            else:
                prepare(connection, self._silence_s)
                return connection
        raise error or OSError("the name has no address")

    def _greet(self, connection: socket.socket, deadline: float) -> Session:
        """Raises ``LaneRefused`` with the expert worker's reason, ``PlaneError``, ``OSError``."""

        def receive(count: int) -> bytes:
            return handshake.receive_exactly(connection, count, deadline)

        key = self.address.key
        challenged = handshake.read_challenge(receive(handshake.CHALLENGE_BYTES))
        own = handshake.new_nonce()
        body = encode(self.offer)
        connection.sendall(handshake.pack_offer(body, key, challenged, own))
        head = receive(handshake.HEAD_BYTES)
        body = receive(handshake.body_bytes(head))
        handshake.check_reply(head, body, key, challenged, own)
        reply = decode(body, Reply)
        if reply.refusal:
            raise LaneRefused(self.offer.expert, reply.refusal)
        return Session(key, challenged, own)


def prepare(connection: socket.socket, silence_s: float) -> None:
    """Send small messages at once, and give up what nobody has confirmed for so long."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))
