"""Whether the compute thread gets on."""

from __future__ import annotations

from collections.abc import Hashable


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
