"""Shows how a training run goes: a progress bar on a terminal, lines of JSON elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


class Reporter(Protocol):
    """Shows how a run goes."""

    def advance(self, step: int, loss: float) -> None:
        """Called after every step with the recent loss in bits a byte."""

    def record(self, record: dict[str, Any]) -> None:
        """Called with every record of the log."""


class LineReporter:
    """Prints each record as a line of JSON, for logs and pipes."""

    def advance(self, step: int, loss: float) -> None:
        """Say nothing between records."""

    def record(self, record: dict[str, Any]) -> None:
        print(json.dumps(record), flush=True)


class BarReporter:
    """Keeps a progress bar up to date, for a terminal."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task("training", total=steps, loss="", speed="")

    def advance(self, step: int, loss: float) -> None:
        self._progress.update(self._task, completed=step, loss=f"{loss:.3f} bits/byte")

    def record(self, record: dict[str, Any]) -> None:
        self._progress.update(self._task, speed=f"{record['tokens_per_s']} tokens/s")
        if "held_out" in record:
            self._progress.console.print(f"step {record['step']}: held out {record['held_out']}")


@contextmanager
def reporter(steps: int) -> Iterator[Reporter]:
    """A progress bar on a terminal, lines of JSON elsewhere."""
    if not sys.stdout.isatty():
        yield LineReporter()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}  {task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        yield BarReporter(progress, steps)
