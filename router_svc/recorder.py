"""A recording of loads: tokens per step, MoE layer and expert, of the newest steps.

The compute thread adds steps, the event loop starts, stops and reads; a step is one array that
never changes once it is kept, so neither waits for the other.
"""

from __future__ import annotations

import os
import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from ep_kernels.routing import Counts
from safetensors.numpy import save_file


@dataclass(frozen=True, slots=True)
class _Step:
    tokens: int
    experts: npt.NDArray[np.int32]
    """``[2, moe layers, experts]``: all, and those of decodes."""


class Recorder:
    """Keeps at most ``most_steps`` steps; the oldest go first."""

    def __init__(self, counts: Counts, moe_layers: tuple[int, ...], most_steps: int) -> None:
        self._counts = counts
        self._moe_layers = moe_layers
        self._steps: deque[_Step] = deque(maxlen=most_steps)
        self._before: npt.NDArray[np.int64] | None = None
        self._began = 0.0
        self.recording = False

    @property
    def steps(self) -> int:
        """Steps kept."""
        return len(self._steps)

    def start(self, unix_time: float) -> None:
        """Forget what was recorded and begin anew with the next step."""
        self.recording = False
        self._steps.clear()
        self._began = unix_time
        self.recording = True

    def stop(self) -> None:
        """Record no more; what was recorded stays."""
        self.recording = False

    def begin_step(self) -> None:
        """On the compute thread, before a step's first dispatch."""
        self._before = self._sums() if self.recording else None

    def end_step(self, tokens: int) -> None:
        """On the compute thread: a step of ``tokens`` tokens is over."""
        if self._before is not None and self.recording:
            grown = (self._sums() - self._before).astype(np.int32)
            self._steps.append(_Step(tokens, grown))

    def _sums(self) -> npt.NDArray[np.int64]:
        return np.stack([self._counts.tokens, self._counts.decodes])

    def write(self, directory: Path, router: str) -> Path:
        """Write what is kept to ``DIRECTORY/ROUTER-N.safetensors``, mode 0600, whole or not at
        all, with the next N. Takes a while: not for the event loop's thread. Raises ``OSError``.

        ``experts`` and ``decodes`` are int32 ``[steps, moe layers, experts]``, ``tokens`` int32
        ``[steps]``; metadata: ``moe_layers`` and ``started`` (Unix time).
        """
        steps = tuple(self._steps.copy())
        layers, experts = self._counts.tokens.shape
        tables = np.empty((2, len(steps), layers, experts), dtype=np.int32)
        for index, step in enumerate(steps):
            tables[:, index] = step.experts
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"{router}-{_next_number(directory, router)}.safetensors"
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            partial.touch(mode=0o600)
            save_file(
                {
                    "experts": tables[0],
                    "decodes": tables[1],
                    "tokens": np.array([step.tokens for step in steps], dtype=np.int32),
                },
                partial,
                {
                    "moe_layers": ",".join(map(str, self._moe_layers)),
                    "started": f"{self._began:.3f}",
                    "router": router,
                },
            )
            partial.chmod(0o600)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
        return path


def _next_number(directory: Path, router: str) -> int:
    name = re.compile(re.escape(router) + r"-(\d+)\.safetensors")
    found = (name.fullmatch(entry.name) for entry in directory.iterdir())
    return max((int(match[1]) for match in found if match), default=0) + 1
