"""A network in memory, with a clock of its own: messages are lost, late, repeated and out of order,
members are cut off. Everything follows from one seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

Event = Callable[[], None]

DROPPED, REPEATED = 0.1, 0.1
"""Shares of messages while the weather is bad."""
LATE_S = 1.5
"""The longest that one is under way then."""
PROMPT_S = 0.002


class Network:
    """``send`` delivers to ``name`` unless that is cut off; ``run`` lets time pass."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.bad_weather = True
        self.cut_off: set[str] = set()
        self._events: list[tuple[float, int, Event]] = []
        self._order = itertools.count()
        self._latest: dict[object, float] = {}

    def at(self, when: float, event: Event) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._order), event))

    def send(self, name: str, deliver: Event, *, in_order: object = None) -> None:
        """Between ``name`` and the planner. Messages with the same ``in_order`` do not overtake one
        another; they may be lost all the same.
        """
        draw = self.draw
        copies = 1
        if self.bad_weather:
            copies = 0 if draw.random() < DROPPED else 1 + (draw.random() < REPEATED)
        for _ in range(copies):
            slow = self.bad_weather and draw.random() < 0.3
            arrival = self.now + (draw.uniform(0, LATE_S) if slow else PROMPT_S)
            if in_order is not None:
                arrival = self._latest[in_order] = max(arrival, self._latest.get(in_order, 0.0))
            self.at(arrival, lambda: None if name in self.cut_off else deliver())

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until
