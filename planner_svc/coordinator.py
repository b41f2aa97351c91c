"""The planner's decisions: ``(message, now) -> effects``. Pure: no socket, clock or log.

It joins four machines: ``mesh.membership`` (who is there), ``rollout`` (who holds what),
``balance`` (how loaded they are) and ``decide`` (who should hold what), and keeps the ``View`` that
all of it adds up to. ``now`` is monotonic seconds. A *peer* is one connection, as
``mesh.links.ServerLink`` names it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import isfinite
from typing import Any

import msgspec

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
    AdminRefused,
    Drain,
    GetStatus,
    GetView,
    Goodbye,
    Heartbeat,
    Hello,
    LoadReport,
    Member,
    Recorded,
    Refused,
    SlotsReady,
    Status,
    ToPlanner,
    Unknown,
    View,
    Welcome,
)
from planner_svc.admin import Desk
from planner_svc.balance import LoadReportError, LoadWindow, balancedness, layer_balance
from planner_svc.decide import Decider, Scene
from planner_svc.drains import Drains
from planner_svc.effects import Effect, Keep, Note, Publish, Send, Think
from planner_svc.moves import Assign, Commit, Done, Failed, Moved, Noted
from planner_svc.policies.problem import PlanError
from planner_svc.prices import Prices
from planner_svc.readiness import SERVING, why_not_ready
from planner_svc.rollout import Rollout
from planner_svc.worth import Question, Thought, Verdict

SETTLE_S = 2.0
"""How long a planner that finds a mesh already there listens before it says who is in it: longer
than a member takes to notice the new planner, connect and say ``Hello``."""
_NOTES = {
    "skipped": "plan.skipped",
    "advised": "plan.advised",
    "moving": "plan.proposed",
    "failed": "plan.failed",
}


@dataclass(slots=True)
class Tallies:
    """What has happened since the planner's start."""

    dropped_reports: int = 0
    """Load reports that did not fit the model."""
    plans: int = 0
    plan_s: float = 0.0
    """Time that making them took."""
    moved: int = 0
    """Slots that changed hands."""
    failures: int = 0
    """Waves of moves that failed."""
    faults: int = 0
    """Slots that could not be filled."""


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
    ``started`` is when this one began, ``again`` whether an earlier start served this mesh.

    A planner that was started again knows nobody, and whoever believed its first ``View`` would
    drop the peers that have not said ``Hello`` yet. So once it learns that the mesh is older than
    itself (from ``again``, or a ``Hello`` that brings a placement) it keeps its views back until
    ``SETTLE_S`` after its start; members go on with the last view they have. A new mesh is not
    delayed.
    """

    def __init__(
        self,
        identity: Identity,
        rules: Rules,
        rollout: Rollout,
        window: LoadWindow,
        decider: Decider,
        prices: Prices,
        drains: Drains,
        *,
        first_version: int,
        started: float,
        again: bool,
    ) -> None:
        self._identity = identity
        self._rules = rules
        self._rollout = rollout
        self._window = window
        self._decider = decider
        self._prices = prices
        self._drains = drains
        self._desk = Desk(rollout, window, decider, drains, first_command=first_version)
        self._membership = Membership()
        self._peers: dict[str, bytes] = {}
        """Member id -> the connection on which it said its last accepted Hello."""
        self._members: dict[bytes, Hello] = {}
        self._changed = False
        self._settles_at = started + SETTLE_S
        self._holding = again
        """Views are kept back."""
        self.tallies = Tallies()
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
            case Heartbeat() | SlotsReady() | LoadReport() | Recorded() | Goodbye():
                hello = self._members.get(peer)
                if hello is None or (hello.id, hello.incarnation) != (
                    message.id,
                    message.incarnation,
                ):
                    # Its Hello will tell whether it may belong to the mesh.
                    return [Send(peer, Unknown())]
                effects += self._from_member(peer, hello, message, now)
            case _:
                hello = self._members.get(peer)
                if hello is not None and hello.role != "gateway":
                    reason = f"{hello.id} ({hello.role}) is no administrator"
                    return [Send(peer, AdminRefused(reason=reason))]
                members = self._membership.members()
                effects += self._desk.asked(peer, message, self._scene(), members, now)
                self._changed |= isinstance(message, Drain)
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

    def closed(self, peer: bytes, now: float, *, ended: bool = False) -> list[Effect]:
        """The connection of ``peer`` is gone. ``ended``: its process is too."""
        hello = self._members.pop(peer, None)
        if hello is None or self._peers.get(hello.id) != peer:
            return []
        del self._peers[hello.id]
        gone = Disconnected(hello.id, hello.incarnation, ended)
        return self._step(gone, now, peer) + self._settle(now)

    def tick(self, now: float) -> list[Effect]:
        """Time passes; call it every ``tick_s``."""
        return self._step(Tick(), now, b"") + self._settle(now)

    def thought(self, thought: Thought, seconds: float, now: float) -> list[Effect]:
        """The plan that ``Think`` asked for, which took ``seconds`` to make."""
        self.tallies.plans += 1
        self.tallies.plan_s += seconds
        scene = self._scene() if self._rollout.idle() else None
        target = self._decider.hear(thought, scene, now)
        values = self._decider.numbers() | {"ms": round(seconds * 1000, 1)}
        effects: list[Effect] = [Note(_NOTES[self._decider.verdict], values)]
        if target is not None:
            try:
                self._rollout.move_to(target)
            except PlanError as error:
                effects += self._failed(Failed(str(error), (), None))
        self._desk.planned()
        return effects + self._settle(now)

    # -------------------------------------------------------------- questions

    @property
    def tick_s(self) -> float:
        """Pause between calls of ``tick``."""
        return self._rules.tick_s

    def member_at(self, peer: bytes) -> Hello | None:
        """What the member said of itself who speaks on that connection."""
        return self._members.get(peer)

    def status(self, now: float) -> Status:
        """What ``moemesh status`` shows: unlike a ``View``, with the newest loads."""
        reason = self._why_not_ready()
        return Status(
            mesh=self._identity.mesh,
            model=self._identity.model,
            view=_without_lane_keys(self._snapshot(self.view.version)),
            ready=not reason,
            reason=reason,
            epoch=self.epoch,
            balancedness=self.balancedness(now),
            tokens=self._window.tokens,
            mode=self._decider.mode,
            phase=self._rollout.phase,
            alarms=(*self._rollout.alarms, *self._decider.alarms),
            moving=self._rollout.why,
            moved=self._rollout.moved,
            to_move=self._rollout.to_move,
        )

    @property
    def epoch(self) -> int:
        """Of the placement in force; 0 before the first."""
        placement = self._rollout.committed
        return 0 if placement is None else placement.epoch

    @property
    def plans_by_verdict(self) -> Counter[Verdict]:
        return self._decider.plans

    @property
    def loaded_bytes(self) -> int:
        """Weights of experts that workers have loaded since the planner's start."""
        return self._prices.loaded_bytes

    def balancedness(self, now: float) -> float:
        """As ``balance.balancedness``, over the window; 1.0 before the first placement."""
        placement = self._rollout.committed
        return 1.0 if placement is None else balancedness(self._window.on_ranks(placement, now))

    def worst_layer(self, now: float) -> float:
        """Balancedness of the layer with the least."""
        placement = self._rollout.committed
        if placement is None:
            return 1.0
        return float(layer_balance(self._window.on_ranks(placement, now)).min(initial=1.0))

    def members_by_state(self) -> Counter[tuple[str, str]]:
        """``(role, state)`` -> how many."""
        return Counter((member.role, member.state) for member in self._membership.members())

    def check(self) -> None:
        """Assert what must hold after each event."""
        self._membership.check()
        self._rollout.check()
        for id_, peer in self._peers.items():
            assert self._members[peer].id == id_
        self._desk.check()

    # -------------------------------------------------------------- members

    def _from_member(
        self,
        peer: bytes,
        hello: Hello,
        message: Heartbeat | SlotsReady | LoadReport | Recorded | Goodbye,
        now: float,
    ) -> list[Effect]:
        effects: list[Effect] = []
        match message:
            case Heartbeat():
                self._rollout.saw_epoch(message.load.epoch)
                effects += self._step(message, now, peer)
                self._heard(hello, message)
            case Goodbye():
                effects += self._step(message, now, peer)
            case SlotsReady():
                self._rollout.acknowledged(message, now)
                self._prices.acknowledged(message)
                values: dict[str, Any] = {"member": hello.id, "epoch": message.epoch}
                if message.error:
                    effects.append(Note("slots.failed", values | {"error": message.error}))
                else:
                    values |= {"loaded": message.loaded, "from_peers": message.from_peers}
                    values |= {"seconds": round(message.seconds, 3), "faults": len(message.faults)}
                    effects.append(Note("slots.acknowledged", values))
            case LoadReport():
                try:
                    self._window.add(message, now)
                except LoadReportError as error:
                    self.tallies.dropped_reports += 1
                    values = {"member": hello.id, "error": str(error)}
                    effects.append(Note("load_report.dropped", values))
            case Recorded():
                self._desk.recorded(message)
        return effects

    def _heard(self, hello: Hello, beat: Heartbeat) -> None:
        """Tell the others what a heartbeat says, unless the membership refused it."""
        record = self._membership.records.get(hello.id)
        if record is None or record.state in FINAL or record.hello.incarnation != beat.incarnation:
            return
        if hello.role == "router":
            self._rollout.router_at(hello.id, beat.load.epoch)
        elif hello.role == "expert":
            self._rollout.ready(hello.id, is_ready=beat.state in SERVING)
            self._prices.computed(hello.id, hello.incarnation, _speed(hello), beat.load)

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
        to_drain = self._drains.joined(hello.id, hello.incarnation)
        if hello.role == "expert":
            self._rollout.joined(hello.id, hello.num_slots, hello.bundles, now)
            if to_drain:
                self._rollout.drain(hello.id)

    def _member_changed(self, change: Changed, now: float) -> list[Effect]:
        self._changed = True
        record = self._membership.records.get(change.id)
        role = None if record is None else record.hello.role
        if change.after in FINAL:
            self._rollout.gone(change.id, now)
            self._rollout.router_gone(change.id)
            self._desk.gone(change.id)
            self._prices.gone(change.id)
        elif role == "expert":
            if change.after == "draining":
                self._rollout.drain(change.id)
            if change.after != "suspect":
                self._rollout.heard(change.id)
            elif record is not None and record.closed_s is None:
                self._rollout.silent(change.id)
        if change.before == change.after or change.after is None:
            return []
        began = change.after == "ready" and change.before in {"joining", "loading"}
        if role == "expert" and (began or change.after in FINAL):
            self._decider.soon(now)
        values: dict[str, Any] = {"member": change.id, "incarnation": change.incarnation}
        if change.before is not None:
            values |= {"before": change.before}
            if record is not None and record.detail:
                values |= {"detail": record.detail}
        return [Note(f"member.became_{change.after}", values)]

    def _failed(self, failed: Failed) -> list[Effect]:
        self.tallies.failures += 1
        self.tallies.faults += len(failed.faults)
        self._decider.failed(failed.reason, given_up=failed.retry_in_s is None)
        values = {"reason": failed.reason, "faults": failed.faults, "retry_in_s": failed.retry_in_s}
        return [Note("plan.failed", values)]

    # -------------------------------------------------------------- inside

    def _settle(self, now: float) -> list[Effect]:
        """What must be done now, and the new View if anything in it changed."""
        effects = self._roll_out(now)
        effects += self._plan(now)
        effects += self._desk.due(self._peers, now)
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

    def _roll_out(self, now: float) -> list[Effect]:
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
                case Moved(slots=slots):
                    self.tallies.moved += slots
                case Failed():
                    effects += self._failed(due)
                case Done(why=why):
                    self._decider.finished()
                    effects.append(Note("plan.done", {"epoch": self.epoch, "why": why}))
                case Noted(event=event, values=values):
                    effects.append(Note(event, values))
        return effects

    def _plan(self, now: float) -> list[Effect]:
        """Have a plan made if one is due and nothing is moving."""
        if not self._decider.wants(now) or self._holding or not self._rollout.idle():
            return []
        scene = self._scene()
        if scene is None:
            return []
        match self._decider.ask(scene, self._window, now):
            case Question() as question:
                return [Think(question)]
            case "":
                return []
            case reason:
                return [Note("plan.skipped", {"reason": reason})]

    def _scene(self) -> Scene | None:
        """Where things stand; None before the first placement."""
        placement = self._rollout.committed
        ranks, slots = self._rollout.serving_slots()
        if placement is None or not ranks:
            return None
        hellos = [self._membership.records[rank].hello for rank in ranks]
        return Scene(
            placement=placement,
            ranks=ranks,
            slots=slots,
            hosts=tuple(hello.host_id or hello.host for hello in hellos),
            speeds=tuple(_speed(hello) for hello in hellos),
        )

    def _snapshot(self, version: int) -> View:
        return View(
            version=version,
            members=(self._identity.me, *self._drains.shown(self._membership.members())),
            placement=self._rollout.committed,
            model_digest=self._rules.model_digest,
        )

    def _why_not_ready(self) -> str:
        rollout = self._rollout
        return why_not_ready(
            self._membership.members(),
            rollout.committed,
            errors=rollout.errors(),
            problem=rollout.problem,
        )


def _speed(hello: Hello) -> float:
    """What a worker says of itself, unless that is nonsense."""
    return hello.speed if isfinite(hello.speed) and hello.speed > 0 else 1.0


def _without_lane_keys(view: View) -> View:
    """What may be shown: an operator has no use for what lets routers in."""
    members = tuple(
        msgspec.structs.replace(member, lanes_tcp=member.lanes_tcp.partition("#")[0])
        for member in view.members
    )
    return msgspec.structs.replace(view, members=members)
