"""What the planner's decisions ask the service to do. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mesh.messages import FromPlanner, Placement, View
from planner_svc.decide import Orders
from planner_svc.worth import Question


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``peer``; if that fails, a later event repairs it."""

    peer: bytes
    message: FromPlanner


@dataclass(frozen=True, slots=True)
class Publish:
    """Broadcast ``view``."""

    view: View


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep ``placement`` on disk."""

    placement: Placement


@dataclass(frozen=True, slots=True)
class KeepOrders:
    """Keep what administrators ordered, for a planner that is started again."""

    orders: Orders


@dataclass(frozen=True, slots=True)
class Think:
    """Make a plan, off the event loop, and bring it to ``Coordinator.thought``."""

    question: Question


@dataclass(frozen=True, slots=True)
class Note:
    """Log ``event`` with ``values``."""

    event: str
    values: dict[str, Any] = field(default_factory=dict)


Effect = Send | Publish | Keep | KeepOrders | Think | Note
