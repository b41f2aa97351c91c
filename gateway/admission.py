"""How many sequences may be in the mesh at once, and when a refused client should come back.

Pure: time is an argument (seconds of any monotonic clock).
"""

from __future__ import annotations

from gateway.errors import InvalidValue, Overloaded

_WINDOW_S = 10.0
_MAX_RETRY_S = 60.0


class Admission:
    """A bounded count of sequences admitted and not finished.

    The wait told to a refused client is the time in which, at the rate of the last
    seconds, enough sequences finish to make room for it.
    """

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self.in_flight = 0
        self._rate = 0.0
        self._finished = 0
        self._window_start = now

    def admit(self, sequences: int, now: float) -> None:
        """Take room for ``sequences``; the caller gives each back with ``finish``.

        Raises ``Overloaded`` when there is no room now, ``InvalidValue`` when there never can be.
        """
        if sequences > self.limit:
            raise InvalidValue(
                f"This request asks for {sequences} sequences at once; "
                f"at most {self.limit} are accepted."
            )
        excess = self.in_flight + sequences - self.limit
        if excess > 0:
            raise Overloaded(
                f"The queue is full: {self.in_flight} of {self.limit} sequences in flight.",
                retry_after_s=self._retry_after_s(excess, now),
            )
        self.in_flight += sequences

    def finish(self, sequences: int, now: float) -> None:
        """Give back the room of ``sequences``."""
        self.in_flight -= sequences
        assert self.in_flight >= 0, "a sequence was finished twice"
        self._roll(now)
        self._finished += sequences

    def _roll(self, now: float) -> None:
        elapsed = now - self._window_start
        if elapsed >= _WINDOW_S:
            self._rate = self._finished / elapsed
            self._finished = 0
            self._window_start = now

    def _retry_after_s(self, excess: int, now: float) -> float:
        self._roll(now)
        elapsed = max(now - self._window_start, 1.0)
        rate = max(self._rate, self._finished / elapsed)  # sequences per second
        return min(excess / rate, _MAX_RETRY_S) if rate > 0 else 1.0
