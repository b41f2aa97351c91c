"""Who is in the mesh and in what state: a pure state machine, driven by the planner.

API
    ``step(membership, event, now_s, rules) -> (membership, effects)``
    events   ``Hello``, ``Heartbeat``, ``Goodbye`` as received; ``Disconnected``; ``Tick``
    effects  ``Admit`` -> send Welcome; ``Refuse`` -> send Refused; ``AskHello`` -> send Unknown;
             ``Changed`` -> the View changed; its ``after`` says when a member is lost
    ``membership.members()``  what a View shows; ``membership.check()``  invariants, for tests

The states and who decides them::

    joining, loading, ready, draining    the member's own word
    suspect     silent for suspect_after, or its connection closed; any word from it refutes this
    dead        silent for dead_after, or not back within reconnect of a closed connection (on the
                planner's host), or its process ended, or another took its id; final for this
                incarnation
    left        it said Goodbye; final for this incarnation

An *incarnation* is the start time of a process. One that is dead or has left is fenced: nothing it
says later counts, and it is refused, so that a process which hung while its work was given away
cannot go on with it. A later process of the same id has a higher incarnation and simply joins.

``now_s`` is any monotonic clock. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from mesh.messages import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    Member,
    MemberState,
)
from mesh.settings import PlannerSettings

LIVE: frozenset[MemberState] = frozenset({"joining", "loading", "ready", "draining"})
"""States that a member reports itself."""
FINAL: frozenset[MemberState] = frozenset({"dead", "left"})
_SUSPECT: frozenset[MemberState] = frozenset({"suspect"})

TRANSITIONS: Mapping[MemberState, frozenset[MemberState]] = {
    **dict.fromkeys(LIVE, LIVE | FINAL | _SUSPECT),
    "suspect": LIVE | FINAL,
    "dead": frozenset(),
    "left": frozenset(),
}
"""Where one incarnation may go from each state."""

_MAX_FENCES = 4096


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What decides membership; times in seconds."""

    model_digest: str
    """Of what this mesh serves (``moe_model.spec.serving_digest``: model, precision, exactness); a
    member with another is refused."""
    suspect_after_s: float
    dead_after_s: float
    tick_s: float
    """How often the planner sends ``Tick``."""
    reconnect_s: float = 1.0
    """How long a member whose connection closed has to come back before it is dead; on another
    host, before it counts as silent. There a member opens its connection anew when the network is
    cut, and the end of the old one may arrive long before the new one stands.
    """
    host_id: str = ""
    """The planner's, as in ``Hello``."""
    forget_after_s: float = 60.0
    """How long the dead and the left stay visible."""
    max_members: int = 1024

    @classmethod
    def of(cls, settings: PlannerSettings, model_digest: str, host_id: str = "") -> Rules:
        return cls(
            model_digest=model_digest,
            suspect_after_s=settings.suspect_after_ms / 1000,
            dead_after_s=settings.dead_after_ms / 1000,
            tick_s=min(settings.heartbeat_ms, settings.suspect_after_ms / 6) / 1000,
            host_id=host_id,
        )


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the newest incarnation of one id."""

    hello: Hello
    protocol: int
    state: MemberState
    reported: MemberState = "joining"
    """Its own last word, to which a refuted suspicion returns."""
    heard_s: float
    """When it last said something."""
    closed_s: float | None = None
    """When its connection closed, if it has not been heard since. None again once that is no more
    than silence.
    """
    final_s: float | None = None
    """When it died or left."""
    detail: str = ""
    progress: float = 0.0
    load: Load | None = None

    def member(self) -> Member:
        """Its line in a ``View``."""
        hello = self.hello
        return Member(
            id=hello.id,
            role=hello.role,
            incarnation=hello.incarnation,
            pid=hello.pid,
            host=hello.host,
            state=self.state,
            control=hello.control,
            lanes=hello.lanes,
            metrics=hello.metrics,
            detail=self.detail,
            progress=self.progress,
            load=self.load,
            bundles=hello.bundles,
            pid_namespace=hello.pid_namespace,
            lanes_tcp=hello.lanes_tcp,
            host_id=hello.host_id,
            group=hello.group,
        )


# ---------------------------------------------------------------- events and effects


class Disconnected(msgspec.Struct, frozen=True):
    """The connection over which the member spoke last has closed. ``ended``: so has its process,
    for certain.
    """

    id: str
    incarnation: int
    ended: bool = False


class Tick(msgspec.Struct, frozen=True):
    """Time passes; send one every ``Rules.tick_s``."""


Event = Hello | Heartbeat | Goodbye | Disconnected | Tick


class Admit(msgspec.Struct, frozen=True):
    """Welcome the sender of this Hello."""

    id: str
    protocol: int


class Refuse(msgspec.Struct, frozen=True):
    """Send ``Refused`` to whoever sent the event's message."""

    id: str
    reason: str
    retry: bool = False


class AskHello(msgspec.Struct, frozen=True):
    """Send ``Unknown`` to whoever sent the event's message."""

    id: str


