from __future__ import annotations

import socket
import threading
import time
import weakref
from collections.abc import Callable

from ep_kernels.shm.watcher import Watcher, is_closed


class Lane:
    """What a callback keeps alive."""

    def __init__(self, connection: socket.socket, watcher: Watcher) -> None:
        self.connection = connection
        self.watcher = watcher
        self.gone = threading.Event()

    def check(self) -> None:
        if is_closed(self.connection):
            self.watcher.forget(self.connection)
            self.connection.close()
            self.gone.set()


def test_a_lane_whose_peer_died_is_kept_alive_no_longer() -> None:
    watcher = Watcher("test")
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    lane = Lane(ours, watcher)
    watcher.watch(ours, lane.check)
    gone, left = lane.gone, weakref.ref(lane)
    del lane, ours
    theirs.close()
    assert gone.wait(10.0)
    _until(lambda: left() is None)
    watcher.close()


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
