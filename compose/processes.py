"""Which processes a mesh consists of, and how each is started. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mesh.cpus import AUTO, cpus_text, share_of
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


ADMIN = "admin"
"""Id by which ``moemesh`` itself speaks to a mesh, and so the name of its key."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One child: its member id, its role and the command line that starts it."""

    id: str
    role: ServiceRole
    argv: tuple[str, ...]
    inherits: tuple[int, ...] = ()
    """File descriptors that it gets, under their numbers here."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one gateway listens and where a client on this host reaches it."""

    host: str
    port: int
    tls: bool = False

    @property
    def url(self) -> str:
        scheme = "https" if self.tls else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"


class Recipe:
    """How each process of the mesh that ``settings`` describes is started.

    Children read the same file and environment as the launcher and get its flags on as ``--set``,
    so that each shows the same origin for a value. ``parent_pid`` makes a child die with the
    launcher even when that is killed. ``python -P`` keeps the working directory off the module
    path, where a folder named ``gateway`` would shadow ours.

    ``cpus``: those of this host that may be used; expert workers divide them if they are to.
    ``counts``: how many of each role there are to be; what a planner starts with follows it.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        config: Path | None,
        overrides: Mapping[str, str],
        python: str,
        parent_pid: int,
        cpus: Collection[int] = (),
    ) -> None:
        self._port = settings.gateway.port
        self._config = config
        self._overrides = overrides
        self._python = python
        self._parent_pid = parent_pid
        divided = settings.expert.cpus == AUTO and settings.expert.device == "cpu"
        self._cpus = cpus if divided else ()
        self._expert_threads = settings.expert.threads
        self._configured: dict[ServiceRole, int] = {
            "planner": 1,
            "expert": settings.mesh.experts,
            "router": settings.mesh.routers,
            "gateway": settings.mesh.gateways,
        }
        self.counts = dict(self._configured)

    def specs(self, listen_fds: Sequence[int] = ()) -> tuple[ProcessSpec, ...]:
        """All processes, in the order to start them; ``listen_fds``: one a gateway, if any."""
        return tuple(
            self.spec(
                role,
                index,
                listen_fd=listen_fds[index] if role == "gateway" and listen_fds else -1,
            )
            for role in START_ORDER
            for index in range(self.counts[role])
        )

    def spec(
        self,
        role: ServiceRole,
        index: int,
        *,
        shares: int | None = None,
        listen_fd: int = -1,
        among: int | None = None,
    ) -> ProcessSpec:
        """A gateway listens on ``listen_fd`` if that is a descriptor; ``shares``: the gateway whose
        port it has, if not its own. An expert worker has its part of the CPUs as one of ``among``
        workers, if not of ``counts``.
        """
        own = dict(self._overrides)
        for other, count in self.counts.items():
            if count != self._configured[other]:
                own[f"mesh.{other}s"] = str(count)
        which = index if shares is None else shares
        if role == "gateway" and which > 0:
            own["gateway.port"] = str(self._port + which)
        argv = [self._python, "-P", "-m", MODULE[role]]
        argv += ["--id", member_id(role, index), "--parent-pid", str(self._parent_pid)]
        if self._config is not None:
            argv += ["--config", str(self._config)]
        for key, value in own.items():
            argv += ["--set", f"{key}={value}"]
        if role == "expert":
            workers = self.counts[role] if among is None else among
            if share := share_of(self._cpus, index, workers, self._expert_threads):
                argv += ["--cpus", cpus_text(share)]
        inherits: tuple[int, ...] = ()
        if listen_fd >= 0:
            argv += ["--listen-fd", str(listen_fd)]
            inherits = (listen_fd,)
        return ProcessSpec(member_id(role, index), role, tuple(argv), inherits)


def member_id(role: ServiceRole, index: int) -> str:
    """``planner``, ``expert-0``, ``expert-1``, ..., the same after each restart."""
    return role if role == "planner" else f"{role}-{index}"


def member_index(id_: str) -> int:
    """Which of its role a member is: the reverse of ``member_id``."""
    _, _, number = id_.rpartition("-")
    return int(number) if number.isdigit() else 0


def endpoints(settings: Settings, count: int | None = None) -> tuple[Endpoint, ...]:
    """Each gateway as a client on this host sees it; gateway i listens on ``port + i``. ``count``
    of them, or as many as configured.
    """
    host = WILDCARD_HOSTS.get(settings.gateway.host, settings.gateway.host)
    tls = bool(settings.gateway.tls_cert)
    return tuple(
        Endpoint(host, settings.gateway.port + index, tls)
        for index in range(settings.mesh.gateways if count is None else count)
    )
