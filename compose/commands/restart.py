"""``moemesh restart``: start processes of a mesh again, while it serves."""

from __future__ import annotations

import asyncio
from typing import Annotated

from cyclopts import Parameter

from compose.control import Restart, order
from compose.options import Source, UsageError


def restart(
    *members: Annotated[str, Parameter(help="Processes to start again, such as expert-1.")],
    source: Source = Source(),  # noqa: B008 (frozen)
    rolling: Annotated[
        bool, Parameter(negative=(), help="All processes, one after another.")
    ] = False,
) -> int:
    """Start processes again, one after another: each hands over what it has before it ends, and is
    ready again before the next one's turn. No request is lost, and none waits for long.

    They read the configuration file anew, and run the code that is installed now.
    """
    if rolling == bool(members):
        raise UsageError("restart: name processes, or give --rolling for all of them")
    asyncio.run(order(source.effective().settings, Restart(members=members), print))
    return 0
