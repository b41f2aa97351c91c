"""The thread that sleeps until a socket of the plane has news: a new peer, or a dead one."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Watcher:
    """Calls back, on its own thread, whenever a watched socket is readable or closed.

    Watched sockets are non-blocking, and a callback may come without cause (its fd may have been
    closed and taken again in between).
    """

    def __init__(self, name: str) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, connection: socket.socket, callback: Callable[[], None]) -> None:
        """Start watching, or change the callback. Any thread."""
        fd = connection.fileno()
        known = fd in self._callbacks
        self._callbacks[fd] = callback
        if not known:
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLRDHUP)

    def forget(self, connection: socket.socket) -> None:
        """Stop watching; call it before closing the socket. Any thread."""
        fd = connection.fileno()
        if self._callbacks.pop(fd, None) is not None:
            with contextlib.suppress(OSError, ValueError):  # closed already
                self._epoll.unregister(fd)

    def close(self) -> None:
        """Stop and join the thread; no callback may call it."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self._epoll.close()
        os.close(self._stop)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                if fd == self._stop:
                    return
                self._call(fd)

    def _call(self, fd: int) -> None:
        # Held no longer than the call: a callback keeps its lane's memory and descriptors alive.
        callback = self._callbacks.get(fd)
        if callback is None:
            return
        try:
            callback()
        except Exception:  # noqa: BLE001 - the edge of an actor that must outlive any one peer
            _log.exception("lane.watch_failed")
            if self._callbacks.pop(fd, None) is not None:
                with contextlib.suppress(OSError):
                    self._epoll.unregister(fd)


def is_closed(connection: socket.socket) -> bool:
    """Whether the peer of a silent connection is gone (or broke the silence, which is as bad)."""
    try:
        connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
