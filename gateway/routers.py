"""What the gateway knows of the routers, and which of them takes a sequence.

Pure: time is an argument (monotonic seconds); ``pool.py`` does the talking.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gateway.affinity import PrefixTable
from mesh.messages import Member, MemberState, Pong, View

QUIET_S = 1.2
"""A connected router that answers no Ping for this long takes no work until it does: what it has
goes on elsewhere if it can, as the router may only be slow."""
HUNG_S = 5.0
"""After this long it is taken for hung."""
_LEAST_FREE = 8
"""A router that has less than one part in this many of its KV blocks free can take no more."""
_AFFINITY_SLACK = 4
"""Sequences by which the router that knows the prefix may be busier than the idlest one."""
_IN_MESH: frozenset[MemberState] = frozenset({"joining", "loading", "ready", "suspect", "draining"})


class Router:
    """One router. ``active``: this gateway's sequences on it; ``others``: other gateways';
    ``capacity``: how many it can run at once.
    """

    __slots__ = (
        "active",
        "capacity",
        "heard_at",
        "hung",
        "link_up",
        "member",
        "others",
        "quiet",
        "ready",
        "reason",
    )

    def __init__(self, member: Member, capacity: int) -> None:
        self.member = member
        self.capacity = capacity
        self.link_up = False
        self.ready = False
        self.reason = "has not answered yet"
        self.heard_at = 0.0
        self.quiet = self.hung = False  # for so long that it was reported
        self.active = 0
        self.others = 0

    def heard(self, now: float) -> None:
        """It said something."""
        self.heard_at = now
        self.quiet = self.hung = False

    @property
    def takes_work(self) -> bool:
        return self.link_up and self.ready and self.member.state != "draining"

    @property
    def pending(self) -> int:
        """Sequences that share this router with a new one."""
        return self.active + self.others


class Routers:
    """All routers of the newest view.

    ``max_running``: sequences that share a step of one. ``slack``: how many more one should have
    waiting, to begin with while this gateway learns that others have ended.
    """

    def __init__(self, prefixes: PrefixTable, *, max_running: int, slack: int) -> None:
        self._routers: dict[str, Router] = {}
        self._prefixes = prefixes
        self._max_running = max_running
        self._slack = slack
        self._gateways = 1
        self._has_view = False

    def apply(self, view: View) -> tuple[list[Member], list[str]]:
        """Take the view that counts now; returns (routers to connect to, ids of those gone).

        A router that came back as another process, or at another address, is in both lists.
        Which view is the newest is for ``mesh.member`` to say: after a planner's restart it can
        be one with a smaller version.
        """
        self._has_view = True
        gateways = [m for m in view.members if m.role == "gateway" and m.state in _IN_MESH]
        self._gateways = max(1, len(gateways))
        present = {
            member.id: member
            for member in view.members
            if member.role == "router" and member.state in _IN_MESH and member.control
        }
        gone = [
            id_
            for id_, router in self._routers.items()
            if id_ not in present
            or present[id_].incarnation != router.member.incarnation
            or present[id_].control != router.member.control
        ]
        for id_ in gone:
            del self._routers[id_]
            self._prefixes.forget(id_)
        added = [member for id_, member in present.items() if id_ not in self._routers]
        for id_, member in present.items():
            known = self._routers.get(id_)
            if known is None:
                self._routers[id_] = Router(member, self._max_running)
            else:
                known.member = member
        return added, gone

    def link_changed(self, id_: str, *, up: bool, now: float) -> None:
        """The connection to ``id_`` was made or lost."""
        router = self._routers.get(id_)
        if router is not None:
            router.link_up = up
            router.ready = False
            router.reason = "has not answered yet" if up else "not connected"
            router.heard(now)
            if not up:
                self._prefixes.forget(id_)

    def heard(self, id_: str, now: float) -> None:
        """Any message came from ``id_``."""
        router = self._routers.get(id_)
        if router is not None:
            router.heard(now)

    def pong(self, id_: str, pong: Pong, now: float) -> bool:
        """Take an answer; True when the router takes work now and did not before.

        An answer of any other process than the view's says nothing of this router.
        """
        router = self._routers.get(id_)
        if router is None:
            return False
        before = router.takes_work
        router.heard(now)
        if (pong.router, pong.incarnation) != (id_, router.member.incarnation):
            # It was replaced; work sent now would have to move when the view says so.
            router.ready = False
            router.reason = "another process answers at its address"
            return False
        router.ready = pong.ready
        router.reason = pong.reason
        load = pong.load
        router.others = max(0, load.running + load.waiting - router.active)
        if load.waiting and load.kv_blocks_free * _LEAST_FREE < load.kv_blocks_total:
            router.capacity = max(1, load.running)
        else:
            router.capacity = min(self._max_running, router.capacity + self._slack)
        return router.takes_work and not before

    def refused(self, id_: str, reason: str) -> None:
        """``id_`` takes no work, as its next answer to a Ping will say too."""
        router = self._routers.get(id_)
        if router is not None:
            router.ready = False
            router.reason = reason

    def silent(self, now: float) -> tuple[list[str], list[str]]:
        """Connected routers that have newly been quiet for ``QUIET_S``, and for ``HUNG_S``; they
        take no work until they answer again. Call it several times within ``QUIET_S``.
        """
        quiet, hung = [], []
        for id_, router in self._routers.items():
            silent_s = now - router.heard_at
            if not router.link_up or silent_s <= QUIET_S:
                continue
            if not router.quiet:
                router.quiet = True
                quiet.append(id_)
            if silent_s > HUNG_S and not router.hung:
                router.hung = True
                hung.append(id_)
            router.ready = False
            router.reason = f"has not answered for {silent_s:.0f} s"
        return quiet, hung

    def pick(self, prompt: Sequence[int], exclude: Collection[str] = ()) -> str | None:
        """The router for a sequence: where its prefix is cached unless that one is much busier.

        None when no router takes work.
        """
        ready = [r for id_, r in self._routers.items() if r.takes_work and id_ not in exclude]
        if not ready:
            return None
        if len(ready) == 1:
            return ready[0].member.id
        idlest = min(ready, key=lambda router: (router.pending, router.member.id))
        matched = self._prefixes.match(prompt)
        for router in ready:
            if router.member.id == matched and router.pending <= idlest.pending + _AFFINITY_SLACK:
                return matched
        return idlest.member.id

    def room(self) -> int:
        """How many more sequences this gateway should send to routers now; 0 when none takes work.

        More would only wait there in order of arrival, whoever's they are. Where other gateways
        are busy, each may have its part of a router.
        """
        return sum(
            max(0, self._share(router) + self._slack - router.active)
            for router in self._routers.values()
            if router.takes_work
        )

    def _share(self, router: Router) -> int:
        part = -(-router.capacity // self._gateways)
        return max(router.capacity - router.others, part)

    def taken(self, id_: str, prompt: Sequence[int]) -> None:
        """A sequence went to ``id_``."""
        router = self._routers.get(id_)
        if router is not None:
            router.active += 1
            if len(self._routers) > 1:
                self._prefixes.record(prompt, id_)

    def left(self, id_: str) -> None:
        """A sequence on ``id_`` ended or was taken away."""
        router = self._routers.get(id_)
        if router is not None and router.active:
            router.active -= 1

    def why_not_ready(self) -> str:
        """Empty when some router takes work, else the reason in words."""
        if any(router.takes_work for router in self._routers.values()):
            return ""
        if not self._has_view:
            return "the planner has not answered yet"
        if not self._routers:
            return "no router has joined the mesh"
        return "; ".join(
            f"{id_}: {router.member.detail or router.reason or router.member.state}"
            for id_, router in sorted(self._routers.items())
        )
