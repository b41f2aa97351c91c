"""Those who share the gateway, one per API key, and what each of them may use. Pure.

Time is an argument (seconds of any monotonic clock).
"""

from __future__ import annotations

import msgspec

from gateway.errors import InvalidValue, RateLimited

ANONYMOUS = "anonymous"
"""The tenant of all clients without a key."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a key may use; 0: no limit of its own."""

    max_concurrent: int = 0
    """Sequences in flight at once (``n`` choices are ``n`` sequences)."""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Of prompt and output together."""
    weight: float = 1.0
    """Share of the mesh where tenants compete for it."""


class _Bucket:
    """An allowance that refills evenly, up to a minute's worth.

    It may be overdrawn, since what a request costs is known only as it runs: the next ones then
    wait until the debt is paid, so that the rate holds in the long run.
    """

    __slots__ = ("_balance", "_per_minute", "_since")

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._balance = float(per_minute)
        self._since: float | None = None

    def wait_s(self, now: float, least: float = 0.0) -> float:
        """Seconds until something may be taken; 0: now. More than ``least`` must be there."""
        if self._since is not None:
            earned = (now - self._since) * self._per_minute / 60
            self._balance = min(self._balance + earned, self._per_minute)
        self._since = now
        if self._balance > least:
            return 0.0
        # Less than one unit of debt must not round to "now".
        return (1 - self._balance) * 60 / self._per_minute or _SOON_S

    def take(self, amount: int) -> None:
        self._balance -= amount


_SOON_S = 1e-3


class Tenant:
    """One key's use of this gateway. ``in_flight``: its sequences admitted and not finished."""

    __slots__ = ("_requests", "_tokens", "in_flight", "limits", "name")

    def __init__(self, name: str, limits: Limits = Limits()) -> None:  # noqa: B008 (frozen)
        self.name = name
        self.limits = limits
        self.in_flight = 0
        self._requests = _bucket(limits.requests_per_minute)
        self._tokens = _bucket(limits.tokens_per_minute)

    def check(self, sequences: int, now: float) -> None:
        """Raise ``RateLimited`` while the key's limits leave no room for ``sequences`` more, and
        ``InvalidValue`` when they never will.
        """
        most = self.limits.max_concurrent
        if most and sequences > most:
            raise InvalidValue(
                f"This request asks for {sequences} sequences at once; "
                f"this API key may have {most}."
            )
        if most and self.in_flight + sequences > most:
            raise RateLimited(
                f"This API key may have {most} sequences at once and has {self.in_flight}.",
                retry_after_s=1.0,
            )
        # What a request costs in tokens is known only as it runs; in requests it is one, to within
        # what rounding loses.
        for bucket, limit, what, least in (
            (self._requests, self.limits.requests_per_minute, "requests", 1 - 1e-6),
            (self._tokens, self.limits.tokens_per_minute, "tokens", 0.0),
        ):
            if bucket is not None and (wait_s := bucket.wait_s(now, least)):
                raise RateLimited(
                    f"This API key has used its {limit} {what} a minute.", retry_after_s=wait_s
                )

    def begin(self, sequences: int) -> None:
        """A request of ``sequences`` that ``check`` let pass begins."""
        self.in_flight += sequences
        if self._requests is not None:
            self._requests.take(1)

    def finish(self, sequences: int) -> None:
        self.in_flight -= sequences
        assert self.in_flight >= 0, "a sequence was finished twice"

    def spend(self, tokens: int) -> None:
        """``tokens`` of prompt or output were used."""
        if self._tokens is not None:
            self._tokens.take(tokens)


def _bucket(per_minute: int) -> _Bucket | None:
    return _Bucket(per_minute) if per_minute else None
