"""``moemesh up``: start a whole mesh on this host and stay until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from compose.console import LastingConsole, LauncherConsole
from compose.fleet import Fleet, Most
from compose.holder import claim_mesh, release_mesh
from compose.keys import check_keys
from compose.launcher import Launcher
from compose.listeners import Listeners
from compose.model import (
    check_cache,
    check_experts,
    check_groups,
    check_workers,
    served_model,
)
from compose.options import Source, UsageError
from compose.processes import Recipe, ServiceRole
from mesh.config import MAX_GATEWAYS
from mesh.exposure import exposure_fault
from mesh.rundir import AlreadyRunning
from mesh.service import KILL_GRACE_S, STOP_GRACE_S
from mesh.settings import Settings
from moe_model.architecture import ModelSpec

_FLAGS = {
    "model.path": "--model",
    "mesh.routers": "--routers",
    "mesh.experts": "--experts",
    "mesh.gateways": "--gateways",
    "router.tp": "--tp",
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
    tp: Annotated[
        int | None, Parameter(help="Processes that share each router's attention.")
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
        "router.tp": tp,
        "gateway.port": port,
    }
    for flag, seconds in (("--start-timeout", start_timeout), ("--grace", grace)):
        if not seconds > 0:
            raise UsageError(f"{flag} {seconds:g}: expected more than 0 seconds")
    source.refuse_conflicts(flags, _FLAGS)
    effective = source.effective(flags, _FLAGS)
    if fault := exposure_fault(effective.settings.gateway, os.environ):
        raise UsageError(fault)
    name, spec = served_model(effective.settings)
    check_workers(effective, spec)
    check_groups(effective, spec)
    check_experts(effective, spec)
    check_cache(effective, spec)
    gateway = effective.settings.gateway
    with Listeners(gateway.host, gateway.port) as listeners:
        fds = [listeners.open(index) for index in range(effective.settings.mesh.gateways)]
        flags["gateway.port"] = listeners.first_port
        settings = source.effective(flags, _FLAGS).settings
        recipe = Recipe(
            settings,
            config=source.config,
            overrides=source.overrides(flags),
            python=sys.executable,
            parent_pid=os.getpid(),
            cpus=os.sched_getaffinity(0),
        )
        specs = recipe.specs(fds)
        check_keys(settings, specs)
        try:
            run_dir, held = claim_mesh(settings)
        except AlreadyRunning as error:
            raise UsageError(
                f"{error}: stop it with `moemesh down`, or start this one beside it with "
                "`--set mesh.name=OTHER` and another port",
                exit_code=1,
            ) from None
        exit_code = 1
        try:
            with LauncherConsole(LastingConsole()) as console:
                launcher = Launcher(
                    settings,
                    specs,
                    run_dir,
                    console,
                    model=name,
                    fleet_of=lambda crew, planner: Fleet(
                        crew,
                        planner,
                        recipe,
                        listeners,
                        _most(settings, spec),
                        lambda new: check_keys(settings, new),
                    ),
                    grace_s=grace,
                    start_timeout_s=start_timeout,
                )
                exit_code = asyncio.run(launcher.run())
            return exit_code
        finally:
            release_mesh(run_dir, held, settings, keep_logs=exit_code != 0)


def _most(settings: Settings, spec: ModelSpec) -> dict[ServiceRole, Most]:
    slots = spec.num_experts + settings.planner.redundant_slots
    lanes = settings.expert.max_lanes
    return {
        "expert": Most(slots, "one slot of a layer each"),
        "router": Most(lanes, "each has a lane to each expert worker (expert.max_lanes)"),
        "gateway": Most(
            min(MAX_GATEWAYS, 65536 - settings.gateway.port), "each has a port of its own"
        ),
    }
