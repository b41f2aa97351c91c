"""What the next window will bring, and which way of guessing has been right so far."""

from __future__ import annotations

import numpy as np

from planner_svc.policies.problem import Loads

TREND = 0.25
"""Share of the last change that is expected to come again: load walks rather than marches."""
MARGIN = 0.95
"""A guess beats the plain one in a window when its error is below this multiple of that one's."""
STREAK = 2
"""A guess is used once it has beaten the plain one in so many windows running; a single loss ends
that."""
JUMP = 2.0
"""A change this many times the usual one is a new regime: what was learnt no longer counts."""
NOISE = 1.3
"""Windows that differ by no more than this multiple of chance hold the same load."""


class Forecast:
    """Guesses the next loads in several ways, scores each against what came, uses the best.

    The plain guess is the sum of the latest windows that chance alone tells apart: of one window
    while loads change, of many while they do not. The others must have won before: ``trend``
    (part of the last change once more), ``mean`` (all windows, older ones fading) and ``echo``
    (the window before the last, for loads that alternate). After an abrupt change all start from
    the newest window. Loads are compared as each layer's distribution over experts.
    """

    def __init__(self) -> None:
        self._last: Loads | None = None
        self.used = ""
        """The guess that the latest answer came from; empty before the first."""

    def next(self, window: Loads) -> Loads:
        """Expected loads ``[layers, experts]``, on the scale of the window's.

        ``window`` ``[steps, layers, experts]`` follows the one of the call before.
        """
        loads: Loads = window.sum(axis=0)
        totals = loads.sum(axis=1, keepdims=True)
        shares = _normal(loads)
        last = self._last
        if last is None or last.shape != shares.shape:
            self._restart(shares)
            self._usual = 0.0
        else:
            self._learn(shares, last, _chance(window, totals))
        self._last = shares
        self.used = self._best()
        expected: Loads = self._guesses[self.used] * totals
        return expected

    def _restart(self, shares: Loads) -> None:
        self._sum, self._summed = shares, 1
        self._mean = shares
        self._errors: dict[str, float] = {}
        self._streaks: dict[str, int] = {}
        self._guesses = {"plain": shares}

    def _learn(self, shares: Loads, last: Loads, chance: float) -> None:
        change = _distance(shares, last)
        if self._usual and change > JUMP * max(self._usual, chance):
            self._usual = change
            self._restart(shares)
            return
        self._usual = (self._usual + change) / 2 if self._usual else change
        errors = {name: _distance(shares, guess) for name, guess in self._guesses.items()}
        for name, error in errors.items():
            won = error < MARGIN * errors["plain"]
            self._streaks[name] = self._streaks.get(name, 0) + 1 if won else 0
        self._errors = errors
        count = self._summed
        same = NOISE * chance * np.sqrt((1 + 1 / count) / 2)
        if _distance(shares, self._sum / count) < same:
            self._sum, self._summed = self._sum + shares, count + 1
        else:
            self._sum, self._summed = shares, 1
        self._mean = (self._mean + shares) / 2
        self._guesses = {
            "plain": self._sum / self._summed,
            "trend": _normal(np.maximum(shares + TREND * (shares - last), 0.0)),
            "mean": self._mean,
            "echo": last,
        }

    def _best(self) -> str:
        proven = [name for name, streak in self._streaks.items() if streak >= STREAK]
        return min(proven, key=lambda name: self._errors[name], default="plain")


def _normal(loads: Loads) -> Loads:
    totals = loads.sum(axis=1, keepdims=True)
    return loads / np.where(totals > 0, totals, 1.0)


def _distance(a: Loads, b: Loads) -> float:
    """Mean over layers of the sum over experts of |a - b|."""
    return float(np.abs(a - b).sum() / max(len(a), 1))


def _chance(window: Loads, totals: Loads) -> float:
    """The distance to expect between two windows of the same load, from how their steps differ."""
    steps, layers = window.shape[:2]
    if steps < 2 or not layers:
        return 0.0
    # Of the normal difference of two such sums, the mean absolute value.
    spread = window.std(axis=0, ddof=1) * np.sqrt(steps) / np.where(totals > 0, totals, 1.0)
    return float(spread.sum() / layers * np.sqrt(2.0) * np.sqrt(2.0 / np.pi))
