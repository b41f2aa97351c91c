"""What the launcher says to its user: progress while weights load, then a URL, then bad news."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from compose.processes import Endpoint, ProcessSpec
from mesh.messages import Member
from mesh.settings import MeshSettings

STYLES = {
    "ready": "green",
    "loading": "yellow",
    "joining": "yellow",
    "suspect": "red",
    "draining": "cyan",
    "dead": "red",
    "left": "dim",
}


_UNBOUNDED = 100_000
"""Columns: wider than any line that is printed."""


def standard_output() -> Console:
    """Standard output, for tables: as wide as the terminal. In a pipe or a file, where whoever
    reads wants all of it, nothing is wrapped or cut.
    """
    return Console() if sys.stdout.isatty() else Console(width=_UNBOUNDED)


class LastingConsole(Console):
    """One that says no more once nobody reads it, rather than end the process: a mesh outlives the
    terminal or the pipe that showed its start.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class LauncherConsole:
    """Bars that redraw on a terminal; elsewhere (a pipe, a journal) one line a change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, str] = {}

    def __enter__(self) -> LauncherConsole:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close_bars()

    def starting(self, model: str, specs: Sequence[ProcessSpec], logs: str) -> None:
        ids = ", ".join(spec.id for spec in specs)
        self._say(f"[bold]moemesh[/] serves {escape(model)} with {ids}")
        self._say(f"[dim]logs: {escape(logs)}[/]")

    def waiting(self, specs: Sequence[ProcessSpec], members: Sequence[Member]) -> None:
        """Shows how far each child is; ``members`` is what the planner knows, perhaps nothing."""
        known = {member.id: member for member in members}
        for spec in specs:
            member = known.get(spec.id)
            if spec.role in {"router", "expert"}:
                state = member.state if member else "starting"
                self._show(spec.id, state, member.progress if member else 0.0)

    def ready(
        self, endpoints: Sequence[Endpoint], model: str, seconds: float, request: str, mesh: str
    ) -> None:
        self._close_bars()
        urls = "  ".join(f"[bold green]{endpoint.url}[/]" for endpoint in endpoints)
        self._say(f"ready after {seconds:.1f} s: {urls}   (model: {escape(model)})")
        self._say("")
        self._console.print(request, style="cyan", markup=False, highlight=False, soft_wrap=True)
        self._say("")
        which = "" if mesh == MeshSettings().name else f" --set mesh.name={mesh}"
        self._say(f"[dim]`moemesh status{which}` shows the mesh; Ctrl-C stops it.[/]")

    def recovered(self, seconds: float) -> None:
        self._close_bars()
        self._say(f"[green]whole again[/] after {seconds:.1f} s")

    def child_error(self, spec: ProcessSpec, text: str) -> None:
        self._say(f"[red]{spec.id}[/] {escape(text)}")

    def child_died(
        self, spec: ProcessSpec, how: str, tail: Sequence[str], delay_s: float | None
    ) -> None:
        """``delay_s`` until it is started again; None: the mesh ends instead."""
        for line in tail:
            self._say(f"  [dim]{escape(line)}[/]")
        what = "it is not started again" if delay_s is None else f"starting again in {delay_s:g} s"
        self._say(f"[red]{spec.id} {escape(how)}[/]; {what}")

    def progress(self, text: str) -> None:
        """A step of an order that changes the mesh."""
        self._say(f"[dim]{escape(text)}[/]")

    def failed(self, reason: str) -> None:
        self._close_bars()
        self._say(f"[bold red]stopping:[/] {escape(reason)}")

    def stopping(self) -> None:
        self._close_bars()
        self._say("stopping (Ctrl-C again: at once)")

    def log_changed(self, path: Path, fault: str) -> None:
        """A child's log begins to lose lines, or (no ``fault``) takes them again."""
        if fault:
            self._say(f"[red]{escape(str(path))} loses lines:[/] {escape(fault)}")
        else:
            self._say(f"{escape(str(path))} takes lines again")

    def killed(self, spec: ProcessSpec, grace_s: float) -> None:
        self._say(f"[red]{spec.id}[/] did not stop within {grace_s:g} s and was killed")

    def stopped(self, *, kept_logs: str) -> None:
        """``kept_logs``: the directory of logs that stay; empty when none do."""
        self._say("stopped")
        if kept_logs:
            self._say(f"logs are kept until the next start: {escape(kept_logs)}")

    def _show(self, name: str, state: str, progress: float) -> None:
        if not self._live:
            if self._said.get(name) != state:
                self._said[name] = state
                self._say(f"{name}: {state}")
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description:<12}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %  {task.fields[state]}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
                refresh_per_second=5,
            )
            self._progress.start()
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=1.0, state=state)
        style = STYLES.get(state, "dim")
        self._progress.update(self._tasks[name], completed=progress, state=f"[{style}]{state}[/]")

    def _close_bars(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._tasks = {}

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)
