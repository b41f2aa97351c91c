"""What every service process does the same way, from its flags to its exit code.

API
    ``run_service(role, main)``    the whole of a service's ``__main__``; never returns
    ``Context``                    what ``main(ctx)`` is given
    ``CannotServe(reason)``        raised by ``main``: exit with a message and no traceback
    ``ExitCode``                   what the launcher and systemd see

    Flags: ``--config FILE``, ``--id ID``, ``--set section.key=value`` (repeatable),
    ``--parent-pid PID`` (die with that launcher), ``--listen-fd FD`` (gateway),
    ``--cpus LIST`` (expert).

``main(ctx)`` serves until ``ctx.stopping`` is set. SIGTERM means: leave without a loss. ``main``
then does ``await ctx.until_drained(drained())``, which gives ``drained`` as long as it needs,
within the time that the role may take. SIGINT (Ctrl-C) means: stop now; ``until_drained`` then
returns at once: a mesh that stops as a whole moves nothing. After that ``main`` cleans up and
returns. It has ``STOP_GRACE_S`` for that before it is cancelled. Each further signal goes one step
on: from draining to stopping to being cancelled. A process that still hangs ``KILL_GRACE_S`` after
``main`` has ended, or should have, ends itself.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import structlog
import uvloop
from prometheus_client import CollectorRegistry
from structlog.typing import FilteringBoundLogger

from mesh import logs, metrics
from mesh.addresses import is_loopback
from mesh.config import ConfigError, Effective, assignment, load, name_fault
from mesh.cpus import parse_cpus
from mesh.health import Health, health_path
from mesh.links import LinkError, Net
from mesh.messages import Role
from mesh.processes import die_with, pid_namespace
from mesh.rundir import AlreadyRunning, RunDirError, claim, create_run_dir, take_along
from mesh.settings import Settings
from mesh.supervise import ActorCrashed, CannotServe, ExitCode

__all__ = [
    "KILL_GRACE_S",
    "STOP_GRACE_S",
    "CannotServe",
    "Context",
    "ExitCode",
    "drain_limit_s",
    "run_service",
]

STOP_GRACE_S = 10.0
KILL_GRACE_S = 5.0


@dataclass(slots=True)
class Context:
    """A service process's surroundings, made by ``run_service`` and owned by it."""

    role: Role
    id: str
    incarnation: int
    """``time.time_ns()`` at the process's start: larger in each later process of the same id."""
    settings: Settings
    effective: Effective
    run_dir: Path
    net: Net
    """Give it to every link."""
    registry: CollectorRegistry
    log: FilteringBoundLogger
    metrics_url: str = ""
    """Where this process's metrics are served; for ``Hello.metrics``."""
    listen_fd: int = -1
    """Gateway: the bound socket that it inherited to listen on; -1: it binds its own."""
    cpus: frozenset[int] = frozenset()
    """Expert worker: its share of the host's CPUs where ``expert.cpus`` is auto; empty: none."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """The service is to leave."""
    at_once: asyncio.Event = field(default_factory=asyncio.Event)
    """... without waiting for what it could still hand over or finish."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    pid_namespace: int = field(default_factory=pid_namespace)
    health: Health = field(init=False)
    """Tell it which threads to watch, and why the service is not ready."""

    def __post_init__(self) -> None:
        self.health = Health(health_path(self.run_dir, self.id), self.log)

    def ready(self) -> None:
        """The service does its work from now on: a token can be run, as far as it depends on it."""
        self.health.ready()
        self.log.info("service.ready")

    async def until_drained(self, drained: Coroutine[Any, Any, None]) -> None:
        """After ``stopping``: wait for ``drained``, which is cancelled when the time that it may
        take is over or the service is to stop at once.
        """
        limit_s = drain_limit_s(self.settings, self.role)
        draining = asyncio.ensure_future(drained)
        hurried = asyncio.ensure_future(self.at_once.wait())
        try:
            await asyncio.wait(
                [draining, hurried], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            if draining.done():
                draining.result()
                self.log.info("service.drained")
            elif not self.at_once.is_set():
                self.log.warning("service.not_drained", limit_s=limit_s)
        finally:
            for task in (draining, hurried):
                task.cancel()
                await asyncio.wait([task])


def drain_limit_s(settings: Settings, role: Role) -> float:
    """How long a process of ``role`` may take to drain: a gateway as long as its requests may."""
    limit_s = settings.mesh.drain_timeout_s
    return max(limit_s, settings.gateway.request_timeout_s) if role == "gateway" else limit_s


def run_service(
    role: Role, main: Callable[[Context], Awaitable[None]], argv: Sequence[str] | None = None
) -> NoReturn:
    """Parse flags, set the process up, run ``main`` and exit with an ``ExitCode``."""
    incarnation = time.time_ns()
    # What systemd's watchdog sends to a service that hangs then tells where each thread was.
    faulthandler.enable()
    _allow_open_files()
    flags = _parse(role, sys.argv[1:] if argv is None else argv)
    if flags.parent_pid:
        die_with(flags.parent_pid, signal.SIGINT)
    try:
        effective = load(flags.config, dict(flags.set), os.environ)
        run_dir = create_run_dir(effective.settings)
        held = claim(run_dir, flags.id)
    except (ConfigError, RunDirError) as error:
        # What logs should look like is not known before the configuration is.
        print(f"{role}: {error}", file=sys.stderr)
        running = isinstance(error, AlreadyRunning)
        raise SystemExit(ExitCode.ALREADY_RUNNING if running else ExitCode.CANNOT_SERVE) from None
    logs.configure(effective.settings.logs, role=role, id=flags.id)
    log = structlog.get_logger("service").bind(role=role, id=flags.id)
    with held:
        code = _run(role, flags, incarnation, effective, run_dir, log, main)
    if code == ExitCode.OK:
        take_along(effective.settings)
    sys.stdout.flush()
    sys.stderr.flush()
    # All that needs an end has had one. To take apart what was imported, torch above all, would
    # cost half a second of CPU for each process.
    os._exit(code)


def _run(
    role: Role,
    flags: argparse.Namespace,
    incarnation: int,
    effective: Effective,
    run_dir: Path,
    log: FilteringBoundLogger,
    main: Callable[[Context], Awaitable[None]],
) -> ExitCode:
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(role, flags, incarnation, effective, run_dir, log, main))
    except CannotServe as error:
        log.error("service.cannot_serve", reason=str(error))  # noqa: TRY400 - no bug, no traceback
        return error.exit_code
    except LinkError as error:
        log.error("service.cannot_serve", reason=str(error))  # noqa: TRY400
        return ExitCode.CANNOT_SERVE
    except ActorCrashed as error:
        log.error("service.crashed", reason=str(error))  # noqa: TRY400 - the supervisor logged it
        return ExitCode.CRASHED
    except (KeyboardInterrupt, asyncio.CancelledError):
        log.error("service.stop_forced", grace_s=STOP_GRACE_S)  # noqa: TRY400
        return ExitCode.CRASHED
    except Exception:
        log.exception("service.crashed")
        return ExitCode.CRASHED
    log.info("service.stopped")
    return ExitCode.OK


