"""The planner's decisions: ``(message, now) -> effects``. Pure: no socket, clock or log.

It joins three machines: ``mesh.membership`` (who is there), ``rollout`` (who holds what) and
``balance`` (how loaded they are), and keeps the ``View`` that all of it adds up to. ``now`` is
monotonic seconds. A *peer* is one connection, as ``mesh.links.ServerLink`` names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mesh.membership import (
    FINAL,
    Admit,
    AskHello,
    Changed,
    Disconnected,
    Event,
    Membership,
    Refuse,
    Rules,
    Tick,
    step,
)
from mesh.messages import (
    FromPlanner,
    GetStatus,
    GetView,
    Goodbye,
    Heartbeat,
    Hello,
    LoadReport,
    Member,
    Placement,
    Refused,
    SlotsReady,
    Status,
    ToPlanner,
    Unknown,
    View,
    Welcome,
)
from mesh.placement import unserved
from planner_svc.balance import LoadReportError, LoadWindow, balancedness, rank_loads
from planner_svc.rollout import Assign, Commit, Rollout

SERVING = frozenset({"ready", "draining"})
"""States in which a member does its work."""
SETTLE_S = 2.0
"""How long a planner that finds a mesh already there listens before it says who is in it: longer
than a member takes to notice the new planner, connect and say ``Hello``."""


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: send ``message`` to ``peer``; if that fails, a later event repairs it."""

    peer: bytes
    message: FromPlanner


@dataclass(frozen=True, slots=True)
class Publish:
    """Effect: broadcast ``view``."""

    view: View


@dataclass(frozen=True, slots=True)
class Keep:
    """Effect: keep ``placement`` on disk."""

    placement: Placement


@dataclass(frozen=True, slots=True)
class Note:
    """Effect: log ``event`` with ``values``."""

    event: str
    values: dict[str, Any] = field(default_factory=dict)


Effect = Send | Publish | Keep | Note


@dataclass(frozen=True, slots=True)
class Identity:
    """What the planner says about itself and its mesh."""

    mesh: str
    model: str
    me: Member
    """The planner's own line in each ``View``."""
    broadcast: str
    heartbeat_ms: int


