"""Which expert workers this router has lanes to, and when to try those it lacks again.

Belongs to the compute thread, like the plane. Opening a lane is a handshake. Over a local socket a
dead worker refuses at once, and only a hung one costs the time-out, which is short while tokens
wait and comes ever more rarely. Over TCP it goes on in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ep_kernels.plane import LanePending, LaneRefused, PlaneError, RouterPlane
from structlog.typing import FilteringBoundLogger

from mesh.messages import Member, MemberState
from mesh.settings import DataPlane

_BUSY_TIMEOUT_S = 0.1
_IDLE_TIMEOUT_S = 2.0
_PENDING_TIMEOUT_S = 0.005
_PENDING_PAUSE_S = 0.02
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_FIRST_FENCE_S = 60.0
_LONGEST_FENCE_S = 600.0

_REACHABLE: frozenset[MemberState] = frozenset(
    {"joining", "loading", "ready", "suspect", "draining"}
)
_COMING: frozenset[MemberState] = frozenset({"joining", "loading"})
_SERVING: frozenset[MemberState] = frozenset({"ready", "suspect", "draining"})
"""States in which a worker holds all its slots. A suspect one may only be slow: its lane says so
when it is dead."""


Reach = Callable[[Member], Sequence[str]]


def reach(data_plane: DataPlane, host_id: str) -> Reach:
    """Where a router on ``host_id`` opens its lane to a worker: addresses to try in turn."""
    carrier = "tcp" if data_plane == "auto" else data_plane

    def addresses(member: Member) -> Sequence[str]:
        near = data_plane in ("shm", "symm") or (data_plane == "auto" and member.host_id == host_id)
        found = []
        if near and member.lanes:
            found.append(member.lanes)
        if _carrier(member.lanes_tcp) == carrier:
            found.append(member.lanes_tcp)
        return found

    return addresses


def _carrier(address: str) -> str:
    """What carries the lanes at a port, ``CARRIER://HOST:PORT#KEY``; empty for a Unix socket."""
    return address.partition("://")[0] if "://" in address else ""


@dataclass(slots=True)
class _Wanted:
    member: Member
    next_try: float = 0.0
    pause_s: float = _FIRST_PAUSE_S
    fence_s: float = _FIRST_FENCE_S


class Lanes:
    """Keeps the plane's lanes as the newest view wants them."""

    def __init__(
        self,
        plane: RouterPlane,
        clock: Callable[[], float],
        log: FilteringBoundLogger,
        reach: Reach,
        near: str = "shm",
    ) -> None:
        """``near``: what carries the lanes at a Unix socket."""
        self._plane = plane
        self._reach = reach
        self._near = near
        self._clock = clock
        self._log = log
        self._wanted: dict[str, _Wanted] = {}

    def want(self, members: Iterable[Member]) -> list[str]:
        """Take the expert workers of a new view. Returns peers whose lane was closed because the
        worker is gone or another incarnation took its place; their parts are lost.
        """
        before = self._wanted
        self._wanted = {
            m.id: _Wanted(m) for m in members if m.role == "expert" and m.state in _REACHABLE
        }
        for id_, wanted in self._wanted.items():
            old = before.get(id_)
            if old is not None and old.member.incarnation == wanted.member.incarnation:
                wanted.next_try, wanted.pause_s = old.next_try, old.pause_s
                wanted.fence_s = old.fence_s
        closed = []
        for peer, incarnation in self._plane.peers().items():
            now_wanted = self._wanted.get(peer)
            if now_wanted is None or now_wanted.member.incarnation != incarnation:
                self._plane.disconnect(peer)
                self._log.info("lane.closed", peer=peer, reason="the worker left the mesh")
                closed.append(peer)
        for id_ in before.keys() - self._wanted.keys():
            self._plane.disconnect(id_)  # ends an attempt under way, if there is one
        return closed

    def tend(self, *, busy: bool) -> bool:
        """Try the lanes that are missing and due; ``busy`` says that tokens wait meanwhile. True
        if one was opened.
        """
        if self.next_try_s() > 0.0:
            return False
        timeout_s = _BUSY_TIMEOUT_S if busy else _IDLE_TIMEOUT_S
        opened = False
        up = self._plane.peers()
        for id_, wanted in self._wanted.items():
            if id_ in up or self._clock() < wanted.next_try:
                continue
            member = wanted.member
            try:
                over = self._connect(member, timeout_s)
            except LanePending:
                wanted.next_try = self._clock() + _PENDING_PAUSE_S
            except PlaneError as error:
                self._log.info("lane.refused", peer=id_, reason=str(error))
                wanted.next_try = self._clock() + wanted.pause_s
                wanted.pause_s = min(_LONGEST_PAUSE_S, 2 * wanted.pause_s)
            else:
                self._log.info("lane.opened", peer=id_, incarnation=member.incarnation, over=over)
                wanted.next_try, wanted.pause_s = 0.0, _FIRST_PAUSE_S
                opened = True
        return opened

    def _connect(self, member: Member, timeout_s: float) -> str:
        """Returns what carries the lane. Raises ``PlaneError``, of the address tried last."""
        unreached = PlaneError(
            f"{member.id} has no lanes that this router can reach: network.data_plane and "
            "network.listen say which it has"
        )
        for address in self._reach(member):
            over = _carrier(address) or self._near
            # What goes on by itself needs no waiting for.
            limit_s = timeout_s if over == self._near else min(timeout_s, _PENDING_TIMEOUT_S)
            try:
                self._plane.connect(member.id, address, member.incarnation, limit_s)
            except LaneRefused:
                raise
            except PlaneError as error:
                unreached = error
            else:
                return over
        raise unreached

    def next_try_s(self) -> float:
        """Seconds until ``tend`` has something to do; infinite when all lanes stand."""
        up = self._plane.peers()
        if len(up) == len(self._wanted):
            return float("inf")
        due = min(w.next_try for id_, w in self._wanted.items() if id_ not in up)
        return max(0.0, due - self._clock())

    def lost(self, peer: str) -> None:
        """A lane broke: wait a moment before trying it again, since its worker is likely gone."""
        wanted = self._wanted.get(peer)
        if wanted is not None:
            wanted.next_try = self._clock() + wanted.pause_s

    def hung(self, peer: str) -> None:
        """Close the lane of a worker that takes parts and does not answer. This incarnation is left
        alone for a minute, each time for longer: it would take the next lane as readily.
        """
        self._plane.disconnect(peer)
        wanted = self._wanted.get(peer)
        if wanted is not None:
            wanted.next_try = self._clock() + wanted.fence_s
            wanted.fence_s = min(_LONGEST_FENCE_S, 2 * wanted.fence_s)

    def coming(self) -> set[str]:
        """Workers that are loading what the placement says."""
        return {id_ for id_, w in self._wanted.items() if w.member.state in _COMING}

    def silent(self) -> set[str]:
        """Workers of which the planner has not heard for a while."""
        return {id_ for id_, w in self._wanted.items() if w.member.state == "suspect"}

    def serving(self) -> set[str]:
        """Workers that have a lane and hold what the placement says."""
        up = self._plane.peers()
        return {id_ for id_, w in self._wanted.items() if id_ in up and w.member.state in _SERVING}
