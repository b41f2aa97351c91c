"""The planner's process: sockets and clock around the coordinator's decisions."""

from __future__ import annotations

import asyncio
import time

from mesh.links import Publisher, ServerLink
from mesh.membership import Rules
from mesh.messages import FromPlanner, Member, ToPlanner, View
from mesh.metrics import export_link
from mesh.rundir import broadcast_address, planner_address
from mesh.service import CannotServe, Context
from mesh.supervise import Supervisor
from moe_model.errors import CheckpointError
from moe_model.shipped import checkpoint_dir, model_id
from moe_model.spec import load_spec, serving_digest
from planner_svc.balance import LoadWindow
from planner_svc.coordinator import Coordinator, Effect, Identity, Keep, Note, Publish, Send
from planner_svc.metrics import PlannerCollector
from planner_svc.rollout import ModelShape, Rollout
from planner_svc.store import StoreError, keep_plan, read_plan


class Planner:
    """The actor: owns both sockets; everything runs on the event loop's thread."""

    def __init__(self, ctx: Context, coordinator: Coordinator, identity: Identity) -> None:
        """Open the sockets; raises ``LinkError``."""
        self._ctx = ctx
        self._coordinator = coordinator
        self._publisher: Publisher[View] = Publisher(ctx.net, identity.broadcast)
        self._server: ServerLink[ToPlanner, FromPlanner] = ServerLink(
            ctx.net, identity.me.control, receives=ToPlanner, on_lost=self._lost
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
        pause_s = self._ctx.settings.planner.heartbeat_ms / 1000
        while True:
            await asyncio.sleep(pause_s)
            self._carry_out(self._coordinator.tick(time.monotonic()))

    def _lost(self, peer: bytes) -> None:
        self._carry_out(self._coordinator.closed(peer, time.monotonic()))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer=peer, message=message):
                    self._server.send(peer, message)
                case Publish(view=view):
                    self._publisher.send(view)
                case Keep(placement=placement):
                    try:
                        keep_plan(self._ctx.run_dir, self._coordinator.view.model_digest, placement)
                    except StoreError as error:
                        self._ctx.log.warning("plan.not_kept", error=str(error))
                case Note(event=event, values=values):
                    self._ctx.log.info(event, **values)


async def main(ctx: Context) -> None:
    """Serve until ``ctx.stopping``. Raises ``CannotServe`` and what links raise."""
    settings = ctx.settings
    try:
        path = checkpoint_dir(settings.model.path)
        spec = load_spec(path)
        digest = serving_digest(path, settings.model.weights, settings.model.exact)
        name = model_id(settings.model.name, settings.model.path)
    except CheckpointError as error:
        raise CannotServe(str(error)) from error
    try:
        stored = read_plan(ctx.run_dir, digest)
    except StoreError as error:
        ctx.log.warning("plan.unreadable", error=str(error))
        stored = None
    # Wall-clock milliseconds: later starts count on from a higher number than earlier ones used.
    first_number = time.time_ns() // 1_000_000
    rollout = Rollout(
        shape=ModelShape(spec.moe_layers, spec.num_experts),
        redundant_slots=settings.planner.redundant_slots,
        wanted_ranks=settings.mesh.experts,
        patience_s=settings.planner.first_placement_wait_s,
        stored=stored,
        first_command=first_number,
    )
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
            metrics=ctx.metrics_url,
        ),
        broadcast=broadcast_address(settings),
        heartbeat_ms=settings.planner.heartbeat_ms,
    )
    coordinator = Coordinator(
        identity,
        Rules.of(settings.planner, digest),
        rollout,
        LoadWindow(len(spec.moe_layers), spec.num_experts),
        first_version=first_number,
        started=time.monotonic(),
    )
    ctx.registry.register(PlannerCollector(coordinator, time.monotonic))
    planner = Planner(ctx, coordinator, identity)
    try:
        async with Supervisor(ctx.log) as actors:
            actors.start("planner.receive", planner.receive)
            actors.start("planner.tick", planner.tick)
            ctx.ready()
            await ctx.stopping.wait()
    finally:
        planner.close()
