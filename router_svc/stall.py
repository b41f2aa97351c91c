"""Whether the compute thread gets on, and what time it has to judge others by."""

from __future__ import annotations

from collections.abc import Callable, Hashable


class StallWatch:
    """Judges from samples of something that changes with every bit of progress."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: Hashable = None
        self._since = 0.0
        self.stalled = False
        """Nothing has moved for longer than the limit."""

    def look(self, progress: Hashable, now: float) -> None:
        """Take a sample at ``now``, in seconds; None while there is nothing to get on with."""
        if progress is None or progress != self._seen:
            self._seen, self._since = progress, now
        self.stalled = now - self._since > self._limit_s


class AwakeClock:
    """Seconds for time-outs of others' answers. Between two looks no more than ``most_s`` passes:
    who stood still itself (stopped, or with all of its host) finds what others owe a moment after
    it goes on, and may not hold against them the time that nobody had.
    """

    def __init__(self, clock: Callable[[], float], most_s: float) -> None:
        self._clock = clock
        self._most_s = most_s
        self._looked = clock()
        self._now = 0.0

    def __call__(self) -> float:
        looked = self._clock()
        self._now += min(looked - self._looked, self._most_s)
        self._looked = looked
        return self._now
