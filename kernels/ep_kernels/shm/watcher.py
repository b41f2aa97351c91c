"""The thread that sleeps until a socket of the plane has news: a new peer, or a dead one."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

_log = logging.getLogger(__name__)


class Watcher:
    """Calls back, on its own thread, whenever a watched socket is readable or closed.

    Watched sockets are non-blocking, and a callback may come without cause (its fd may have been
    closed and taken again in between). ``every`` adds a call at regular times, ``call`` one more.
    """

    def __init__(self, name: str) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._epoll.register(self._wake, select.EPOLLIN | select.EPOLLET)
        self._call_lock = threading.Lock()
        self._closed = False
        self._calls: deque[Callable[[], None]] = deque()
        self._tick: Callable[[], None] | None = None
        self._period_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, connection: socket.socket, callback: Callable[[], None]) -> None:
        """Start watching, or change the callback. Any thread."""
        fd = connection.fileno()
        known = fd in self._callbacks
        self._callbacks[fd] = callback
        if not known:
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLRDHUP)

    def want_write(self, connection: socket.socket, *, wanted: bool) -> None:
        """Call back also while ``connection`` can be written to, or no longer. Any thread."""
        fd = connection.fileno()
        if fd in self._callbacks:
            events = select.EPOLLIN | select.EPOLLRDHUP | (select.EPOLLOUT if wanted else 0)
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                self._epoll.modify(fd, events)

    def every(self, period_s: float, callback: Callable[[], None]) -> None:
        """Call back every ``period_s`` seconds, after what sockets had to say. Once, any thread."""
        self._period_s, self._tick = period_s, callback
        os.eventfd_write(self._wake, 1)

    def call(self, callback: Callable[[], None]) -> None:
        """Call back once, soon; not after ``close``. Any thread."""
        with self._call_lock:
            if not self._closed:
                self._calls.append(callback)
                os.eventfd_write(self._wake, 1)

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
        with self._call_lock:
            self._closed = True
            self._calls.clear()
        self._tick = None
        self._epoll.close()
        os.close(self._stop)
        os.close(self._wake)

    def _run(self) -> None:
        next_tick = 0.0
        while True:
            tick = self._tick
            timeout_s = None if tick is None else max(0.0, next_tick - monotonic())
            for fd, _ in self._epoll.poll(timeout_s):
                if fd == self._stop:
                    return
                if fd != self._wake:
                    self._call(fd)
            while self._calls:
                self._guard(self._calls.popleft())
            if tick is not None and monotonic() >= next_tick:
                next_tick = monotonic() + self._period_s
                self._guard(tick)

    def _call(self, fd: int) -> None:
        # Held no longer than the call: a callback keeps its lane's memory and descriptors alive.
        callback = self._callbacks.get(fd)
        if callback is None:
            return
        if not self._guard(callback) and self._callbacks.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    @staticmethod
    def _guard(callback: Callable[[], None]) -> bool:
        try:
            callback()
        except Exception:  # noqa: BLE001 - the edge of an actor that must outlive any one peer
            _log.exception("lane.watch_failed")
            return False
        return True


def is_closed(connection: socket.socket) -> bool:
    """Whether the peer of a silent connection is gone (or broke the silence, which is as bad)."""
    try:
        connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
