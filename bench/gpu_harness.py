"""What the sections of ``gpu.py`` share: rows, timing, and what a speed is compared with.

Imports no torch, so that the parent process, which only collects, needs none and holds no context.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BF16, FP8, COPY = "bf16 matmul", "fp8 matmul", "copy"
"""Peaks, in TFLOP/s, TFLOP/s and GB/s: the ``what`` of the rows of section ``peaks``."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    section: str
    what: str
    speed: float | str
    unit: str
    reference: str = ""
    """What the speed is compared with."""
    share: str = ""
    """Of that, in percent; above 100 is faster."""
    check: str = ""
    """What was compared with the reference, and the largest error found."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Meter:
    """Given to each section: where to run, what the card can do, and where rows go."""

    device: torch.device
    peaks: dict[str, float] = field(default_factory=dict)

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Median of a call, with a cold L2 cache."""
        from triton.testing import do_bench  # noqa: PLC0415  (a child's import)

        return float(do_bench(call, warmup=50, rep=250, return_mode="median"))

    def row(
        self,
        section: str,
        what: str,
        speed: float,
        unit: str,
        *,
        reference: str = "",
        reference_speed: float | None = None,
        check: str = "",
    ) -> None:
        """Tell the parent at once: what has been measured stays when a later check fails."""
        against = self.peaks.get(reference) if reference_speed is None else reference_speed
        share = f"{100 * speed / against:.0f} %" if against else ""
        row = Row(section, what, round(speed, 1), unit, reference, share, check)
        print(json.dumps(row.as_json()), flush=True)


def largest_error(got: torch.Tensor, wanted: torch.Tensor, limit: float, what: str) -> str:
    """The largest error relative to the largest value, to print. Raises ``ValueError`` above
    ``limit`` and for NaN.
    """
    size = wanted.float().abs().max().clamp(min=1e-30)
    error = float((got.float() - wanted.float()).abs().max() / size)
    if not error <= limit:
        raise ValueError(f"{what} is off by {error:.2e} of its largest value, allowed {limit:.2e}")
    return f"{what} {error:.0e}"
