"""``moemesh status``: what the planner knows of the mesh."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.live import Live

from compose.console import standard_output
from compose.options import Source, UsageError
from compose.probes import PlannerProbe
from compose.status_view import document, render
from mesh.messages import Status
from mesh.rundir import planner_address
from mesh.settings import Settings

_WATCH_S = 1.0


def status(
    *,
    source: Source = Source(),  # noqa: B008 (frozen)
    json: Annotated[
        bool, Parameter(negative=(), help="One JSON object, not a table; one a line if --watch.")
    ] = False,
    watch: Annotated[
        bool | None,
        Parameter(
            negative="--once",
            help="Go on until Ctrl-C, once a second; what a terminal gets unless --once or --json.",
        ),
    ] = None,
    timeout: Annotated[float, Parameter(help="Seconds to wait for the planner's answer.")] = 3.0,
) -> int:
    """Show the members of a mesh: states, slots, queues, epoch and balance."""
    settings = source.effective().settings
    if watch is None:
        watch = sys.stdout.isatty() and not json
    try:
        asyncio.run(_show(settings, as_json=json, watch=watch, timeout_s=timeout))
    except KeyboardInterrupt:
        return 0
    return 0


async def _show(settings: Settings, *, as_json: bool, watch: bool, timeout_s: float) -> None:
    async with PlannerProbe(settings) as planner:

        async def ask() -> Status:
            answer = await planner.status(timeout_s)
            if answer is None:
                raise UsageError(
                    f"no planner answers at {planner_address(settings)} within {timeout_s:g} s; "
                    "is the mesh up, and is this its mesh.name?",
                    exit_code=1,
                )
            return answer

        first = await ask()
        if as_json:
            _print_json(first)
            while watch:
                await asyncio.sleep(_WATCH_S)
                _print_json(await ask())
            return
        console = standard_output()
        if not watch:
            console.print(render(first))
            return
        with Live(render(first), console=console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(_WATCH_S)
                live.update(render(await ask()), refresh=True)


def _print_json(answer: Status) -> None:
    sys.stdout.write(msgspec.json.encode(document(answer)).decode() + "\n")
    sys.stdout.flush()
