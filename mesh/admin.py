"""An administrator's questions to the planner: the gateway's ``/admin`` pages and ``moemesh plan``.

API
    ``await PlannerDesk(net, address).ask(GetPlan(), PlanDetail)``   one question, one answer
    ``present_ranks(view)``                                          whom a placement may name
    ``plain(struct)``                                                an answer as JSON values
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from mesh.links import Net, request
from mesh.messages import (
    RECORD_WAIT_S,
    Admin,
    AdminRefused,
    FromPlanner,
    GetStatus,
    RecordLoad,
    View,
)

ANSWER_S = 5.0
"""How long a question waits for its answer."""
RECORD_ANSWER_S = RECORD_WAIT_S + 2.0
"""The same where the planner itself waits for routers."""

_PRESENT = frozenset({"ready", "draining"})

T = TypeVar("T", bound=msgspec.Struct)


class PlannerAway(Exception):
    """Nobody answered in time; what was asked may have been done all the same."""


class PlannerRefused(Exception):
    """The planner will not do it, and has changed nothing. Attribute: ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class PlannerDesk:
    """Asks the planner at ``address``, over a connection of its own for each question."""

    def __init__(self, net: Net, address: str) -> None:
        self._net = net
        self.address = address

    async def ask(
        self, question: Admin | GetStatus, want: type[T], *, timeout_s: float | None = None
    ) -> T:
        """The planner's answer. Raises ``PlannerAway``, ``PlannerRefused``, and ``LinkError`` for
        an address that cannot be, or without the keys that it needs.

        ``timeout_s``: None for as long as the question may take.
        """
        if timeout_s is None:
            timeout_s = RECORD_ANSWER_S if isinstance(question, RecordLoad) else ANSWER_S
        try:
            answer = await request(
                self._net,
                self.address,
                question,
                receives=FromPlanner,
                want=msgspec.Struct,
                timeout_s=timeout_s,
            )
        except TimeoutError:
            raise PlannerAway(
                f"no planner answers at {self.address} within {timeout_s:g} s"
            ) from None
        if isinstance(answer, AdminRefused):
            raise PlannerRefused(answer.reason)
        if not isinstance(answer, want):
            raise PlannerRefused(
                f"the planner answered {type(question).__name__} with {type(answer).__name__}: "
                "is it of another version?"
            )
        return answer


def present_ranks(view: View) -> list[str]:
    """Expert workers that are there: those of the placement in force first, in its order."""
    present = {m.id for m in view.members if m.role == "expert" and m.state in _PRESENT}
    placed = () if view.placement is None else view.placement.ranks
    return [rank for rank in placed if rank in present] + sorted(present.difference(placed))


def plain(value: Any) -> Any:
    """``value`` as JSON has it: Structs as objects with all of their fields, and no type tags."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value
