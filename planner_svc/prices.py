"""What a (token, expert) pair costs to compute and an expert to load, as measured. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mesh.messages import Load, SlotsReady

DEFAULT_PAIR_S = 5e-5
"""Assumed before expert workers have computed ``_MIN_PAIRS``."""
DEFAULT_BYTES_PER_S = 256e6
"""At which experts are assumed to load where no limit is set and none was loaded yet."""
_MIN_PAIRS = 1_000
_OLD_SLOTS_WEIGHT = 0.9
"""What a loaded slot still counts after the next acknowledgement: newer ones tell more."""


@dataclass(slots=True)
class _Worker:
    incarnation: int
    speed: float
    pairs: int = 0
    ffn_ns: int = 0


class Prices:
    """Fed with heartbeats and acknowledgements of expert workers.

    ``expert_bytes``: weights of one expert; ``bytes_per_s``: the limit on loading them (0: none).
    """

    def __init__(self, *, expert_bytes: int, bytes_per_s: int) -> None:
        self._default_slot_s = expert_bytes / (bytes_per_s or DEFAULT_BYTES_PER_S)
        self._workers: dict[str, _Worker] = {}
        self._slots = 0.0
        self._slots_s = 0.0
        self.loaded = 0
        """Experts loaded since the planner's start."""
        self.loaded_bytes = 0

    def computed(self, worker: str, incarnation: int, speed: float, load: Load) -> None:
        """A heartbeat of an expert worker; one of speed 2 computes a pair in half the time."""
        known = self._workers.get(worker)
        if known is None or known.incarnation != incarnation:
            known = self._workers[worker] = _Worker(incarnation, speed)
        known.pairs, known.ffn_ns = load.pairs, load.ffn_ns

    def gone(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def acknowledged(self, ready: SlotsReady) -> None:
        """An expert worker has loaded slots."""
        if ready.loaded <= 0 or ready.seconds < 0:
            return
        self.loaded += ready.loaded
        self.loaded_bytes += max(0, ready.loaded_bytes)
        self._slots = self._slots * _OLD_SLOTS_WEIGHT + ready.loaded
        self._slots_s = self._slots_s * _OLD_SLOTS_WEIGHT + ready.seconds

    @property
    def pair_s(self) -> float:
        """Seconds that a worker of speed 1 takes for one pair."""
        work = sum(worker.pairs / worker.speed for worker in self._workers.values())
        if work < _MIN_PAIRS:
            return DEFAULT_PAIR_S
        return sum(worker.ffn_ns for worker in self._workers.values()) / 1e9 / work

    @property
    def slot_s(self) -> float:
        """Seconds that it takes to load one expert."""
        return self._slots_s / self._slots if self._slots else self._default_slot_s
