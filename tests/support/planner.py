"""A planner's coordinator without its process, and members that do as they are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesh.membership import Rules
from mesh.messages import (
    AssignSlots,
    FromPlanner,
    Heartbeat,
    Hello,
    Load,
    Member,
    MemberState,
    Placement,
    Role,
    SlotsReady,
    View,
)
from mesh.settings import MeshSettings, PlannerSettings, Settings
from planner_svc.balance import LoadWindow
from planner_svc.coordinator import Coordinator, Identity
from planner_svc.decide import Decider, Orders
from planner_svc.drains import Drains
from planner_svc.effects import Effect, Publish, Send, Think
from planner_svc.moves import ModelShape, RolloutRules
from planner_svc.policies.problem import Policy
from planner_svc.policies.registry import make_policy
from planner_svc.prices import Prices
from planner_svc.rollout import Rollout
from planner_svc.worth import DecideRules, think

DIGEST = "d1"
UNIX_S = 1_000_000.0


def coordinator(
    shape: ModelShape,
    *,
    first: int = 1000,
    experts: int = 2,
    started: float = 0.0,
    stored: Placement | None = None,
    orders: Orders | None = None,
    **planner: Any,
) -> Coordinator:
    """``planner``: settings of that section. ``orders``: what an earlier start of this planner
    left, or None for a new mesh.
    """
    settings = Settings(
        mesh=MeshSettings(experts=experts),
        planner=PlannerSettings(**({"policy": "global", "move_bytes_per_s": 0} | planner)),
    )
    knobs = settings.planner
    me = Member(id="planner", role="planner", incarnation=first, pid=1, host="h", state="ready")
    prices = Prices(expert_bytes=1, bytes_per_s=0)
    return Coordinator(
        Identity(mesh="m", model="demo", me=me, broadcast="ipc://b", heartbeat_ms=500),
        Rules.of(knobs, DIGEST),
        Rollout(shape, RolloutRules.of(settings), stored=stored, first_command=first),
        LoadWindow(
            len(shape.moe_layers),
            shape.num_experts,
            span_s=knobs.window_s,
            buckets=knobs.window_buckets,
        ),
        Decider(
            DecideRules.of(settings, 1),
            shape,
            knobs.mode,
            prices,
            unix_s=UNIX_S,
            orders=orders or Orders(),
        ),
        prices,
        Drains(() if orders is None else orders.drains),
        first_version=first,
        started=started,
        again=orders is not None,
    )


def policy(name: Any = "global") -> Policy:
    return make_policy(PlannerSettings(policy=name))


# ---------------------------------------------------------------- what members say


def hello(
    id_: str,
    role: Role = "expert",
    incarnation: int = 1,
    digest: str = DIGEST,
    placement: Placement | None = None,
) -> Hello:
    return Hello(
        id=id_,
        role=role,
        incarnation=incarnation,
        pid=7,
        host="h",
        model_digest=digest,
        bundles=f"ipc:///{id_}" if role == "expert" else "",
        placement=placement,
    )


def beat(
    id_: str,
    state: MemberState = "ready",
    incarnation: int = 1,
    version: int = 0,
    epoch: int = 0,
) -> Heartbeat:
    return Heartbeat(
        id=id_,
        incarnation=incarnation,
        state=state,
        load=Load(epoch=epoch),
        view_version=version,
    )


def done(id_: str, command: AssignSlots, incarnation: int = 1, **more: Any) -> SlotsReady:
    return SlotsReady(
        id=id_, incarnation=incarnation, command=command.command, epoch=command.epoch, **more
    )


# ---------------------------------------------------------------- what the planner does


def sent(effects: Sequence[Effect], peer: bytes) -> list[FromPlanner]:
    return [e.message for e in effects if isinstance(e, Send) and e.peer == peer]


def published(effects: Sequence[Effect]) -> list[View]:
    return [effect.view for effect in effects if isinstance(effect, Publish)]


def assigned(effects: Sequence[Effect]) -> dict[bytes, AssignSlots]:
    return {
        effect.peer: effect.message
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, AssignSlots)
    }


def obeyed(
    state: Coordinator, effects: Sequence[Effect], now: float, using: Policy | None = None
) -> list[Effect]:
    """Everything that happens once workers, whose peer is their id, load what they are told, and
    routers named ``r...`` switch at once. Plans are made with ``using``. Returns all effects.
    """
    everything = list(effects)
    for effect in everything:  # grows as the planner answers
        new: list[Effect] = []
        match effect:
            case Send(peer=peer, message=AssignSlots() as command):
                new = state.received(peer, done(peer.decode(), command), now)
            case Publish(view=view) if view.placement is not None:
                for member in view.members:
                    if member.role == "router" and member.state == "ready":
                        told = beat(member.id, epoch=view.placement.epoch, version=view.version)
                        new += state.received(member.id.encode(), told, now)
            case Think(question=question) if using is not None:
                new = state.thought(think(using, question), 0.01, now)
        state.check()
        everything += new
    return everything


def placed(
    state: Coordinator, workers: Sequence[str] = ("e0", "e1"), now: float = 0.0
) -> Placement:
    """The first placement of these expert workers; all are ready afterwards."""
    for worker in workers:
        obeyed(state, state.received(worker.encode(), hello(worker), now), now)
    for worker in workers:
        obeyed(state, state.received(worker.encode(), beat(worker), now), now)
    assert state.view.placement is not None
    return state.view.placement
