"""The router's process: gateways and planner on the event loop, tokens on the compute thread.

The event loop never waits for the compute thread: requests go in through the engine's bounded
queue, each step's results come back by one call into the loop. The router calls itself ready once
a token has gone through the whole mesh, and takes requests from then on; while an expert has no
worker it says so, and what it has taken waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from ep_kernels.plane import LaneShape, PlaneError
from ep_kernels.planes import check_plane, router_plane
from ep_kernels.shm.layout import lay_out
from ep_kernels.triton.device import DeviceUnavailable

from mesh.hosts import advertised, host_id
from mesh.links import ServerLink
from mesh.member import Command, Member, RefusedByPlanner
from mesh.messages import (
    Cancel,
    FromRouter,
    Hello,
    Load,
    Ping,
    Pong,
    Record,
    Rejected,
    Sampling,
    Submit,
    Tokens,
    ToRouter,
    View,
)
from mesh.metrics import export_link
from mesh.processes import name_thread
from mesh.rundir import planner_address, router_address
from mesh.service import CannotServe, Context
from mesh.settings import Settings
from mesh.supervise import Supervisor
from moe_model.errors import CheckpointError
from moe_model.kv_size import kv_cache_fault
from moe_model.shard import shard_fault
from moe_model.shipped import checkpoint_dir
from moe_model.spec import ModelSpec, load_spec, serving_digest
from router_svc.engine import Engine, answer_timeout_s
from router_svc.exchange import EngineBusyError, Results
from router_svc.group import (
    Alone,
    Group,
    OnDevice,
    Several,
    SeveralOnDevices,
    matrix_threads,
)
from router_svc.lanes import reach
from router_svc.loads import Loads
from router_svc.metrics import RouterCollector
from router_svc.recordings import Recordings
from router_svc.stall import StallWatch

GATEWAY_SILENT_S = 5.0
"""A gateway that says nothing for this long has its sequences cancelled."""
_WATCH_EVERY_S = 1.0
_REPORT_EVERY_S = 1.0
_WARM_UP_TIMEOUT_S = 30.0
_WARM_UP_PAUSE_S = 0.5
_RETRY_AFTER_S = 1.0
_DRAIN_LOOK_S = 0.05
_RING_SLOTS_PER_MICRO_BATCH = 2
"""Two, so that a prompt chunk of twice the capacity of a message goes out without waiting."""

_OWN = b""
"""Owner of the router's own sequences; ZeroMQ never names a peer so."""

_WIRES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class _AbandonedError(Exception):
    """The service stopped while it loaded weights."""


