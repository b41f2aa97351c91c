"""Loads over a sliding window, and how evenly they fall on the ranks. Pure: time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from mesh.messages import LoadReport, Placement

Counts = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
Split = Literal["even", "level"]
"""How routers share an expert's tokens among its copies: equally, or so that the fullest rank gets
least."""

_LEVEL_ROUNDS = 32
_EPOCHS_A_STEP = 4
"""Placements whose measured rank loads one step keeps: what bounds them while experts move."""


class LoadReportError(ValueError):
    """A member's report does not fit the model; it is dropped and counted, nothing else."""


@dataclass(slots=True)
class _Step:
    index: int
    prefill: Counts
    decode: Counts
    tokens: int = 0
    by_rank: dict[tuple[int, tuple[str, ...]], Counts] = field(default_factory=dict)
    """(epoch, ranks) -> ``[layers, ranks]`` pairs, as the routers sent them."""


class LoadWindow:
    """Load reports of the last ``span_s`` seconds in ``buckets`` steps of equal length.

    ``num_layers`` MoE layers of ``num_experts`` logical experts; ``now`` is monotonic seconds.
    Memory: ``buckets`` x layers x (2 experts + 4 ranks) numbers at most.
    """

    def __init__(self, num_layers: int, num_experts: int, *, span_s: float, buckets: int) -> None:
        self._shape = (num_layers, num_experts)
        self._buckets = buckets
        self._width_s = span_s / buckets
        self._steps: deque[_Step] = deque()
        self._first_s: float | None = None
        self.tokens = 0
        """Tokens reported since the window was made (not limited to its span)."""

    # -------------------------------------------------------------- reports

    def add(self, report: LoadReport, now: float) -> None:
        """Add one report. Raises ``LoadReportError``; then nothing was added."""
        counts = _checked("counts", report.counts, self._shape)
        decode = np.zeros(self._shape)
        if report.decode_counts:
            decode = _checked("decode_counts", report.decode_counts, self._shape)
            if (decode > counts).any():
                raise LoadReportError("decode_counts exceed counts")
        by_rank = None
        if report.rank_tokens:
            shape = (self._shape[0], len(report.ranks))
            by_rank = _checked("rank_tokens", report.rank_tokens, shape)
        if report.tokens < 0:
            raise LoadReportError(f"{report.tokens} tokens, expected 0 or more")
        step = self._step_at(now)
        step.prefill += counts - decode
        step.decode += decode
        step.tokens += report.tokens
        self.tokens += report.tokens
        if by_rank is not None:
            self._measure(step, (report.epoch, report.ranks), by_rank)

    # -------------------------------------------------------------- what it shows

    def series(self, now: float) -> Counts:
        """``[steps, layers, experts]`` tokens, oldest step first; zeros where nothing was seen.

        A step younger than half its length is counted with the one before it, lest a forecast
        takes it for a lull. ``[1, layers, experts]`` of zeros when the window is empty.
        """
        self._forget(now)
        if not self._steps:
            return np.zeros((1, *self._shape))
        newest = int(now // self._width_s)
        first = self._steps[0].index
        if newest > first and now - newest * self._width_s < self._width_s / 2:
            newest -= 1
        series = np.zeros((newest - first + 1, *self._shape))
        for step in self._steps:
            series[min(step.index, newest) - first] += step.prefill + step.decode
        return series

    def prefill(self, now: float) -> Counts:
        """``[layers, experts]`` prefill tokens in the window."""
        self._forget(now)
        return sum((step.prefill for step in self._steps), np.zeros(self._shape))

    def decode(self, now: float) -> Counts:
        """``[layers, experts]`` decode tokens in the window."""
        self._forget(now)
        return sum((step.decode for step in self._steps), np.zeros(self._shape))

    def measured(self, placement: Placement, now: float) -> Counts:
        """``[layers, ranks]`` pairs that went to each rank by exactly this placement."""
        self._forget(now)
        total = np.zeros((self._shape[0], len(placement.ranks)))
        for step in self._steps:
            by_rank = step.by_rank.get((placement.epoch, placement.ranks))
            if by_rank is not None:
                total += by_rank
        return total

    def on_ranks(self, placement: Placement, now: float) -> Counts:
        """``[layers, ranks]`` pairs on each rank: as measured, or while nothing was sent by this
        very placement yet, as if an expert's tokens fell evenly on its copies.
        """
        measured = self.measured(placement, now)
        if measured.any():
            return measured
        loads = self.prefill(now) + self.decode(now)
        return rank_loads(rows_of(placement), placement.slots_per_rank, loads)

    def seen(self, now: float) -> int:
        """Tokens in the window."""
        self._forget(now)
        return sum(step.tokens for step in self._steps)

    def covered_s(self, now: float) -> float:
        """How long a time the window's loads come from; at least a second."""
        if self._first_s is None:
            return 1.0
        opens_s = (int(now // self._width_s) - self._buckets + 1) * self._width_s
        return max(1.0, now - max(self._first_s, opens_s))

    # -------------------------------------------------------------- inside

    def _step_at(self, now: float) -> _Step:
        self._forget(now)
        if self._first_s is None:
            self._first_s = now
        index = int(now // self._width_s)
        if not self._steps or self._steps[-1].index < index:
            self._steps.append(_Step(index, np.zeros(self._shape), np.zeros(self._shape)))
        return self._steps[-1]

    def _measure(self, step: _Step, key: tuple[int, tuple[str, ...]], by_rank: Counts) -> None:
        known = step.by_rank
        known[key] = known[key] + by_rank if key in known else by_rank
        if len(known) > _EPOCHS_A_STEP:
            del known[min(known)]

    def _forget(self, now: float) -> None:
        oldest = int(now // self._width_s) - self._buckets
        while self._steps and self._steps[0].index <= oldest:
            self._steps.popleft()


def _checked(name: str, values: Sequence[Sequence[int]], shape: tuple[int, int]) -> Counts:
    """``values`` as an array. Raises ``LoadReportError`` unless they fit ``shape`` and are sane."""
    try:
        array = np.array(values, dtype=np.float64)
    except (ValueError, OverflowError) as error:
        raise LoadReportError(f"{name}: {error}") from error
    if array.shape != shape:
        raise LoadReportError(f"{name} of shape {array.shape}, expected {shape}")
    if not np.isfinite(array).all() or (array < 0).any():
        raise LoadReportError(f"{name} must be finite and not negative")
    return array


# ---------------------------------------------------------------- how evenly


def rank_loads(
    rows: Rows,
    slots_per_rank: Sequence[int],
    counts: Counts,
    speeds: Sequence[float] | None = None,
    split: Split = "even",
) -> Counts:
    """``[layers, ranks]`` tokens that each rank would get.

    ``rows`` ``[layers, slots]`` logical experts, -1 for none; ``counts`` ``[layers, experts]``.
    ``split`` says how routers choose among copies. "level" is what a per-batch choice tends to:
    loads per ``speeds`` (all 1 by default) as even as the copies allow.
    """
    num_layers, num_experts = counts.shape
    num_ranks = len(slots_per_rank)
    layer, slot = np.nonzero(rows >= 0)  # [filled slots]
    expert = layer * num_experts + rows[layer, slot]
    rank_of_slot = np.repeat(np.arange(num_ranks), slots_per_rank)
    rank = layer * num_ranks + rank_of_slot[slot]
    share = 1.0 / np.bincount(expert, minlength=counts.size)[expert]
    tokens = counts.reshape(-1)[expert]

    def loads() -> Counts:
        flat = np.bincount(rank, weights=tokens * share, minlength=num_layers * num_ranks)
        return flat.astype(np.float64).reshape(num_layers, num_ranks)

    best = loads()
    if split == "even" or not (share < 1).any():
        return best
    speed = np.ones(num_ranks) if speeds is None else np.asarray(speeds, dtype=np.float64)
    peak = (best / speed).max(axis=1)
    now = best
    for _ in range(_LEVEL_ROUNDS):
        # Shares move from slow ranks to fast ones, by half of what would make up the difference.
        time = (now / speed).reshape(-1)[rank]
        weight = share / np.sqrt(np.maximum(time, 1e-3 * peak[layer]) + 1e-12)
        share = weight / np.bincount(expert, weights=weight, minlength=counts.size)[expert]
        now = loads()
        lower = (now / speed).max(axis=1)
        better = lower < peak
        best[better], peak[better] = now[better], lower[better]
    return best


def layer_balance(loads: Counts, speeds: Sequence[float] | None = None) -> Counts:
    """``[layers]`` mean over ranks / max over ranks; 1.0 for a layer without tokens.

    With ``speeds``, of the time that ranks take: 1.0 when all are done at once.
    """
    speed = np.ones(loads.shape[1]) if speeds is None else np.asarray(speeds, dtype=np.float64)
    peak = (loads / speed).max(axis=1, initial=0.0)
    even = loads.sum(axis=1) / max(float(speed.sum()), 1e-12)
    balance: Counts = np.divide(even, peak, out=np.ones(len(peak)), where=peak > 0)
    return balance


def balancedness(loads: Counts, speeds: Sequence[float] | None = None) -> float:
    """Mean of ``layer_balance`` over the layers that saw any tokens; 1.0 when none did.

    1.0 is even; 1 / ranks is all on one.
    """
    seen = loads.sum(axis=1) > 0
    return float(layer_balance(loads, speeds)[seen].mean()) if seen.any() else 1.0


def rows_of(placement: Placement) -> Rows:
    """``[layers, slots]`` logical experts of a placement, -1 for none."""
    rows: Rows = np.array(placement.physical_to_logical, dtype=np.int64)
    return rows.reshape(len(placement.moe_layers), -1)
