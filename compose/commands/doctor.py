"""``moemesh doctor``: what this machine can do for a mesh, and what it lacks."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.markup import escape

from compose.console import standard_output
from compose.doctor import Verdict, findings
from compose.machine import look
from compose.options import Source

_STYLES: dict[Verdict, str] = {"ok": "green", "note": "yellow", "fault": "bold red"}


def doctor(
    *,
    source: Source = Source(),  # noqa: B008 (frozen)
    json: Annotated[bool, Parameter(negative=(), help="One JSON list instead.")] = False,
) -> int:
    """Say what this machine has that a mesh needs (torch, driver, NCCL, Triton, peer access,
    limits, shared memory), which data planes can work, and what to install or raise if not. Ends
    with 1 if a service could not run.
    """
    settings = source.effective().settings
    found = findings(look(), settings)
    if json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        console = standard_output()
        for one in found:
            style = _STYLES[one.verdict]
            line = f"[{style}]{one.verdict:<6}[/]{escape(one.about)}: {escape(one.found)}"
            console.print(line, highlight=False, soft_wrap=True)
            if one.advice:
                console.print(f"      {one.advice}", markup=False, highlight=False, soft_wrap=True)
    return int(any(one.verdict == "fault" for one in found))