class Router:
    """The actors of one router and what they share. Everything here runs on the event loop."""

    def __init__(
        self, ctx: Context, spec: ModelSpec, digest: str, group: Group, shape: LaneShape
    ) -> None:
        self._ctx = ctx
        self._spec = spec
        self._digest = digest
        self._group = group
        self._shape = shape
        self._loop = asyncio.get_running_loop()
        self._engine: Engine | None = None
        self._abandoned = False
        self._warm = False
        self._heard: dict[bytes, float] = {}  # gateway -> when it last said something
        self._pinged: dict[str, tuple[int, bytes]] = {}  # gateway's id -> incarnation, connection
        self._stall = StallWatch(answer_timeout_s(ctx.settings.router))
        self._warm_up_ended: asyncio.Future[str] | None = None
        self._news = asyncio.Event()
        """The engine came up or its state changed."""
        self._link: ServerLink[ToRouter, FromRouter] = ServerLink(
            ctx.net,
            router_address(ctx.settings, ctx.id),
            receives=ToRouter,
            on_lost=self._gateway_lost,
        )
        export_link(ctx.registry, "gateways", self._link)
        ctx.registry.register(RouterCollector(lambda: self._engine, group.device))
        self._member = Member(
            ctx.net,
            planner_address(ctx.settings),
            hello=self._hello,
            load=self._load,
            on_view=self._on_view,
            on_command=self._on_command,
            log=ctx.log,
        )
        self.recordings = Recordings(
            ctx,
            lambda: None if self._engine is None else self._engine.recorder,
            self._member.send,
        )
        self._member.set_state("loading", detail="loading weights", progress=0.0)
        self._loaded = 0.0
        """Share of the weights."""
        ctx.health.why_not_ready = self._why_not_ready
        ctx.health.watch("compute", self._compute_count, self._wake_compute)

    # -------------------------------------------------------------- actors

    async def belong(self) -> None:
        """Be a member of the mesh. Raises ``RefusedByPlanner``."""
        await self._member.run()

    async def compute(self) -> None:
        """Load the model and run the engine until cancelled; a failure ends the service."""

        def begin() -> None:
            name_thread("compute")
            # OpenMP keeps the number of threads per calling thread.
            torch.set_num_threads(self._ctx.settings.router.threads)

        with ThreadPoolExecutor(1, "compute", begin) as pool:
            try:
                self._engine = await self._loop.run_in_executor(pool, self._make_engine)
                if self._member.view is not None:
                    self._engine.set_view(self._member.view)
                self._engine_changed()
                running = self._loop.run_in_executor(pool, self._engine.run)
                try:
                    await asyncio.shield(running)
                finally:
                    self._engine.stop()
                    await asyncio.wait([running])  # its last results are delivered by then
            except CheckpointError as error:
                raise CannotServe(str(error)) from error
            finally:
                self._abandoned = True

    async def warm_up(self) -> None:
        """Run a token through the mesh, again until it comes back; then the router is ready."""
        attempt = 0
        while not self._warm:
            await self._news.wait()
            self._news.clear()
            engine = self._engine
            if engine is None or engine.state.unserved:
                continue
            attempt += 1
            error = await self._try_token(engine, attempt)
            if error:
                self._ctx.log.warning("warm_up.failed", attempt=attempt, reason=error)
                self._news.set()
                await asyncio.sleep(_WARM_UP_PAUSE_S)
            else:
                self._warm = True
                self._show_state()
                self._ctx.ready()

    async def serve(self) -> None:
        """Take requests from gateways."""
        while True:
            gateway, message = await self._link.recv()
            self._heard[gateway] = self._loop.time()
            match message:
                case Submit():
                    self._submit(gateway, message)
                case Cancel(requests=requests):
                    if self._engine is not None:
                        self._engine.cancel(requests)
                case Ping():
                    self._note_gateway(gateway, message)
                    self._link.send(gateway, self._pong())

    async def watch(self) -> None:
        """Cancel what silent gateways asked for; notice an engine that does not get on."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            if self._engine is not None:
                self._stall.look(self._engine.progress, self._loop.time())
                self._show_state()
            silent_since = self._loop.time() - GATEWAY_SILENT_S
            for gateway in [g for g, heard in self._heard.items() if heard < silent_since]:
                self._gateway_lost(gateway)

    async def report_load(self) -> None:
        """Tell the planner how many tokens each expert and rank got."""
        reported: Loads | None = None
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            if self._engine is None:
                continue
            loads = self._engine.loads()
            report = loads.since(reported, self._ctx.id, self._ctx.incarnation)
            if report is not None and self._member.send(report):
                reported = loads

    def drain(self) -> None:
        """Say that no request is taken any more."""
        self._warm = False
        self._member.set_state("draining", detail="stopping")

    async def ended(self) -> None:
        """Until no sequence runs or waits here; what is left at the end is handed back."""
        while (engine := self._engine) is not None and (  # noqa: ASYNC110 - on another thread
            engine.state.running or engine.state.waiting or engine.progress is not None
        ):
            await asyncio.sleep(_DRAIN_LOOK_S)

    def close(self) -> None:
        self._link.close()

    # -------------------------------------------------------------- the engine

    def _make_engine(self) -> Engine:
        """On the compute thread."""
        ctx, exact = self._ctx, self._shape.exact
        network = ctx.settings.network
        model = self._group.load(self._load_progress)
        try:
            plane = router_plane(
                network.data_plane,
                ctx.id,
                ctx.incarnation,
                self._shape,
                self._digest,
                silence_s=network.lane_silence_ms / 1000,
                device=self._group.device,
            )
        except PlaneError as error:
            raise CannotServe(str(error)) from error
        ahead = None
        if goes_ahead(ctx.settings):
            ahead = self._group.steps_ahead(model, plane)
        return Engine(
            model,
            plane,
            ctx.settings.router,
            exact=exact,
            deliver=lambda results: self._in_loop(self._deliver, results),
            changed=lambda: self._in_loop(self._engine_changed),
            log=ctx.log,
            reach=reach(network.data_plane, host_id(ctx.settings)),
            matrix_threads=matrix_threads(ctx.settings),
            near="symm" if network.data_plane == "symm" else "shm",
            ahead=ahead,
        )

    def _load_progress(self, share: float) -> None:
        """On the compute thread."""
        if self._abandoned:
            raise _AbandonedError
        self._in_loop(self._progressed, share)

    def _in_loop(self, call: Callable[..., None], *args: object) -> None:
        """From the compute thread."""
        self._loop.call_soon_threadsafe(call, *args)

    def _compute_count(self) -> Hashable:
        """What changes while the compute thread gets on."""
        loading = (self._loaded, self._group.heard)
        return loading if self._engine is None else self._engine.turns

    def _wake_compute(self) -> None:
        if self._engine is not None:
            self._engine.wake()

    def _progressed(self, share: float) -> None:
        self._loaded = share
        if self._engine is None:
            self._member.set_state("loading", detail="loading weights", progress=share)

    def _deliver(self, results: Results) -> None:
        for gateway, deltas in results.deltas.items():
            if gateway == _OWN:
                for delta in deltas:
                    if delta.finish is not None:
                        self._warmed_up(delta.error)
            elif not self._link.send(gateway, Tokens(step=results.step, deltas=tuple(deltas))):
                self._gateway_lost(gateway)
        for gateway, rejected in results.rejected:
            if gateway == _OWN:
                self._warmed_up(rejected.reason)
            else:
                self._link.send(gateway, rejected)

    def _warmed_up(self, error: str) -> None:
        if self._warm_up_ended is not None and not self._warm_up_ended.done():
            self._warm_up_ended.set_result(error)

    def _engine_changed(self) -> None:
        self._news.set()
        self._show_state()
        self._member.report_now()  # a move of experts waits for every router to use its epoch

    async def _try_token(self, engine: Engine, attempt: int) -> str:
        """Returns what went wrong, or nothing."""
        ended: asyncio.Future[str] = self._loop.create_future()
        self._warm_up_ended = ended
        bos = self._spec.bos_token_id
        engine.submit(
            _OWN,
            Submit(
                request=f"warm-up-{attempt}",
                trace="warm-up",
                prompt=(0 if bos is None else bos,),
                sampling=Sampling(temperature=0.0, max_tokens=2, ignore_eos=True),
                deadline_ms=int(_WARM_UP_TIMEOUT_S * 1000),
            ),
        )
        return await ended

    # -------------------------------------------------------------- gateways

    def _submit(self, gateway: bytes, submit: Submit) -> None:
        reason, not_ready = "", not self._warm or self._engine is None
        if not_ready:
            reason = self._why_not_ready()
        else:
            assert self._engine is not None
            try:
                self._engine.submit(gateway, submit)
            except EngineBusyError:
                reason = "too many requests wait to be looked at"
        if reason:
            self._link.send(
                gateway,
                Rejected(
                    request=submit.request,
                    reason=reason,
                    retry_after_s=_RETRY_AFTER_S,
                    not_ready=not_ready,
                ),
            )

    def _pong(self) -> Pong:
        reason = self._why_not_ready()
        return Pong(
            router=self._ctx.id,
            incarnation=self._ctx.incarnation,
            ready=not reason,
            reason=reason,
            load=self._load(),
        )

    def _note_gateway(self, gateway: bytes, ping: Ping) -> None:
        """A gateway that comes back under its id wants nothing of what it asked for before."""
        known = self._pinged.get(ping.gateway)
        if known == (ping.incarnation, gateway):
            return
        if known is None or known[0] <= ping.incarnation:
            self._pinged[ping.gateway] = (ping.incarnation, gateway)
            self._ctx.log.info("gateway.joined", gateway=ping.gateway, incarnation=ping.incarnation)
            if known is not None and known[0] < ping.incarnation:
                self._gateway_lost(known[1])

    def _gateway_lost(self, gateway: bytes) -> None:
        if self._heard.pop(gateway, None) is not None and self._engine is not None:
            self._engine.cancel_all_of(gateway)

    # -------------------------------------------------------------- what others see

    def _why_not_ready(self) -> str:
        if self._member.state == "draining":
            return "the router is stopping"
        if self._engine is None:
            return "the router is loading weights"
        if self._engine.state.unserved:
            return self._engine.state.unserved
        if self._stall.stalled:
            return "the step under way does not get on"
        return "" if self._warm else "no token has gone through the mesh yet"

    def _show_state(self) -> None:
        if self._member.state != "draining":
            reason = self._why_not_ready()
            self._member.set_state("loading" if reason else "ready", detail=reason)

    def _on_view(self, view: View) -> None:
        if self._engine is not None:
            self._engine.set_view(view)

    def _on_command(self, command: Command) -> None:
        if isinstance(command, Record):
            self.recordings.command(command)
        else:
            self._ctx.log.warning("command.unexpected", command=command.command)

    def _hello(self) -> Hello:
        ctx = self._ctx
        return Hello(
            id=ctx.id,
            role="router",
            incarnation=ctx.incarnation,
            pid=ctx.pid,
            pid_namespace=ctx.pid_namespace,
            host=ctx.host,
            model_digest=self._digest,
            control=advertised(ctx.settings, self._link.address),
            host_id=host_id(ctx.settings),
            metrics=ctx.metrics_url,
            group=self._group.pids,
        )

    def _load(self) -> Load:
        return Load() if self._engine is None else self._engine.state.load()


def lane_shape(settings: Settings, spec: ModelSpec) -> LaneShape:
    """The lanes of a router with these settings. Raises ``CannotServe`` if they would be too large
    or otherwise impossible.
    """
    router = settings.router
    micro_batches = 2 if router.micro_batches == "auto" else int(router.micro_batches)
    shape = LaneShape(
        hidden=spec.hidden_size,
        top_k=spec.experts_per_token,
        capacity_tokens=router.capacity_tokens,
        ring_slots=_RING_SLOTS_PER_MICRO_BATCH * micro_batches,
        exact=settings.model.exact,
        wire=_WIRES[router.wire],
    )
    try:
        lay_out(shape)
    except PlaneError as error:
        raise CannotServe(str(error)) from error
    return shape


def goes_ahead(settings: Settings) -> bool:
    """Whether a router is to go through steps by itself, where it can."""
    ours, theirs = (
        "cuda:0" if device == "cuda" else device
        for device in (settings.router.device, settings.expert.device)
    )
    chosen = settings.router.ahead
    shares_gpu = ours == theirs and ours.startswith("cuda")
    return chosen == "on" or (chosen == "auto" and not shares_gpu)


def router_group(ctx: Context, path: Path, spec: ModelSpec) -> Group:
    """The processes of this router. Raises ``CannotServe`` for more than can share the model, and
    for a device that is not there.
    """
    router = ctx.settings.router
    on_device = router.device != "cpu"
    if router.tp > 1 and (fault := shard_fault(spec, router.tp)):
        raise CannotServe(f"router.tp = {router.tp} ({ctx.effective.origin['router.tp']}): {fault}")
    try:
        if router.tp == 1:
            return OnDevice(ctx, path) if on_device else Alone(ctx, path)
        several = SeveralOnDevices if on_device else Several
        return several(ctx, path, timeout_s=answer_timeout_s(router))
    except DeviceUnavailable as error:
        raise CannotServe(str(error)) from error


def check_cache(ctx: Context, spec: ModelSpec) -> None:
    """Raises ``CannotServe`` for a KV cache in which no sequence of full length fits."""
    router = ctx.settings.router
    if not router.kv_cache_bytes:
        return
    if fault := kv_cache_fault(spec, router.kv_cache_bytes, router.block_size, router.tp):
        raise CannotServe(
            f"router.kv_cache_bytes = {router.kv_cache_bytes} "
            f"({ctx.effective.origin['router.kv_cache_bytes']}): {fault}"
        )


async def main(ctx: Context) -> None:
    """Serve until ``ctx.stopping``. Raises ``CannotServe``, ``RefusedByPlanner`` or a crash."""
    model, tp = ctx.settings.model, ctx.settings.router.tp
    try:
        path = checkpoint_dir(model.path)
        spec, digest = load_spec(path), serving_digest(path, model.weights, model.exact, tp)
    except CheckpointError as error:
        raise CannotServe(str(error)) from error
    # Impossible settings must show before gigabytes of weights have been read.
    shape, group = lane_shape(ctx.settings, spec), router_group(ctx, path, spec)
    check_cache(ctx, spec)
    try:
        check_plane(ctx.settings.network.data_plane, group.device)
    except PlaneError as error:
        raise CannotServe(str(error)) from error
    router = Router(ctx, spec, digest, group, shape)
    try:
        await group.start()
        async with Supervisor(ctx.log, quiet=(RefusedByPlanner,)) as actors:
            actors.start("router.group", group.watch)
            actors.start("router.member", router.belong)
            actors.start("router.requests", router.serve)
            actors.start("router.watch", router.watch)
            actors.start("router.compute", router.compute)
            actors.start("router.warm_up", router.warm_up)
            actors.start("router.report", router.report_load)
            actors.start("router.record", router.recordings.run)
            await ctx.stopping.wait()
            router.drain()
            await ctx.until_drained(router.ended())
    finally:
        router.close()
        await group.close()
