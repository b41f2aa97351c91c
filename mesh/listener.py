"""The socket at which a gateway takes its clients' connections.

Whoever binds it may hold it for longer than a gateway's process lives: the launcher does, so that
connections wait, rather than are refused, while a gateway is started again.
"""

from __future__ import annotations

import socket

_DEAD_PEER = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),  # seconds; so are the next
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000),  # milliseconds unacknowledged
)
"""Options that accepted connections inherit (tcp(7))."""


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to ``host:port`` that does not listen yet. Raises ``OSError``.

    Its connections end when their other end is gone without a word: about two minutes after
    the last sign of life, also while the client only waits for its answer.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for level, option, value in _DEAD_PEER:
            bound.setsockopt(level, option, value)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def authority(host: str, port: int) -> str:
    """``host:port`` as a URL writes it: IPv6 addresses stand in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
