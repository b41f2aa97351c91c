"""Which members an administrator wants to be given no more work. Pure.

An order means one process: it ends with it, and its successor under the same id takes part again.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from mesh.messages import Member

_DETAIL = "as an administrator ordered"


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    member: str
    incarnation: int


class Drains:
    """The orders in force; ``orders``: those that an earlier start of the planner was given."""

    def __init__(self, orders: Iterable[DrainOrder]) -> None:
        self._incarnations = {order.member: order.incarnation for order in orders}

    def order(self, member: Member) -> None:
        self._incarnations[member.id] = member.incarnation

    def lift(self, id_: str) -> None:
        self._incarnations.pop(id_, None)

    def means(self, id_: str, incarnation: int) -> bool:
        """Whether this process of ``id_`` is to drain."""
        return self._incarnations.get(id_) == incarnation

    def joined(self, id_: str, incarnation: int) -> bool:
        """A process said ``Hello``: whether it is to drain. An order for its forerunner ends."""
        if self._incarnations.get(id_, incarnation) < incarnation:
            self.lift(id_)
        return self.means(id_, incarnation)

    def orders(self) -> tuple[DrainOrder, ...]:
        return tuple(
            DrainOrder(member=id_, incarnation=incarnation)
            for id_, incarnation in sorted(self._incarnations.items())
        )

    def shown(self, members: Iterable[Member]) -> tuple[Member, ...]:
        """``members``, those draining that are ready otherwise. One that still loads is not shown
        so: a worker that drains counts as one that holds its slots.
        """
        return tuple(
            msgspec.structs.replace(member, state="draining", detail=member.detail or _DETAIL)
            if member.state == "ready" and self.means(member.id, member.incarnation)
            else member
            for member in members
        )
