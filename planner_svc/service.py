"""The planner's process: sockets, clock, files and a thread around the coordinator's decisions."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

from mesh.hosts import host_id, planner_listen
from mesh.links import Publisher, ServerLink
from mesh.membership import Rules
from mesh.messages import FromPlanner, Member, Placement, Refused, ToPlanner, View
from mesh.metrics import export_link
from mesh.processes import has_ended
from mesh.rundir import RunDirError, broadcast_address, planner_address, state_dir
from mesh.service import CannotServe, Context
from mesh.supervise import Supervisor
from moe_model.architecture import ModelSpec
from moe_model.errors import CheckpointError
from moe_model.shipped import checkpoint_dir, model_id
from moe_model.spec import load_spec, serving_digest
from planner_svc.balance import LoadWindow
from planner_svc.coordinator import Coordinator, Identity
from planner_svc.decide import Decider, Orders
from planner_svc.drains import Drains
from planner_svc.effects import Effect, Keep, KeepOrders, Note, Publish, Send, Think
from planner_svc.formats import FormatError
from planner_svc.initial import initial_placement
from planner_svc.metrics import PlannerCollector
from planner_svc.moves import ModelShape, RolloutRules
from planner_svc.policies.problem import PlanError, Policy
from planner_svc.policies.registry import make_policy
from planner_svc.prices import Prices
from planner_svc.rollout import Rollout
from planner_svc.store import StoreError, keep_orders, keep_plan, read_orders, read_plan
from planner_svc.worth import DecideRules, Question, Thought, think


class Planner:
    """The actors: own both sockets; all but the policy runs on the event loop's thread."""

    def __init__(
        self,
        ctx: Context,
        coordinator: Coordinator,
        policy: Policy,
        identity: Identity,
        state: Path | None,
    ) -> None:
        """Open the sockets; raises ``LinkError``. ``state``: where the last plan is kept."""
        self._ctx = ctx
        self._coordinator = coordinator
        self._policy = policy
        self._state = state
        self._questions: asyncio.Queue[Question] = asyncio.Queue()
        """The coordinator asks one at a time."""
        listen = partial(planner_listen, ctx.settings)
        self._publisher: Publisher[View] = Publisher(ctx.net, listen(identity.broadcast))
        self._server: ServerLink[ToPlanner, FromPlanner] = ServerLink(
            ctx.net,
            listen(identity.me.control),
            receives=ToPlanner,
            on_lost=self._lost,
            refusal=lambda reason: Refused(reason=reason),
        )
        export_link(ctx.registry, "members", self._server)

    def close(self) -> None:
        self._server.close()
        self._publisher.close()

    async def receive(self) -> None:
        """Answer members, one message after another."""
        while True:
            peer, message = await self._server.recv()
            self._carry_out(self._coordinator.received(peer, message, time.monotonic()))

    async def tick(self) -> None:
        """Let time pass for the coordinator."""
        while True:
            await asyncio.sleep(self._coordinator.tick_s)
            self._carry_out(self._coordinator.tick(time.monotonic()))

    async def think(self) -> None:
        """Make the plans that are asked for, on a thread: a large model's takes a second."""
        while True:
            question = await self._questions.get()
            began = time.monotonic()
            try:
                thought = await asyncio.to_thread(think, self._policy, question)
            except Exception as error:
                # A bug in a policy costs its plan, not the planner.
                self._ctx.log.exception("policy.crashed", policy=self._policy.name)
                thought = Thought(question, error=f"{type(error).__name__}: {error}")
            now = time.monotonic()
            self._carry_out(self._coordinator.thought(thought, now - began, now))

    def _lost(self, peer: bytes) -> None:
        # Nobody needs to wait for a process to come back that has ended on this host.
        member = self._coordinator.member_at(peer)
        # Two hosts may have one name, and kernels number their first namespace alike.
        here = (host_id(self._ctx.settings), self._ctx.pid_namespace)
        ended = (
            member is not None
            and (member.host_id, member.pid_namespace) == here
            and here[1] != 0
            and has_ended(member.pid)
        )
        self._carry_out(self._coordinator.closed(peer, time.monotonic(), ended=ended))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer=peer, message=message):
                    self._server.send(peer, message)
                case Publish(view=view):
                    self._publisher.send(view)
                case Think(question=question):
                    self._questions.put_nowait(question)
                case Keep(placement=placement):
                    self._keep(placement)
                case KeepOrders(orders=orders):
                    self._keep_orders(orders)
                case Note(event=event, values=values):
                    self._ctx.log.info(event, **values)

    def _keep(self, placement: Placement) -> None:
        if self._state is None:
            return
        try:
            keep_plan(self._state, self._coordinator.view.model_digest, placement)
        except StoreError as error:
            self._ctx.log.warning("plan.not_kept", error=str(error))

    def _keep_orders(self, orders: Orders) -> None:
        try:
            keep_orders(self._ctx.run_dir, orders)
        except StoreError as error:
            self._ctx.log.warning("orders.not_kept", error=str(error))