class Changed(msgspec.Struct, frozen=True):
    """A line of the View changed. ``before`` is None for a new incarnation, ``after`` is None
    for one that is forgotten; equal states mean that only the rest of the line changed.
    """

    id: str
    incarnation: int
    before: MemberState | None
    after: MemberState | None


Effect = Admit | Refuse | AskHello | Changed


# ---------------------------------------------------------------- the machine


class Membership(msgspec.Struct, frozen=True):
    """The whole state; ``Membership()`` is an empty mesh. Never mutated."""

    records: Mapping[str, Record] = {}
    fenced: Mapping[str, int] = {}
    """id -> highest incarnation that is dead or has left."""
    ticked_s: float | None = None

    def members(self) -> tuple[Member, ...]:
        """Every record, in order of role and id."""
        return tuple(
            record.member()
            for record in sorted(
                self.records.values(), key=lambda r: (_ROLE_ORDER[r.hello.role], r.hello.id)
            )
        )

    def check(self) -> None:
        """Raise AssertionError if the state breaks an invariant."""
        for id_, record in self.records.items():
            incarnation = record.hello.incarnation
            assert record.hello.id == id_
            assert record.reported in LIVE
            assert (record.state in FINAL) == (record.final_s is not None)
            if record.state in FINAL:
                assert self.fenced.get(id_) == incarnation, "the dead are fenced"
            else:
                assert self.fenced.get(id_, -1) < incarnation, "no fenced incarnation lives"
            if record.state in LIVE:
                assert record.state == record.reported
                assert record.closed_s is None, "a closed connection makes a suspect"


_ROLE_ORDER: Mapping[str, int] = {"planner": 0, "gateway": 1, "router": 2, "expert": 3, "admin": 4}

Outcome = tuple[Membership, tuple[Effect, ...]]


def step(membership: Membership, event: Event, now_s: float, rules: Rules) -> Outcome:
    """Apply one event. Returns the next state and what to do, in order."""
    match event:
        case Hello():
            return _hello(membership, event, now_s, rules)
        case Heartbeat():
            return _heartbeat(membership, event, now_s)
        case Goodbye():
            return _goodbye(membership, event, now_s)
        case Disconnected():
            return _disconnected(membership, event, now_s)
        case Tick():
            return _tick(membership, now_s, rules)


def _hello(membership: Membership, hello: Hello, now_s: float, rules: Rules) -> Outcome:
    if reason := _unfit(hello, rules):
        return membership, (Refuse(hello.id, reason),)
    if fence := _fence(membership, hello.id, hello.incarnation):
        return membership, (fence,)
    known = membership.records.get(hello.id)
    protocol = min(PROTOCOL_MAX, hello.protocol_max)
    if known is not None and known.hello.incarnation == hello.incarnation:
        # Said again: on a new connection, or because our answer was lost.
        heard = _heard(known, known.reported, now_s)
        record = msgspec.structs.replace(heard, hello=hello, protocol=protocol)
        changed = _changes(known, record)
        return _with(membership, record), (Admit(hello.id, protocol), *changed)
    if known is None and len(membership.records) >= rules.max_members:
        return membership, (
            Refuse(hello.id, f"the mesh is full: {rules.max_members} members", retry=True),
        )
    effects: list[Effect] = []
    if known is not None and known.state not in FINAL:
        # A newer process has the id, so the older one is gone, whatever it may still say.
        membership, lost = _end(membership, known, "dead", "replaced by a newer process", now_s)
        effects.extend(lost)
    record = Record(hello=hello, protocol=protocol, state="joining", heard_s=now_s)
    effects.append(Admit(hello.id, protocol))
    effects.append(Changed(hello.id, hello.incarnation, None, "joining"))
    return _with(membership, record), tuple(effects)


def _unfit(hello: Hello, rules: Rules) -> str:
    """Why a process may never join this mesh; empty when it may."""
    if hello.role in {"planner", "admin"}:
        return f"a {hello.role} is no member of a mesh"
    if hello.protocol_max < PROTOCOL_MIN or hello.protocol_min > PROTOCOL_MAX:
        return (
            f"no common protocol: {hello.id} speaks {hello.protocol_min} to {hello.protocol_max}, "
            f"this mesh {PROTOCOL_MIN} to {PROTOCOL_MAX}"
        )
    if hello.model_digest != rules.model_digest:
        return (
            f"another model or precision: {hello.id} has loaded {hello.model_digest or 'none'}, "
            f"this mesh serves {rules.model_digest}"
        )
    return ""


def _fence(membership: Membership, id_: str, incarnation: int) -> Refuse | None:
    """A refusal for a process whose time is over; None for one that may speak."""
    if incarnation <= membership.fenced.get(id_, -1):
        return Refuse(id_, f"fenced: this process of {id_} was declared dead or has left")
    known = membership.records.get(id_)
    if known is not None and incarnation < known.hello.incarnation:
        return Refuse(id_, f"fenced: a newer process of {id_} has joined")
    return None


