"""Whose turn it is: a queue that tenants share by the tokens that they are served.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024),
with weights. Each tenant has a clock of the tokens served to it divided by its weight; the tenant
that is furthest behind is next. Tokens are charged when they are spent, prompt and output alike,
so that nobody has to guess how long an answer will be. Of two tenants that always have something
waiting, neither gets ahead by more than what it has in service at once.

Pure.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class _Line(Generic[T]):
    """One tenant: its clock, and what it has waiting as a heap of (priority, arrival, item)."""

    __slots__ = ("clock", "waiting", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.clock = 0.0
        self.waiting: list[tuple[int, int, T]] = []


class FairQueue(Generic[T]):
    """Items of tenants, each item in it once.

    Within a tenant the lower ``priority`` comes first, then the earlier arrival. A tenant that had
    nothing waiting begins at the clock of the waiting tenant furthest behind: what it left unused
    before is not saved up.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        self._items: dict[T, str] = {}
        self._arrivals = itertools.count()
        self._last = 0.0  # clock of the tenant that was last served

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def push(self, item: T, tenant: str, *, weight: float = 1.0, priority: int = 0) -> None:
        """Let ``item`` wait for its turn. ``weight``: the tenant's share, more than 0."""
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line(weight)
        line.weight = weight
        if not line.waiting:
            behind = [other.clock for other in self._lines.values() if other.waiting]
            line.clock = max(line.clock, min(behind, default=self._last))
        heapq.heappush(line.waiting, (priority, next(self._arrivals), item))
        self._items[item] = tenant

    def pop(self) -> T | None:
        """Take the item whose turn it is; None when nothing waits."""
        waiting = [line for line in self._lines.values() if line.waiting]
        if not waiting:
            return None
        line = min(waiting, key=lambda line: (line.clock, line.waiting[0][1]))
        self._last = line.clock
        _, _, item = heapq.heappop(line.waiting)
        del self._items[item]
        return item

    def remove(self, item: T) -> None:
        """Forget ``item`` if it waits here."""
        tenant = self._items.pop(item, None)
        if tenant is not None:
            line = self._lines[tenant]
            line.waiting = [entry for entry in line.waiting if entry[2] is not item]
            heapq.heapify(line.waiting)

    def charge(self, tenant: str, tokens: int) -> None:
        """``tokens`` of prompt or output were spent on ``tenant``."""
        line = self._lines.get(tenant)
        if line is not None:
            line.clock += tokens / line.weight
