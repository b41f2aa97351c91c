"""Which processes a mesh consists of, and how each is started. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mesh.settings import Settings

ServiceRole = Literal["planner", "expert", "router", "gateway"]

MODULE: dict[ServiceRole, str] = {
    "planner": "planner_svc",
    "expert": "expert_svc",
    "router": "router_svc",
    "gateway": "gateway",
}

START_ORDER: tuple[ServiceRole, ...] = ("planner", "router", "expert", "gateway")
"""Everyone waits for the planner; routers have the most to load."""

STOP_ORDER: tuple[ServiceRole, ...] = ("gateway", "router", "expert", "planner")
"""From the client inwards: nobody loses a peer that it still needs."""

WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (recognised, not bound)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One child: its member id, its role and the command line that starts it."""

    id: str
    role: ServiceRole
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one gateway listens and where a client on this host reaches it."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return (
            f"http://[{self.host}]:{self.port}"
            if ":" in self.host
            else (f"http://{self.host}:{self.port}")
        )


def compose(
    settings: Settings,
    *,
    config: Path | None,
    overrides: Mapping[str, str],
    python: str,
    parent_pid: int,
) -> tuple[ProcessSpec, ...]:
    """The processes of the mesh that ``settings`` describes, in the order to start them.

    Children read the same file and environment as the launcher and get its flags on as ``--set``,
    so that each shows the same origin for a value. ``parent_pid`` makes a child die with the
    launcher even when that is killed. ``python -P`` keeps the working directory off the module
    path, where a folder named ``gateway`` would shadow ours.
    """
    counts: dict[ServiceRole, int] = {
        "planner": 1,
        "expert": settings.mesh.experts,
        "router": settings.mesh.routers,
        "gateway": settings.mesh.gateways,
    }
    specs: list[ProcessSpec] = []
    for role in START_ORDER:
        for index in range(counts[role]):
            own = dict(overrides)
            if role == "gateway" and index > 0:
                own["gateway.port"] = str(settings.gateway.port + index)
            argv = [python, "-P", "-m", MODULE[role]]
            argv += ["--id", member_id(role, index), "--parent-pid", str(parent_pid)]
            if config is not None:
                argv += ["--config", str(config)]
            for key, value in own.items():
                argv += ["--set", f"{key}={value}"]
            specs.append(ProcessSpec(member_id(role, index), role, tuple(argv)))
    return tuple(specs)


def member_id(role: ServiceRole, index: int) -> str:
    """``planner``, ``expert-0``, ``expert-1``, ..., the same after each restart."""
    return role if role == "planner" else f"{role}-{index}"


def endpoints(settings: Settings) -> tuple[Endpoint, ...]:
    """Each gateway as a client on this host sees it; gateway i listens on ``port + i``."""
    host = WILDCARD_HOSTS.get(settings.gateway.host, settings.gateway.host)
    return tuple(
        Endpoint(host, settings.gateway.port + index) for index in range(settings.mesh.gateways)
    )
