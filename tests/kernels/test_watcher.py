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


def test_calls_come_one_after_another_on_its_thread_until_it_is_closed() -> None:
    watcher = Watcher("test")
    made: list[str] = []
    for count in range(1, 21):
        watcher.call(lambda: made.append(threading.current_thread().name))
        _until(lambda count=count: len(made) == count)  # type: ignore[misc]
    assert made == ["test"] * 20
    watcher.close()
    watcher.call(lambda: made.append("late"))
    assert len(made) == 20


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
