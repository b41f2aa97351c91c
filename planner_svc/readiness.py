"""Why a mesh cannot run a token yet, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mesh.membership import FINAL
from mesh.messages import Member, Placement
from mesh.placement import unserved

SERVING = frozenset({"ready", "draining"})
"""States in which a member does its work."""


def why_not_ready(
    everyone: Iterable[Member],
    placement: Placement | None,
    *,
    errors: Mapping[str, str],
    problem: str,
) -> str:
    """Empty when a token can be run. ``errors``: rank -> why it could not take its slots;
    ``problem``: why there is no placement.
    """
    members = {member.id: member for member in everyone}
    if placement is None:
        if errors:
            return "; ".join(f"{rank}: {error}" for rank, error in errors.items())
        return problem or f"loading experts: {_progress(members.values())}"
    live = [rank for rank in placement.ranks if _serves(members.get(rank))]
    if missing := unserved(placement, live):
        experts = sum(len(gone) for gone in missing.values())
        away = [rank for rank in placement.ranks if rank not in live]
        waiting = [
            f"{_describe(rank, members.get(rank))}{': ' + errors[rank] if rank in errors else ''}"
            for rank in away
        ]
        return f"{experts} experts are served by nobody, waiting for: " + ", ".join(waiting)
    routers = [member for member in members.values() if member.role == "router"]
    if not any(_serves(router) for router in routers):
        waiting = [_describe(router.id, router) for router in routers]
        return "no router is ready" + (": " + ", ".join(waiting) if waiting else "")
    return ""


def _serves(member: Member | None) -> bool:
    return member is not None and member.state in SERVING


def _progress(members: Iterable[Member]) -> str:
    workers = [
        f"{member.id} {member.progress:.0%}"
        for member in members
        if member.role == "expert" and member.state not in FINAL
    ]
    return ", ".join(workers)


def _describe(id_: str, member: Member | None) -> str:
    if member is None:
        return f"{id_} (not there)"
    return f"{id_} ({member.state}{': ' + member.detail if member.detail else ''})"
