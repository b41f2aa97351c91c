"""How many sequences may be in the gateway at once, whose, and when the refused should come back.

Pure: time is an argument (seconds of any monotonic clock).
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.errors import InvalidValue, Overloaded
from gateway.tenants import Tenant

_WINDOW_S = 10.0
_MAX_RETRY_S = 60.0


class Admission:
    """A bounded count of sequences admitted and not finished.

    ``tenants``: all there are. Each may use what the others leave of ``limit``, and may always have
    its share of it by weight (at least one): so nobody is kept out by the others' requests, and
    all together have at most ``2 * limit`` and one each.

    The wait told to a refused client is the time in which, at the rate of the last
    seconds, enough sequences finish to make room for it.
    """

    def __init__(self, limit: int, tenants: Iterable[Tenant], now: float) -> None:
        self.limit = limit
        self.in_flight = 0
        self._weights = sum(tenant.limits.weight for tenant in tenants)
        self._rate = 0.0
        self._finished = 0
        self._window_start = now

    def admit(self, tenant: Tenant, sequences: int, now: float) -> None:
        """Take room for ``sequences``; the caller gives each back with ``finish``.

        Raises ``Overloaded`` when there is no room now, ``InvalidValue`` when there never can be.
        """
        if sequences > self.limit:
            raise InvalidValue(
                f"This request asks for {sequences} sequences at once; "
                f"at most {self.limit} are accepted."
            )
        tenant.check(sequences, now)
        excess = self.in_flight + sequences - self.limit
        if excess > 0 and tenant.in_flight + sequences > self._share(tenant):
            raise Overloaded(
                f"The queue is full: {self.in_flight} of {self.limit} sequences in flight "
                "(gateway.max_queue).",
                retry_after_s=self._retry_after_s(excess, now),
            )
        tenant.begin(sequences)
        self.in_flight += sequences

    def finish(self, tenant: Tenant, sequences: int, now: float) -> None:
        """Give back the room of ``sequences``."""
        tenant.finish(sequences)
        self.in_flight -= sequences
        self._roll(now)
        self._finished += sequences

    def _share(self, tenant: Tenant) -> int:
        return max(1, int(self.limit * tenant.limits.weight / self._weights))

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
