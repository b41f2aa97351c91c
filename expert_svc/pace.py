"""How fast experts are loaded: a token bucket as deep as one expert. Pure."""

from __future__ import annotations


class Pace:
    """Spreads loads so that, from the first on, no more than ``bytes_per_s`` are loaded a second;
    0 for no limit. ``now`` is monotonic seconds.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._next = 0.0
        """When the next load may begin."""

    def delay(self, now: float) -> float:
        """Seconds to wait before the next load begins."""
        return max(0.0, self._next - now)

    def loaded(self, size: int, now: float) -> None:
        """``size`` bytes were loaded, beginning at ``now``."""
        if self._bytes_per_s:
            self._next = max(self._next, now) + size / self._bytes_per_s