async def main(ctx: Context) -> None:
    """Serve until ``ctx.stopping``. Raises ``CannotServe`` and what links raise."""
    settings = ctx.settings
    try:
        path = checkpoint_dir(settings.model.path)
        spec = load_spec(path)
        digest = serving_digest(
            path, settings.model.weights, settings.model.exact, settings.router.tp
        )
        name = model_id(settings.model.name, settings.model.path)
        policy = make_policy(settings.planner)
    except (CheckpointError, PlanError) as error:
        raise CannotServe(str(error)) from error
    state, stored = _stored_plan(ctx, digest)
    orders = _orders(ctx)
    if orders is None and settings.planner.initial_placement:
        # A planner that is started again goes on with what there is.
        epoch = 1 if stored is None else stored.epoch
        try:
            stored = initial_placement(settings, spec, policy, epoch)
        except (FormatError, PlanError) as error:
            raise CannotServe(f"planner.initial_placement: {error}") from error
    # Wall-clock milliseconds: later starts count on from a higher number than earlier ones used.
    first_number = time.time_ns() // 1_000_000
    shape = ModelShape(spec.moe_layers, spec.num_experts)
    rollout = Rollout(
        shape,
        RolloutRules.of(settings),
        stored=stored,
        first_command=first_number,
        again=orders is not None,
    )
    if rollout.useless_slots:
        ctx.log.warning("redundant_slots.left_out", reason=rollout.useless_slots)
    now = time.monotonic()
    identity = Identity(
        mesh=settings.mesh.name,
        model=name,
        me=Member(
            id=ctx.id,
            role="planner",
            incarnation=ctx.incarnation,
            pid=ctx.pid,
            host=ctx.host,
            state="ready",
            control=planner_address(settings),
            host_id=host_id(settings),
            metrics=ctx.metrics_url,
        ),
        broadcast=broadcast_address(settings),
        heartbeat_ms=settings.planner.heartbeat_ms,
    )
    prices = Prices(expert_bytes=_expert_bytes(spec), bytes_per_s=settings.planner.move_bytes_per_s)
    coordinator = Coordinator(
        identity,
        Rules.of(settings.planner, digest, host_id(settings)),
        rollout,
        LoadWindow(
            len(spec.moe_layers),
            spec.num_experts,
            span_s=settings.planner.window_s,
            buckets=settings.planner.window_buckets,
        ),
        Decider(
            DecideRules.of(settings, spec.gate.num_groups),
            shape,
            settings.planner.mode,
            prices,
            unix_s=time.time() - now,
            orders=orders or Orders(),
        ),
        prices,
        Drains(() if orders is None else orders.drains),
        first_version=first_number,
        started=now,
        again=orders is not None,
    )
    ctx.registry.register(PlannerCollector(coordinator, time.monotonic))
    planner = Planner(ctx, coordinator, policy, identity, state)
    try:
        async with Supervisor(ctx.log) as actors:
            actors.start("planner.receive", planner.receive)
            actors.start("planner.tick", planner.tick)
            actors.start("planner.think", planner.think)
            ctx.ready()
            await ctx.stopping.wait()
    finally:
        planner.close()


def _stored_plan(ctx: Context, digest: str) -> tuple[Path | None, Placement | None]:
    """Where plans are kept, and the last one; neither is worth a planner that does not start."""
    try:
        directory = state_dir(ctx.settings)
        return directory, read_plan(directory, digest)
    except RunDirError as error:
        ctx.log.warning("plan.not_kept", error=str(error))
        return None, None
    except StoreError as error:
        ctx.log.warning("plan.unreadable", error=str(error))
        return directory, None


def _orders(ctx: Context) -> Orders | None:
    """What administrators ordered while an earlier planner served this mesh; None for a new mesh,
    which from now on has one.
    """
    try:
        orders = read_orders(ctx.run_dir)
        if orders is None:
            keep_orders(ctx.run_dir, Orders())
    except StoreError as error:
        ctx.log.warning("orders.unreadable", error=str(error))
        return Orders()
    return orders


def _expert_bytes(spec: ModelSpec) -> int:
    """Of the three matrices of one expert, at two bytes a weight."""
    return 3 * 2 * spec.hidden_size * spec.expert_intermediate
