"""Which role may send what. Pure. Asked where a peer has proven who it is (``mesh.curve``)."""

from __future__ import annotations

from collections.abc import Mapping

from mesh.curve import Identity
from mesh.messages import (
    Cancel,
    Drain,
    FetchBundle,
    GetLoad,
    GetPlan,
    GetStatus,
    GetView,
    Goodbye,
    Heartbeat,
    Hello,
    LoadReport,
    Pin,
    Ping,
    Propose,
    Rebalance,
    Recorded,
    RecordLoad,
    Role,
    SetMode,
    SlotsReady,
    Submit,
)

_MEMBERS: frozenset[Role] = frozenset({"gateway", "router", "expert"})
_ADMINS: frozenset[Role] = frozenset({"gateway", "admin"})
_ALL: frozenset[Role] = _MEMBERS | _ADMINS | {"planner"}
SENDERS: Mapping[type, frozenset[Role]] = {
    Hello: _MEMBERS,
    Heartbeat: _MEMBERS,
    Goodbye: _MEMBERS,
    SlotsReady: frozenset({"expert"}),
    LoadReport: frozenset({"router"}),
    Recorded: frozenset({"router"}),
    GetView: _ALL,
    GetStatus: _ALL,
    GetLoad: _ADMINS,
    GetPlan: _ADMINS,
    Rebalance: _ADMINS,
    SetMode: _ADMINS,
    Pin: _ADMINS,
    Propose: _ADMINS,
    RecordLoad: _ADMINS,
    Drain: _ADMINS,
    FetchBundle: frozenset({"expert"}),
    Submit: frozenset({"gateway"}),
    Cancel: frozenset({"gateway"}),
    Ping: frozenset({"gateway"}),
}
"""Message -> roles whose keys may send it; a message that is not named here nobody may."""


def forbidden(identity: Identity, message: object) -> str:
    """Why ``identity`` must not have sent ``message``, in words; empty when it may."""
    kind = type(message).__name__
    if identity.role not in SENDERS.get(type(message), frozenset()):
        return f"the key of {identity.name} has role {identity.role}, which may not send {kind}"
    match message:
        case Hello(role=role) if role != identity.role:
            return f"the key of {identity.name} has role {identity.role}, not {role}"
        case (
            Hello(id=name)
            | Heartbeat(id=name)
            | Goodbye(id=name)
            | SlotsReady(id=name)
            | LoadReport(id=name)
            | Recorded(id=name)
            | Ping(gateway=name)
        ) if name != identity.name:
            return f"the key of {identity.name} is not that of {name}"
    return ""