def _heartbeat(membership: Membership, beat: Heartbeat, now_s: float) -> Outcome:
    if fence := _fence(membership, beat.id, beat.incarnation):
        return membership, (fence,)
    known = membership.records.get(beat.id)
    if known is None or known.hello.incarnation != beat.incarnation:
        return membership, (AskHello(beat.id),)
    if beat.state not in LIVE:
        accepted = ", ".join(sorted(LIVE))
        return membership, (
            Refuse(beat.id, f"a member cannot report itself {beat.state}; accepted: {accepted}"),
        )
    record = msgspec.structs.replace(
        _heard(known, beat.state, now_s),
        detail=beat.detail,
        progress=beat.progress,
        load=beat.load,
    )
    return _with(membership, record), _changes(known, record)


def _goodbye(membership: Membership, bye: Goodbye, now_s: float) -> Outcome:
    known = membership.records.get(bye.id)
    if known is None or known.hello.incarnation != bye.incarnation or known.state in FINAL:
        return membership, ()
    return _end(membership, known, "left", bye.reason, now_s)


def _disconnected(membership: Membership, event: Disconnected, now_s: float) -> Outcome:
    known = membership.records.get(event.id)
    if known is None or known.hello.incarnation != event.incarnation or known.state in FINAL:
        return membership, ()
    if event.ended:
        return _end(membership, known, "dead", "its process ended", now_s)
    record = msgspec.structs.replace(known, state="suspect", closed_s=now_s)
    return _with(membership, record), _changes(known, record)


def _tick(membership: Membership, now_s: float, rules: Rules) -> Outcome:
    # A tick that comes late means that we slept, not that the members were silent: what they
    # sent meanwhile is still to be read. Give them the time that we missed.
    last_s = membership.ticked_s
    passed_s = 0.0 if last_s is None else now_s - last_s
    excused_s = passed_s if passed_s > 2 * rules.tick_s else 0.0
    effects: list[Effect] = []
    for known in tuple(membership.records.values()):
        if known.final_s is not None:
            if now_s - known.final_s >= rules.forget_after_s:
                membership = _without(membership, known)
                effects.append(Changed(known.hello.id, known.hello.incarnation, known.state, None))
            continue
        record = known
        if excused_s:
            record = msgspec.structs.replace(
                known,
                heard_s=min(now_s, known.heard_s + excused_s),
                closed_s=None if known.closed_s is None else min(now_s, known.closed_s + excused_s),
            )
            membership = _with(membership, record)
        silent_s = now_s - record.heard_s
        away_s = 0.0 if record.closed_s is None else now_s - record.closed_s
        if silent_s >= rules.dead_after_s:
            cause = f"silent for {silent_s:.1f} s"
            membership, lost = _end(membership, record, "dead", cause, now_s)
            effects.extend(lost)
        elif away_s >= rules.reconnect_s and record.hello.host_id in {"", rules.host_id}:
            membership, lost = _end(membership, record, "dead", "connection closed", now_s)
            effects.extend(lost)
        elif away_s >= rules.reconnect_s:
            membership = _with(membership, msgspec.structs.replace(record, closed_s=None))
            id_, incarnation = record.hello.id, record.hello.incarnation
            effects.append(Changed(id_, incarnation, "suspect", "suspect"))
        elif silent_s >= rules.suspect_after_s and record.state != "suspect":
            suspect = msgspec.structs.replace(record, state="suspect")
            membership = _with(membership, suspect)
            effects.extend(_changes(record, suspect))
    return msgspec.structs.replace(membership, ticked_s=now_s), tuple(effects)


# ---------------------------------------------------------------- small moves


def _heard(known: Record, reported: MemberState, now_s: float) -> Record:
    return msgspec.structs.replace(
        known, state=reported, reported=reported, heard_s=now_s, closed_s=None
    )


def _changes(before: Record, after: Record) -> tuple[Changed, ...]:
    """What a View's readers act on; load and progress alone are no reason for a broadcast."""
    same = (
        before.state == after.state
        and before.detail == after.detail
        and (before.hello is after.hello or before.member() == after.member())
    )
    if same:
        return ()
    assert before.state == after.state or after.state in TRANSITIONS[before.state]
    return (Changed(after.hello.id, after.hello.incarnation, before.state, after.state),)


def _end(
    membership: Membership,
    known: Record,
    state: Literal["dead", "left"],
    detail: str,
    now_s: float,
) -> Outcome:
    record = msgspec.structs.replace(
        known, state=state, detail=detail, closed_s=None, final_s=now_s, load=None
    )
    fenced = dict(membership.fenced)
    fenced.pop(known.hello.id, None)  # a dict evicts in the order of the last death
    fenced[known.hello.id] = known.hello.incarnation
    while len(fenced) > _MAX_FENCES:
        del fenced[next(iter(fenced))]
    ended = msgspec.structs.replace(_with(membership, record), fenced=fenced)
    return ended, _changes(known, record)


def _with(membership: Membership, record: Record) -> Membership:
    records = {**membership.records, record.hello.id: record}
    return msgspec.structs.replace(membership, records=records)


def _without(membership: Membership, record: Record) -> Membership:
    records = {id_: r for id_, r in membership.records.items() if id_ != record.hello.id}
    return msgspec.structs.replace(membership, records=records)
