"""``moemesh up``: start a whole mesh on this host and stay until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from compose.console import LauncherConsole
from compose.holder import claim_mesh, release_mesh
from compose.launcher import Launcher
from compose.model import check_workers, served_model
from compose.options import Source, UsageError
from compose.processes import compose, endpoints
from mesh.rundir import RunDirError
from mesh.service import KILL_GRACE_S, STOP_GRACE_S
from mesh.settings import Settings

_FLAGS = {
    "model.path": "--model",
    "mesh.routers": "--routers",
    "mesh.experts": "--experts",
    "mesh.gateways": "--gateways",
    "gateway.port": "--port",
}


def up(
    *,
    source: Source = Source(),  # noqa: B008 (frozen)
    model: Annotated[
        Path | None,
        Parameter(help="Directory of a Hugging Face checkpoint; else the model that ships."),
    ] = None,
    routers: Annotated[int | None, Parameter(help="Number of routers (attention).")] = None,
    experts: Annotated[int | None, Parameter(help="Number of expert workers.")] = None,
    gateways: Annotated[
        int | None, Parameter(help="Number of gateways; the i-th listens on PORT + i.")
    ] = None,
    port: Annotated[
        int | None, Parameter(help="Port of the first gateway; 0: any free one.")
    ] = None,
    start_timeout: Annotated[
        float, Parameter(help="Seconds after which a mesh that is not ready is given up.")
    ] = 600.0,
    grace: Annotated[
        float, Parameter(help="Seconds a process may take to stop before it is killed.")
    ] = STOP_GRACE_S + KILL_GRACE_S + 1,
) -> int:
    """Start a mesh on this host, wait until it can run a token, stay until Ctrl-C."""
    flags: dict[str, object] = {
        "model.path": model,
        "mesh.routers": routers,
        "mesh.experts": experts,
        "mesh.gateways": gateways,
        "gateway.port": port,
    }
    effective = source.effective(flags, _FLAGS)
    if effective.settings.gateway.port == 0:
        flags["gateway.port"] = _free_port(effective.settings.gateway.host)
        effective = source.effective(flags, _FLAGS)
    settings = effective.settings
    name, spec = served_model(settings)
    check_workers(effective, spec)
    _check_ports(settings)
    specs = compose(
        settings,
        config=source.config,
        overrides=source.overrides(flags),
        python=sys.executable,
        parent_pid=os.getpid(),
    )
    try:
        run_dir, held = claim_mesh(settings)
    except RunDirError as error:
        raise UsageError(str(error), exit_code=1) from None
    exit_code = 1
    try:
        with LauncherConsole(Console()) as console:
            launcher = Launcher(
                settings,
                specs,
                run_dir,
                console,
                model=name,
                grace_s=grace,
                start_timeout_s=start_timeout,
            )
            exit_code = asyncio.run(launcher.run())
        return exit_code
    finally:
        release_mesh(run_dir, held, settings, keep_logs=exit_code != 0)


def _free_port(host: str) -> int:
    with _listening_socket(host, 0) as probe:
        port: int = probe.getsockname()[1]
        return port


def _check_ports(settings: Settings) -> None:
    """A taken port is said now, not by a gateway that fails while the weights load."""
    host = settings.gateway.host
    for endpoint in endpoints(settings):
        _listening_socket(host, endpoint.port).close()


def _listening_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
    except OSError as error:
        probe.close()
        raise UsageError(
            f"gateway.port: cannot listen on {host}:{port} ({error.strerror}); choose another "
            "with --port",
            exit_code=1,
        ) from None
    return probe
