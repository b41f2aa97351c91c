"""``moemesh drain``: take work off a member of a mesh, while the mesh serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

from cyclopts import Parameter

from compose.fleet import left_on
from compose.options import Source, UsageError
from compose.processes import ADMIN
from mesh.admin import PlannerAway, PlannerDesk, PlannerRefused
from mesh.links import LinkError, Net
from mesh.messages import Drain, GetStatus, Load, PlanDetail, Status
from mesh.rundir import planner_address
from mesh.settings import Settings

_LOOK_S = 0.2


def drain(
    member: str,
    /,
    *,
    source: Source = Source(),  # noqa: B008 (frozen)
    undo: Annotated[bool, Parameter(negative=(), help="Give it work again.")] = False,
    wait: Annotated[
        bool, Parameter(negative="--no-wait", help="Return only when it has nothing left.")
    ] = True,
    timeout: Annotated[float, Parameter(help="Seconds to wait for that.")] = 600.0,
) -> int:
    """Give a member no more work: a router gets no new sequences, an expert worker's experts are
    moved to others, a gateway says at /ready that it is not. It can then be stopped at no cost.

    It stays so until it is undone or its process ends.
    """
    settings = source.effective().settings
    try:
        asyncio.run(_drain(settings, member, print, undo=undo, wait_s=timeout if wait else 0.0))
    except TimeoutError:
        raise UsageError(f"{member} still has work after {timeout:g} s", exit_code=1) from None
    except PlannerRefused as error:
        raise UsageError(f"the planner refused: {error.reason}", exit_code=1) from None
    except (PlannerAway, LinkError) as error:
        raise UsageError(f"{error}; is the mesh up, and is this its mesh.name?", 1) from None
    return 0


async def _drain(
    settings: Settings, member: str, told: Callable[[str], None], *, undo: bool, wait_s: float
) -> None:
    net = Net(settings.security, ADMIN)
    try:
        planner = PlannerDesk(net, planner_address(settings))
        await planner.ask(Drain(member=member, undo=undo), PlanDetail)
        if undo or not wait_s:
            return
        said = ""
        async with asyncio.timeout(wait_s):
            while left := work_left(await planner.ask(GetStatus(), Status), member):
                if left != said:
                    told(left)
                said = left
                await asyncio.sleep(_LOOK_S)
        told(f"{member}: nothing left")
    finally:
        net.close()


def work_left(status: Status, id_: str) -> str:
    """What a member still has to do, in words; empty when there is nothing."""
    load = next((one.load for one in status.view.members if one.id == id_), None) or Load()
    if load.running or load.waiting:
        return f"{id_}: {load.running} sequences run, {load.waiting} wait"
    return left_on(status, [id_])
