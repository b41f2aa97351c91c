"""The gateway process: the model's files, the mesh, and the HTTP server in one event loop."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import socket
import time
from pathlib import Path

from gateway.access import guard, tls_context
from gateway.admission import Admission
from gateway.affinity import PrefixTable
from gateway.api.app import build_app
from gateway.api.engine import Engine, ServedModel
from gateway.api.sampling import Defaults
from gateway.chat import find_template
from gateway.errors import Unavailable
from gateway.meters import Meters
from gateway.pool import Pool
from gateway.routers import Routers
from gateway.server import Server
from gateway.text import Tokenizer, TokenizerError
from mesh.addresses import WILDCARDS
from mesh.admin import PlannerDesk
from mesh.hosts import host_id
from mesh.listener import authority, bound_socket
from mesh.member import Member
from mesh.messages import Hello, Load, View
from mesh.rundir import planner_address
from mesh.service import CannotServe, Context
from mesh.settings import GatewaySettings, ModelSettings, RouterSettings
from mesh.supervise import Supervisor
from moe_model.errors import CheckpointError
from moe_model.shipped import checkpoint_dir, model_id
from moe_model.spec import SamplingDefaults, load_spec, serving_digest

_BACKLOG = 1024
_FINISH_S = 5.0
_LAST_REQUESTS_S = 1.0
"""How long a connection that was taken at the last moment has to send its request."""
_LOOK_S = 0.05
_FLUSH_S = 2.0
"""How long clients of requests that were ended have to read it."""


def served_model(settings: ModelSettings, tp: int) -> tuple[ServedModel, str]:
    """The model that ``settings`` name, and what the mesh must have in common to serve it, with
    routers of ``tp`` processes each.

    Raises ``CannotServe`` naming the file that is missing or wrong.
    """
    try:
        path = checkpoint_dir(settings.path)
        spec = load_spec(path)
        digest = serving_digest(path, settings.weights, settings.exact, tp)
        tokenizer = Tokenizer(path)
        template = find_template(path, tokenizer.config)
        name = model_id(settings.name, settings.path)
    except (CheckpointError, TokenizerError) as error:
        raise CannotServe(str(error)) from error
    model = ServedModel(
        id=name,
        root=str(settings.path or name),
        created=int(time.time()),
        tokenizer=tokenizer,
        template=template,
        vocab_size=spec.vocab_size,
        context=spec.max_context,
        defaults=_defaults(spec.sampling),
    )
    return model, digest


def _defaults(given: SamplingDefaults) -> Defaults:
    sampling = given.filled()
    return Defaults(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=given.max_new_tokens,
    )


def listen(settings: GatewaySettings, inherited: int = -1) -> socket.socket:
    """A listening socket for the HTTP server: ``inherited``, if that is a descriptor, else one of
    its own. Raises ``CannotServe`` when the address is taken or the descriptor is none.
    """
    try:
        if inherited >= 0:
            listener = socket.socket(fileno=inherited)
        else:
            listener = bound_socket(settings.host, settings.port)
        listener.listen(_BACKLOG)
    except OSError as error:
        where = authority(settings.host, settings.port)
        raise CannotServe(f"cannot listen on {where}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def known_routers(settings: RouterSettings) -> Routers:
    """No router yet; how much each will take is in the mesh's configuration."""
    slack = min(settings.max_waiting, max(1, settings.max_running // 8))
    return Routers(PrefixTable(), max_running=settings.max_running, slack=slack)


async def serve(ctx: Context, *, finish_s: float = _FINISH_S) -> None:
    """Serve until ``ctx.stopping``. Then no connection is taken any more; a gateway that drains
    ends what it was asked for, one that must stop at once has ``finish_s`` for it.

    Raises ``CannotServe``.
    """
    settings = ctx.settings.gateway
    doorman = guard(settings, os.environ)
    tls = tls_context(settings)
    listener = listen(settings, ctx.listen_fd)
    model, digest = served_model(ctx.settings.model, ctx.settings.router.tp)
    port = listener.getsockname()[1]
    known_as = ctx.settings.network.advertise if settings.host in WILDCARDS else ""
    url = f"{'https' if tls else 'http'}://{authority(known_as or settings.host, port)}"
    meters = Meters(ctx.registry)
    admission = Admission(settings.max_queue, doorman.tenants, time.monotonic())

    async with Supervisor(ctx.log) as front:
        pool = Pool(
            ctx.net,
            gateway=ctx.id,
            incarnation=ctx.incarnation,
            routers=known_routers(ctx.settings.router),
            router_wait_s=settings.router_wait_s,
            spawn=front.task,
            log=ctx.log,
        )
        engine = Engine(
            model=model,
            pool=pool,
            admission=admission,
            meters=meters,
            spawn=front.task,
            max_body_bytes=settings.max_body_bytes,
            request_timeout_s=settings.request_timeout_s,
            one_tenant=doorman.one_tenant,
        )
        _watch(meters, engine)

        def apply_view(view: View) -> None:
            pool.apply_view(view)
            pool.drained = any(
                (one.id, one.incarnation, one.state) == (ctx.id, ctx.incarnation, "draining")
                for one in view.members
            )
            server.lets_go = pool.drained or ctx.stopping.is_set()

        member = Member(
            ctx.net,
            planner_address(ctx.settings),
            hello=lambda: Hello(
                id=ctx.id,
                role="gateway",
                incarnation=ctx.incarnation,
                pid=ctx.pid,
                pid_namespace=ctx.pid_namespace,
                host=ctx.host,
                model_digest=digest,
                control=url,
                host_id=host_id(ctx.settings),
                metrics=f"{url}/metrics" if ctx.settings.metrics.enabled else "",
            ),
            load=lambda: Load(
                running=len(pool.table) - pool.table.waiting,
                waiting=pool.table.waiting,
                resident_bytes=_resident_bytes(),
            ),
            on_view=apply_view,
            log=ctx.log,
            state="ready",
        )
        server = Server(
            build_app(
                engine,
                doorman,
                PlannerDesk(ctx.net, planner_address(ctx.settings)),
                ctx.registry,
                ctx.log,
            ),
            grace_s=math.ceil(finish_s + _FLUSH_S),
            max_connections=settings.max_connections,
            tls=tls,
        )

        def end_requests() -> None:
            pool.table.fail_all(Unavailable("The gateway is stopping."))

        serving = front.task(server.serve(sockets=[listener]), name="http")
        try:
            async with Supervisor(ctx.log) as actors:
                actors.start("member", member.run)
                actors.start("pool", pool.run)
                ctx.log.info("gateway.listening", url=url, model=model.id)
                ctx.health.why_not_ready = pool.why_not_ready
                front.task(_first_ready(ctx, pool))
                await ctx.stopping.wait()
                member.set_state("draining")
                pool.stop()
                server.stop_accepting()
                await ctx.until_drained(_ended(server))
                server.should_exit = True
                asyncio.get_running_loop().call_later(finish_s, end_requests)
                await serving
        finally:
            # After an actor's crash, too, every client hears how its request ended.
            pool.stop()
            end_requests()
            server.should_exit = True
            await asyncio.wait([serving])
            engine.close()


async def _first_ready(ctx: Context, pool: Pool) -> None:
    """The gateway listens at once, and is ready when the mesh can first run a token."""
    while pool.why_not_ready():
        if ctx.stopping.is_set():
            return
        await asyncio.sleep(_LOOK_S)
    ctx.ready()


async def _ended(server: Server) -> None:
    """Until all requests have ended, those of connections included that were taken a moment ago."""
    await asyncio.sleep(_LAST_REQUESTS_S)
    while server.busy:  # noqa: ASYNC110 - uvicorn does not say when an answer is complete
        await asyncio.sleep(_LOOK_S)


def _watch(meters: Meters, engine: Engine) -> None:
    table, admission = engine.pool.table, engine.admission
    meters.watch(
        "num_requests_running", "Sequences on a router.", lambda: len(table) - table.waiting
    )
    meters.watch("num_requests_waiting", "Sequences without a router.", lambda: table.waiting)
    meters.watch("num_requests_admitted", "Sequences in flight.", lambda: admission.in_flight)
    meters.watch_count(
        "requests_moved", "Sequences taken over from lost routers.", lambda: table.moved
    )


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    return pages * resource.getpagesize()