async def _serve(
    role: Role,
    flags: argparse.Namespace,
    incarnation: int,
    effective: Effective,
    run_dir: Path,
    log: FilteringBoundLogger,
    main: Callable[[Context], Awaitable[None]],
) -> None:
    settings = effective.settings
    registry = metrics.new_registry()
    async with AsyncExitStack() as stack:
        net = Net(settings.security, flags.id, role)
        stack.callback(net.close)
        metrics_url = ""
        # The gateway shows its own page at /metrics.
        if settings.metrics.enabled and role != "gateway":
            server = await metrics.serve(
                registry,
                settings.metrics.host,
                "" if is_loopback(settings.metrics.host) else settings.network.ports,
                shown=settings.network.advertise,
            )
            stack.push_async_callback(server.close)
            metrics_url = server.url
        ctx = Context(
            role=role,
            id=flags.id,
            incarnation=incarnation,
            settings=settings,
            effective=effective,
            run_dir=run_dir,
            net=net,
            registry=registry,
            log=log,
            metrics_url=metrics_url,
            listen_fd=flags.listen_fd,
            cpus=flags.cpus,
            host=settings.network.host_id or socket.gethostname(),
        )
        beats = asyncio.ensure_future(ctx.health.run())
        served = asyncio.ensure_future(main(ctx))
        stop = _Stop(ctx, served)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.on_signal, number)
        log.info("service.started", pid=ctx.pid, incarnation=incarnation, metrics=metrics_url)
        # What was imported lives as long as the process: spare the collector looking at it. It was
        # off until now where the import of this module's caller takes long.
        gc.freeze()
        gc.enable()
        try:
            await served
        finally:
            _end_in(KILL_GRACE_S)
            beats.cancel()
            await asyncio.wait([beats])


class _Stop:
    """From a signal to the end of the process, whatever ``main`` does."""

    def __init__(self, ctx: Context, served: asyncio.Future[None]) -> None:
        self._ctx = ctx
        self._served = served

    def on_signal(self, number: signal.Signals) -> None:
        ctx = self._ctx
        if ctx.at_once.is_set():
            self._served.cancel()
            return
        limit_s = 0.0
        if ctx.stopping.is_set() or number == signal.SIGINT:
            ctx.at_once.set()
        else:
            limit_s = drain_limit_s(ctx.settings, ctx.role)
        asyncio.get_running_loop().call_later(limit_s + STOP_GRACE_S, self._served.cancel)
        _end_in(limit_s + STOP_GRACE_S + KILL_GRACE_S)
        if ctx.stopping.is_set():
            return
        ctx.stopping.set()
        ctx.log.info("service.stopping", at_once=ctx.at_once.is_set())
        ctx.health.stopping()


def _end_in(delay_s: float) -> None:
    """End the process then, unless it has ended by itself.

    The event loop, or a thread that is joined at exit, may hang: only another thread helps.
    """
    last = threading.Timer(delay_s, os._exit, [ExitCode.CRASHED])
    last.daemon = True
    last.start()


def _parse(role: Role, argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"moemesh {role}", description=f"moemesh {role} service")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of the mesh")
    parser.add_argument(
        "--id",
        type=_id,
        default="planner" if role == "planner" else f"{role}-0",
        help="name of this process in the mesh (default: %(default)s)",
    )
    parser.add_argument(
        "--set",
        type=assignment,
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one setting; may be repeated",
    )
    parser.add_argument(
        "--parent-pid", type=int, default=0, metavar="PID", help="stop when this process ends"
    )
    parser.add_argument(
        "--listen-fd",
        type=int,
        default=-1,
        metavar="FD",
        help="gateway: listen on this inherited socket instead of gateway.port",
    )
    parser.add_argument(
        "--cpus",
        type=_cpus,
        default=frozenset(),
        metavar="LIST",
        help="expert: its share of the CPUs, where expert.cpus is auto",
    )
    return parser.parse_args(argv)


def _id(text: str) -> str:
    if fault := name_fault(text):
        raise argparse.ArgumentTypeError(fault)
    return text


def _cpus(text: str) -> frozenset[int]:
    try:
        return parse_cpus(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected CPUs, such as 0-3,8") from None


def _allow_open_files() -> None:
    """As many as the hard limit admits: the soft one is for programs that use select(2)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
