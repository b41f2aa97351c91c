"""What administrators ask the planner: checked, carried out, answered. Pure: time is an argument.

API
    ``Desk``                    takes ``Admin`` messages; answers them once they are under way
    ``checked_pin(...)``        raises ``Refusal``, or says what is meant
    ``load_detail(...)``        the answer to ``GetLoad``
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from mesh.membership import FINAL
from mesh.messages import (
    Admin,
    AdminRefused,
    Drain,
    GetLoad,
    GetPlan,
    LoadDetail,
    Member,
    Mode,
    Pin,
    Placement,
    PlanDetail,
    Propose,
    Rebalance,
    Recorded,
    RecordLoad,
    SetMode,
)
from planner_svc.balance import Counts, LoadWindow, balancedness, layer_balance
from planner_svc.decide import Decider, Scene
from planner_svc.drains import Drains
from planner_svc.effects import Effect, KeepOrders, Note, Send
from planner_svc.moves import ModelShape, Target
from planner_svc.policies.problem import PlanError
from planner_svc.recordings import Recordings, RecordingsBusy
from planner_svc.rollout import Rollout

MAX_WAITING = 64
"""Administrators that may wait for a plan at a time."""


class Refusal(Exception):
    """What was asked is wrong or impossible now; nothing was changed. The text says why."""


class Desk:
    """Carries out what administrators ask of the roll-out, the decider and the routers.

    Whoever ordered something is answered by ``due``, after the roll-out has begun with it.
    """

    def __init__(
        self,
        rollout: Rollout,
        window: LoadWindow,
        decider: Decider,
        drains: Drains,
        *,
        first_command: int,
    ) -> None:
        self._rollout = rollout
        self._window = window
        self._decider = decider
        self._drains = drains
        self._recordings = Recordings(first_command)
        self._waiting: list[bytes] = []
        """To be told of the next plan."""
        self._ordered: list[bytes] = []
        """To be told what became of their order."""

    # -------------------------------------------------------------- events

    def asked(
        self,
        peer: bytes,
        message: Admin,
        scene: Scene | None,
        members: Collection[Member],
        now: float,
    ) -> list[Effect]:
        """``scene``: where things stand, None before a first placement. ``members``: everyone, by
        their own word.
        """
        try:
            match message:
                case GetLoad():
                    shape, placement = self._rollout.shape, self._rollout.committed
                    return [Send(peer, load_detail(self._window, shape, placement, now))]
                case GetPlan():
                    return [Send(peer, self.plan(now))]
                case Rebalance(force=force):
                    self._rebalance(peer, scene, now, force=force)
                    return [Note("plan.asked_for", {"force": force})]
                case RecordLoad(action=action):
                    routers = [member.id for member in _living(members) if member.role == "router"]
                    self._recordings.ask(peer, action, routers, now)
                    return [Note("recording.asked_for", {"action": action, "routers": routers})]
                case SetMode(mode=mode):
                    effects = self._set_mode(mode, now)
                case Pin():
                    pin = checked_pin(
                        message, self._rollout.shape, self._there(scene), self._decider.pins
                    )
                    self._decider.pin(*pin, now)
                    effects = [
                        Note("plan.pinned", msgspec.structs.asdict(message)),
                        self._keep_orders(),
                    ]
                case Propose():
                    effects = self._propose(message, self._there(scene), now)
                case Drain():
                    effects = self._drain(message, {m.id: m for m in _living(members)})
        except (Refusal, RecordingsBusy) as refusal:
            return [Send(peer, AdminRefused(reason=str(refusal)))]
        self._ordered.append(peer)
        return effects

    def planned(self) -> None:
        """A plan has been made: those who wait for it are answered next."""
        self._ordered += self._waiting
        self._waiting.clear()

    def recorded(self, message: Recorded) -> None:
        self._recordings.answered(message)

    def gone(self, router: str) -> None:
        self._recordings.gone(router)

    # -------------------------------------------------------------- answers

    def due(self, peers: Mapping[str, bytes], now: float) -> list[Effect]:
        """Answers that can be given now, and what routers must be told. ``peers``: member -> its
        connection.
        """
        effects: list[Effect] = [Send(peer, self.plan(now)) for peer in self._ordered]
        self._ordered.clear()
        commands, answers = self._recordings.due(now)
        effects += [Send(peers[router], told) for router, told in commands if router in peers]
        effects += [Send(peer, answer) for peer, answer in answers]
        return effects

    def plan(self, now: float) -> PlanDetail:
        """The latest plan, and what the roll-out is doing."""
        rollout = self._rollout
        live: dict[str, Any] = {
            "epoch": 0 if rollout.committed is None else rollout.committed.epoch,
            "phase": rollout.phase,
            "moved": rollout.moved,
            "to_move": rollout.to_move,
            "faults": tuple(rollout.faults),
            "retry_in_s": rollout.retry_in_s(now),
        }
        return self._decider.detail(live)

    def check(self) -> None:
        """Assert what must hold after each event."""
        assert len(self._waiting) <= MAX_WAITING
        assert not self._ordered, "answered with the event that ordered"

    # -------------------------------------------------------------- orders

    def _there(self, scene: Scene | None) -> Scene:
        if scene is None:
            raise Refusal(self._rollout.problem or "no experts have been placed yet")
        return scene

    def _rebalance(self, peer: bytes, scene: Scene | None, now: float, *, force: bool) -> None:
        rollout = self._rollout
        if self._decider.mode == "off":
            raise Refusal("the mode is off; set it to advise or auto before you ask for a plan")
        self._there(scene)
        if not rollout.idle():
            done = f"{rollout.moved} of {rollout.to_move} slots done"
            raise Refusal(f"experts are being moved: {rollout.phase or 'waiting to retry'}, {done}")
        if not self._window.seen(now) and not self._decider.pins:
            raise Refusal("nothing to plan for: routers have reported no tokens lately")
        if len(self._waiting) >= MAX_WAITING:
            raise Refusal(f"{MAX_WAITING} administrators wait for a plan already")
        self._decider.rebalance(force=force)
        self._waiting.append(peer)

    def _set_mode(self, mode: Mode, now: float) -> list[Effect]:
        effects: list[Effect] = [Note("mode.set", {"before": self._decider.mode, "mode": mode})]
        if mode != "auto" and self._decider.own_move:
            why = f"the mode was set to {mode}"
            self._rollout.abandon()
            self._decider.failed(why, given_up=True)
            effects.append(Note("plan.failed", {"reason": why}))
        self._decider.set_mode(mode, now)
        effects.append(self._keep_orders())
        return effects

    def _keep_orders(self) -> KeepOrders:
        orders = self._decider.orders()
        return KeepOrders(msgspec.structs.replace(orders, drains=self._drains.orders()))

    def _drain(self, message: Drain, members: Mapping[str, Member]) -> list[Effect]:
        member = members.get(message.member)
        if member is None:
            known = _shown(sorted(id_ for id_, one in members.items() if one.state == "ready"))
            raise Refusal(f"{message.member} is not there; expected one of {known or 'none yet'}")
        if message.undo:
            if member.state == "draining":
                raise Refusal(f"{member.id} was told to stop and cannot be kept")
            self._drains.lift(member.id)
            self._rollout.stay(member.id)
            return [Note("drain.undone", {"member": member.id}), self._keep_orders()]
        if member.role in {"router", "gateway"}:
            others = [
                other.id
                for other in members.values()
                if other.role == member.role
                and other.state == "ready"
                and other.id != member.id
                and not self._drains.means(other.id, other.incarnation)
            ]
            if not others:
                raise Refusal(f"{member.id} is the only {member.role} that takes requests")
        elif member.role == "expert":
            try:
                self._rollout.drain(member.id, only_if_possible=True)
            except PlanError as error:
                raise Refusal(f"{member.id} cannot drain: {error}") from error
        self._drains.order(member)
        return [Note("drain.ordered", {"member": member.id}), self._keep_orders()]

    def _propose(self, message: Propose, scene: Scene, now: float) -> list[Effect]:
        target = Target(
            ranks=message.ranks,
            slots_per_rank=message.slots_per_rank,
            rows=message.physical_to_logical,
            why="admin",
        )
        try:
            self._rollout.move_to(target)
        except PlanError as error:
            raise Refusal(str(error)) from error
        self._decider.propose(target, scene, self._window, now)
        return [Note("plan.proposed", self._decider.numbers())]


# ---------------------------------------------------------------- pins


def checked_pin(
    message: Pin,
    shape: ModelShape,
    scene: Scene,
    pins: Mapping[tuple[int, int], tuple[str, ...]],
) -> tuple[int, int, tuple[str, ...]]:
    """Index of the MoE layer, expert and members of a pin that can be kept beside ``pins``.

    Raises ``Refusal``.
    """
    if message.layer not in shape.moe_layers:
        raise Refusal(
            f"layer {message.layer} has no experts; expected one of {_shown(shape.moe_layers)}"
        )
    if not 0 <= message.expert < shape.num_experts:
        raise Refusal(f"expert {message.expert}, expected 0 to {shape.num_experts - 1}")
    layer = shape.moe_layers.index(message.layer)
    ranks = tuple(dict.fromkeys(message.ranks))
    _require_ranks(ranks, scene.ranks)
    others = {where: on for where, on in pins.items() if where[0] == layer}
    wanted = others | {(layer, message.expert): ranks} if ranks else {}
    slots = dict(zip(scene.ranks, scene.slots, strict=True))
    for rank in ranks:
        pinned = sum(rank in on for on in wanted.values())
        if pinned > slots[rank]:
            raise Refusal(
                f"{rank} has {slots[rank]} slots a layer, {pinned} experts of layer "
                f"{message.layer} would be pinned to it"
            )
    copies = [sum(rank in slots for rank in on) for on in wanted.values()]
    needed = shape.num_experts + sum(max(0, count - 1) for count in copies)
    if needed > sum(scene.slots):
        raise Refusal(
            f"with these pins a layer needs {needed} slots, the ranks have {sum(scene.slots)}"
        )
    return layer, message.expert, ranks


def _living(members: Iterable[Member]) -> list[Member]:
    return [member for member in members if member.state not in FINAL]


def _require_ranks(ranks: Iterable[str], live: Collection[str]) -> None:
    for rank in ranks:
        if rank not in live:
            known = _shown(sorted(live)) or "none yet"
            raise Refusal(f"{rank} is no live expert worker; expected one of {known}")


def _shown(values: Iterable[object], most: int = 12) -> str:
    texts = [str(value) for value in values]
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")


# ---------------------------------------------------------------- loads


def load_detail(
    window: LoadWindow, shape: ModelShape, placement: Placement | None, now: float
) -> LoadDetail:
    """The loads of the window, expert by expert and rank by rank."""
    on_ranks = None if placement is None else window.on_ranks(placement, now)
    return LoadDetail(
        window_s=window.covered_s(now),
        moe_layers=shape.moe_layers,
        ranks=() if placement is None else placement.ranks,
        prefill=_whole(window.prefill(now)),
        decode=_whole(window.decode(now)),
        rank_tokens=() if placement is None else _whole(window.measured(placement, now)),
        balancedness=() if on_ranks is None else tuple(layer_balance(on_ranks).tolist()),
        overall=1.0 if on_ranks is None else balancedness(on_ranks),
    )


def _whole(counts: Counts) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(count) for count in row) for row in counts.tolist())
