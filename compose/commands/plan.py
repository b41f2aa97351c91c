"""``moemesh plan``: see and steer how the planner places experts."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import cyclopts
import msgspec
from cyclopts import Parameter
from rich.console import RenderableType

from compose.console import standard_output
from compose.options import Source, UsageError
from compose.plan_view import load_table, plan_panel, record_table
from compose.processes import ADMIN
from mesh.admin import (
    ANSWER_S,
    RECORD_ANSWER_S,
    PlannerAway,
    PlannerDesk,
    PlannerRefused,
    plain,
    present_ranks,
)
from mesh.links import LinkError, Net
from mesh.messages import (
    Admin,
    GetLoad,
    GetPlan,
    GetStatus,
    LoadDetail,
    Mode,
    Pin,
    Placement,
    PlanDetail,
    Rebalance,
    RecordAction,
    RecordDetail,
    RecordLoad,
    SetMode,
    Status,
    View,
)
from mesh.placement_json import PlacementDocument, PlacementJsonError, proposal, sglang_map
from mesh.rundir import planner_address

app = cyclopts.App(name="plan", help="See and steer how the planner places experts.")
record = cyclopts.App(name="record", help="Record which experts the routers' tokens go to.")
app.command(record)

T = TypeVar("T", bound=msgspec.Struct)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Asking(Source):
    """How to ask the planner, and how to show what it says."""

    json: Annotated[bool, Parameter(negative=(), help="One JSON object, not a table.")] = False
    timeout: Annotated[
        float | None,
        Parameter(
            show_default=False,
            help=f"Seconds to wait for the planner's answer [{ANSWER_S:g}; "
            f"{RECORD_ANSWER_S:g} for record].",
        ),
    ] = None

    def run(self, questions: Callable[[PlannerDesk], Awaitable[T]]) -> T:
        """Ask on a connection of this command's own. Raises ``UsageError`` with exit code 1."""
        settings = self.effective().settings

        async def ask() -> T:
            net = Net(settings.security, ADMIN)
            try:
                return await questions(PlannerDesk(net, planner_address(settings)))
            except PlannerAway as error:
                hint = "is the mesh up, and is this its mesh.name?"
                raise UsageError(f"{error}; {hint}", exit_code=1) from None
            except LinkError as error:
                raise UsageError(str(error), exit_code=1) from None
            except PlannerRefused as error:
                raise UsageError(f"the planner refused: {error.reason}", exit_code=1) from None
            finally:
                net.close()

        return asyncio.run(ask())

    def show(self, question: Admin, want: type[T], render: Callable[[T], RenderableType]) -> int:
        """Ask one question and print the answer."""

        async def ask(planner: PlannerDesk) -> T:
            return await planner.ask(question, want, timeout_s=self.timeout)

        answer = self.run(ask)
        self.print(answer, render)
        return 0

    def show_plan(self, question: Admin) -> int:
        """The same for a question that ``PlanDetail`` answers."""
        return self.show(question, PlanDetail, _plan)

    def print(self, answer: T, render: Callable[[T], RenderableType]) -> None:
        if self.json:
            _print_json(plain(answer))
        else:
            standard_output().print(render(answer), soft_wrap=True)


_ASKING = Asking()


def _plan(plan: PlanDetail) -> RenderableType:
    return plan_panel(plan, time.time())


@app.command
def show(*, asking: Asking = _ASKING) -> int:
    """Show the latest plan, its gain, cost and verdict, and the move under way."""
    return asking.show_plan(GetPlan())


@app.command
def load(*, asking: Asking = _ASKING) -> int:
    """Show the load of the last window: tokens per layer and rank, and how balanced they are."""
    return asking.show(GetLoad(), LoadDetail, load_table)


@app.command
def rebalance(
    *,
    asking: Asking = _ASKING,
    force: Annotated[
        bool,
        Parameter(negative=(), help="Carry the plan out even if it costs more than it gains."),
    ] = False,
) -> int:
    """Plan now rather than at the next interval."""
    return asking.show_plan(Rebalance(force=force))


@app.command
def mode(mode: Mode, /, *, asking: Asking = _ASKING) -> int:
    """Make no plans (off), only report them (advise), or carry them out (auto), for as long as
    this mesh is up.
    """
    return asking.show_plan(SetMode(mode=mode))


@app.command
def pin(layer: int, expert: int, /, *ranks: str, asking: Asking = _ASKING) -> int:
    """Keep a copy of an expert on each of some expert workers, from the next plan on."""
    if not ranks:
        raise UsageError("pin: name at least one expert worker; `moemesh plan unpin` lifts a pin")
    return asking.show_plan(Pin(layer=layer, expert=expert, ranks=ranks))


@app.command
def unpin(layer: int, expert: int, /, *, asking: Asking = _ASKING) -> int:
    """Lift the pin of an expert."""
    return asking.show_plan(Pin(layer=layer, expert=expert, ranks=()))


@app.command
def apply(file: Path, /, *, asking: Asking = _ASKING) -> int:
    """Carry out the placement in a file: what `export` writes, in either format."""
    document = _read(file)

    async def ask(planner: PlannerDesk) -> PlanDetail:
        placement, view = await _in_force(planner, asking)
        try:
            question = proposal(document, placement, present_ranks(view))
        except PlacementJsonError as error:
            raise UsageError(f"{file}: {error}") from None
        return await planner.ask(question, PlanDetail, timeout_s=asking.timeout)

    asking.print(asking.run(ask), _plan)
    return 0


@app.command
def export(
    *,
    asking: Asking = _ASKING,
    format: Annotated[  # noqa: A002
        Literal["moemesh", "sglang"],
        Parameter(help="moemesh: what `apply` takes. sglang: for its --init-expert-location."),
    ] = "moemesh",
) -> int:
    """Print the placement in force as JSON."""

    async def ask(planner: PlannerDesk) -> Placement:
        return (await _in_force(planner, asking))[0]

    placement = asking.run(ask)
    try:
        _print_json(plain(placement) if format == "moemesh" else sglang_map(placement))
    except PlacementJsonError as error:
        raise UsageError(str(error), exit_code=1) from None
    return 0


@record.command
def start(*, asking: Asking = _ASKING) -> int:
    """Begin to record, at every router."""
    return _record("start", asking)


@record.command
def stop(*, asking: Asking = _ASKING) -> int:
    """Stop recording; what was recorded is kept."""
    return _record("stop", asking)


@record.command
def dump(*, asking: Asking = _ASKING) -> int:
    """Write what was recorded to a safetensors file beside each router, and print where."""
    return _record("dump", asking)


def _record(action: RecordAction, asking: Asking) -> int:
    return asking.show(RecordLoad(action=action), RecordDetail, record_table)


def _read(file: Path) -> PlacementDocument:
    try:
        return msgspec.json.decode(file.read_bytes(), type=PlacementDocument)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: no placement: {error}") from None


async def _in_force(planner: PlannerDesk, asking: Asking) -> tuple[Placement, View]:
    view = (await planner.ask(GetStatus(), Status, timeout_s=asking.timeout)).view
    if view.placement is None:
        raise UsageError("nothing is placed yet: the expert workers are loading", exit_code=1)
    return view.placement, view


def _print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
