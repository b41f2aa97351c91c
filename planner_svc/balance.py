"""Real tokens per logical expert over a sliding window, and how evenly they fall on the ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mesh.messages import Placement

Counts = npt.NDArray[np.float64]


class LoadReportError(ValueError):
    """A member's report does not fit the model; it is dropped and counted, nothing else."""


class LoadWindow:
    """Sums of load reports over the last ``span_s`` seconds, in ``buckets`` steps.

    Time comes from the caller (monotonic seconds). ``num_layers`` MoE layers of ``num_experts``
    logical experts.
    """

    def __init__(
        self, num_layers: int, num_experts: int, *, span_s: float = 60.0, buckets: int = 12
    ) -> None:
        self._shape = (num_layers, num_experts)
        self._width_s = span_s / buckets
        self._span_s = span_s
        self._buckets: deque[tuple[float, Counts]] = deque()
        self.tokens = 0
        """Tokens reported since the window was made (not limited to its span)."""

    def add(self, counts: Sequence[Sequence[int]], tokens: int, now: float) -> None:
        """Add one report, ``counts[layer][expert]``. Raises ``LoadReportError``."""
        try:
            report = np.array(counts, dtype=np.float64)
        except (ValueError, OverflowError) as error:
            raise LoadReportError(str(error)) from error
        if report.shape != self._shape or tokens < 0 or (report < 0).any():
            msg = f"counts of shape {report.shape}, expected {self._shape}, none negative"
            raise LoadReportError(msg)
        self._forget(now)
        if not self._buckets or now - self._buckets[-1][0] >= self._width_s:
            self._buckets.append((now, np.zeros(self._shape)))
        self._buckets[-1][1][...] += report
        self.tokens += tokens

    def counts(self, now: float) -> Counts:
        """``[layers, experts]`` tokens in the window."""
        self._forget(now)
        total = np.zeros(self._shape)
        for _, bucket in self._buckets:
            total += bucket
        return total

    def _forget(self, now: float) -> None:
        while self._buckets and now - self._buckets[0][0] >= self._span_s:
            self._buckets.popleft()


def rank_loads(placement: Placement, counts: Counts) -> Counts:
    """``[layers, ranks]`` tokens per rank, estimated: as if an expert's tokens fell evenly on its
    replicas. Reports count tokens per expert, not per slot, while routers prefer the replica on the
    rank that they have sent less to: with replicas the real loads are usually more even than this.
    """
    held = np.array(placement.physical_to_logical).reshape(len(placement.moe_layers), -1)
    rank_of_slot = np.repeat(np.arange(len(placement.ranks)), placement.slots_per_rank)
    loads = np.zeros((len(placement.moe_layers), len(placement.ranks)))
    for layer, row in enumerate(held):
        filled = row >= 0
        replicas = np.bincount(row[filled], minlength=placement.num_experts)
        share = counts[layer][row[filled]] / replicas[row[filled]]
        np.add.at(loads[layer], rank_of_slot[filled], share)
    return loads


def balancedness(loads: Counts) -> float:
    """Mean over ranks / max over ranks of tokens, mean over the layers that saw any.

    1.0 is even; 1 / ranks is all on one. 1.0 when there were no tokens at all.
    """
    peak = loads.max(axis=1, initial=0.0)
    seen = peak > 0
    if not seen.any():
        return 1.0
    return float((loads[seen].mean(axis=1) / peak[seen]).mean())