class Coordinator:
    """State of the planner; the service feeds it and carries out what it returns.

    ``first_version`` must be larger than any version of an earlier start of the planner;
    ``started`` is when this one began.

    A planner that was started again knows nobody, and whoever believed its first ``View`` would
    drop the peers that have not said ``Hello`` yet. So once it learns that the mesh is older than
    itself (a ``Hello`` brings a placement, or an earlier start left one on disk) it keeps its views
    back until ``SETTLE_S`` after its start; members go on with the last view they have. A new mesh
    is not delayed.
    """

    def __init__(
        self,
        identity: Identity,
        rules: Rules,
        rollout: Rollout,
        window: LoadWindow,
        *,
        first_version: int,
        started: float,
    ) -> None:
        self._identity = identity
        self._rules = rules
        self._rollout = rollout
        self._window = window
        self._membership = Membership()
        self._peers: dict[str, bytes] = {}
        """Member id -> the connection on which it said its last accepted Hello."""
        self._members: dict[bytes, Hello] = {}
        self._changed = False
        self._settles_at = started + SETTLE_S
        self._holding = rollout.stored is not None
        """Views are kept back."""
        self.dropped_reports = 0
        """Load reports that did not fit the model."""
        self.view = self._snapshot(first_version)

    # -------------------------------------------------------------- events

    def received(self, peer: bytes, message: ToPlanner, now: float) -> list[Effect]:
        """A message from ``peer``."""
        effects: list[Effect] = []
        match message:
            case Hello():
                effects += self._step(message, now, peer, message)
            case GetView() if not self._holding:
                effects.append(Send(peer, self.view))
            case GetView():
                pass  # a member gets the first view without asking
            case GetStatus():
                effects.append(Send(peer, self.status(now)))
            case Heartbeat() | SlotsReady() | LoadReport() | Goodbye():
                hello = self._members.get(peer)
                if hello is None or (hello.id, hello.incarnation) != (
                    message.id,
                    message.incarnation,
                ):
                    # Its Hello will tell whether it may belong to the mesh.
                    return [Send(peer, Unknown())]
                effects += self._from_member(peer, hello, message, now)
        settled = self._settle(now)
        effects += settled
        if (
            isinstance(message, Heartbeat)
            and message.view_version != self.view.version
            and not self._holding
            and Send(peer, self.view) not in settled
        ):
            effects.append(Send(peer, self.view))
        return effects

    def closed(self, peer: bytes, now: float) -> list[Effect]:
        """The connection of ``peer`` is gone."""
        hello = self._members.pop(peer, None)
        if hello is None or self._peers.get(hello.id) != peer:
            return []
        del self._peers[hello.id]
        gone = Disconnected(hello.id, hello.incarnation)
        return self._step(gone, now, peer) + self._settle(now)

    def tick(self, now: float) -> list[Effect]:
        """Time passes; call it every ``Rules.tick_s``."""
        return self._step(Tick(), now, b"") + self._settle(now)

    # -------------------------------------------------------------- questions

    def status(self, now: float) -> Status:
        """What ``moemesh status`` shows: unlike a ``View``, with the newest loads."""
        reason = self._why_not_ready()
        return Status(
            mesh=self._identity.mesh,
            model=self._identity.model,
            view=self._snapshot(self.view.version),
            ready=not reason,
            reason=reason,
            epoch=self.epoch,
            balancedness=self.balancedness(now),
            tokens=self._window.tokens,
        )

    @property
    def epoch(self) -> int:
        """Of the placement in force; 0 before the first."""
        placement = self._rollout.committed
        return 0 if placement is None else placement.epoch

    @property
    def tokens(self) -> int:
        """Tokens that routers have reported since the planner's start."""
        return self._window.tokens

    def balancedness(self, now: float) -> float:
        """As ``balance.balancedness``, over the window; 1.0 before the first placement."""
        placement = self._rollout.committed
        if placement is None:
            return 1.0
        return balancedness(rank_loads(placement, self._window.counts(now)))

    def members_by_state(self) -> Counter[tuple[str, str]]:
        """``(role, state)`` -> how many."""
        return Counter((member.role, member.state) for member in self._membership.members())

    def check(self) -> None:
        """Assert what must hold after each event."""
        self._membership.check()
        self._rollout.check()
        for id_, peer in self._peers.items():
            assert self._members[peer].id == id_

    # -------------------------------------------------------------- inside

    def _from_member(
        self,
        peer: bytes,
        hello: Hello,
        message: Heartbeat | SlotsReady | LoadReport | Goodbye,
        now: float,
    ) -> list[Effect]:
        effects: list[Effect] = []
        match message:
            case Heartbeat():
                self._rollout.saw_epoch(message.load.epoch)
                effects += self._step(message, now, peer)
            case Goodbye():
                effects += self._step(message, now, peer)
            case SlotsReady():
                self._rollout.acknowledged(hello.id, message.command, message.error, now)
                values = {"member": hello.id, "epoch": message.epoch}
                if message.error:
                    effects.append(Note("slots.failed", values | {"error": message.error}))
                else:
                    effects.append(Note("slots.acknowledged", values))
            case LoadReport():
                try:
                    self._window.add(message.counts, message.tokens, now)
                except LoadReportError as error:
                    self.dropped_reports += 1
                    values = {"member": hello.id, "error": str(error)}
                    effects.append(Note("load_report.dropped", values))
        return effects

    def _step(
        self, event: Event, now: float, peer: bytes, hello: Hello | None = None
    ) -> list[Effect]:
        """Drive the membership; ``hello`` is the event itself when it is one."""
        self._membership, outcome = step(self._membership, event, now, self._rules)
        effects: list[Effect] = []
        for effect in outcome:
            match effect:
                case Admit(protocol=protocol):
                    assert hello is not None
                    self._admit(peer, hello, now)
                    effects.append(
                        Send(
                            peer,
                            Welcome(
                                protocol=protocol,
                                heartbeat_ms=self._identity.heartbeat_ms,
                                broadcast=self._identity.broadcast,
                            ),
                        )
                    )
                case Refuse(id=id_, reason=reason, retry=retry):
                    effects.append(Send(peer, Refused(reason=reason, retry=retry)))
                    effects.append(Note("member.refused", {"member": id_, "reason": reason}))
                case AskHello():
                    effects.append(Send(peer, Unknown()))
                case Changed():
                    effects += self._member_changed(effect, now)
        return effects

    def _admit(self, peer: bytes, hello: Hello, now: float) -> None:
        before = self._members.get(peer)
        if before is not None and before.id != hello.id:
            self._peers.pop(before.id, None)
        former = self._peers.get(hello.id)
        if former is not None and former != peer:
            del self._members[former]
        self._peers[hello.id] = peer
        self._members[peer] = hello
        if hello.placement is not None:
            self._rollout.learned(hello.placement)
            self._holding = self._holding or now < self._settles_at
        if hello.role == "expert":
            self._rollout.joined(hello.id, hello.num_slots, now)

    def _member_changed(self, change: Changed, now: float) -> list[Effect]:
        self._changed = True
        if change.after in FINAL:
            self._rollout.gone(change.id, now)
        if change.before == change.after or change.after is None:
            return []
        values: dict[str, Any] = {"member": change.id, "incarnation": change.incarnation}
        if change.before is not None:
            values |= {"before": change.before}
            if detail := self._membership.records[change.id].detail:
                values |= {"detail": detail}
        return [Note(f"member.became_{change.after}", values)]

    def _settle(self, now: float) -> list[Effect]:
        """What the roll-out must do now, and the new View if anything in it changed."""
        effects: list[Effect] = []
        for due in self._rollout.due(now):
            match due:
                case Assign(rank=rank, command=command, again=again):
                    if peer := self._peers.get(rank):
                        effects.append(Send(peer, command))
                    if not again:
                        values = {"member": rank, "epoch": command.epoch}
                        effects.append(Note("slots.assigned", values))
                case Commit(placement=placement):
                    self._changed = True
                    effects.append(Keep(placement))
                    values = {"epoch": placement.epoch, "ranks": placement.ranks}
                    effects.append(Note("plan.committed", values))
        if self._holding and now < self._settles_at:
            return effects
        if self._changed:
            self._changed = False
            self.view = self._snapshot(self.view.version + 1)
            effects.append(Publish(self.view))
        if self._holding:
            # Broadcasts may be numbered lower than before if the clock has gone back; what comes
            # on its own connection a member takes from a new planner whatever the number.
            self._holding = False
            effects += [Send(peer, self.view) for peer in self._members]
            effects.append(Note("mesh.found_again", {"members": len(self._members)}))
        return effects

    def _snapshot(self, version: int) -> View:
        return View(
            version=version,
            members=(self._identity.me, *self._membership.members()),
            placement=self._rollout.committed,
            model_digest=self._rules.model_digest,
        )

    def _why_not_ready(self) -> str:
        """Why the mesh cannot run a token, in words; empty when it can."""
        members = {member.id: member for member in self._membership.members()}
        if errors := self._rollout.errors():
            return "; ".join(f"{rank}: {error}" for rank, error in errors.items())
        placement = self._rollout.committed
        if placement is None:
            return self._rollout.problem or f"loading experts: {_progress(members.values())}"
        live = [rank for rank in placement.ranks if _serves(members.get(rank))]
        if missing := unserved(placement, live):
            experts = sum(len(gone) for gone in missing.values())
            away = [rank for rank in placement.ranks if rank not in live]
            return f"{experts} experts are served by nobody, waiting for: " + ", ".join(
                _describe(rank, members.get(rank)) for rank in away
            )
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
