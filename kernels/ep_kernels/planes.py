"""The data plane that a setting names; gloo, NCCL and Triton are imported where they are chosen.

``auto``, ``shm`` and ``tcp`` are one plane on a router, which takes the lanes that it is given
addresses of; on an expert worker they differ by where it listens. Rows lie in host memory, but on
``device`` with ``nccl`` and ``symm``, and with ``gloo`` where its memory is the host's
(``interpreter``). A plane's ``on_device`` says which.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import torch
import torch.distributed

from ep_kernels.plane import LaneShape, PlaneError
from ep_kernels.shm.expert import ShmExpertPlane
from ep_kernels.shm.router import ShmRouterPlane
from ep_kernels.tcp.expert import TcpExpertPlane
from ep_kernels.tcp.router import TcpRouterPlane

if TYPE_CHECKING:
    from ep_kernels.group.backend import Backend
    from ep_kernels.triton.device import Device

Choice = Literal["auto", "shm", "tcp", "gloo", "nccl", "symm"]

_CPU: Final = torch.device("cpu")


def check_plane(choice: Choice, device: Device | None) -> None:
    """Raises ``PlaneError`` where this process cannot have the plane; says what is missing."""
    if choice in ("gloo", "nccl"):
        _backend(choice, device)
    elif choice == "symm":
        _check_device(device)


def router_plane(
    choice: Choice,
    router_id: str,
    incarnation: int,
    shape: LaneShape,
    digest: str,
    *,
    silence_s: float,
    device: Device | None = None,
) -> ShmRouterPlane:
    """``device``: where the router computes, if not on the CPU. Raises ``PlaneError``, which says
    what is missing.
    """
    if choice in ("gloo", "nccl"):
        backend = _backend(choice, device)
        from ep_kernels.group.router import GroupRouterPlane  # noqa: PLC0415 - where it is chosen

        return GroupRouterPlane(router_id, incarnation, shape, digest, backend, silence_s=silence_s)
    if choice == "symm":
        computing = _check_device(device)
        from ep_kernels.triton.symm import SymmRouterPlane  # noqa: PLC0415 - the same

        return SymmRouterPlane(router_id, incarnation, shape, digest, computing)
    return TcpRouterPlane(router_id, incarnation, shape, digest, silence_s=silence_s)


@dataclass(frozen=True, slots=True)
class Listening:
    """Where an expert worker takes lanes: at the Unix socket ``path``, at the first free one of
    ``ports`` of ``host``, or both; empty: not there. ``key`` lets routers in at a port.
    """

    path: str = ""
    host: str = ""
    ports: Iterable[int] = (0,)
    key: bytes = field(default=b"", repr=False)


def expert_plane(
    choice: Choice,
    expert_id: str,
    incarnation: int,
    hidden: int,
    digest: str,
    max_lanes: int,
    *,
    at: Listening,
    silence_s: float,
    device: Device | None = None,
) -> ShmExpertPlane:
    """``device``: where the expert worker computes, if not on the CPU. What listens at a port is a
    ``TcpExpertPlane``. Raises ``PlaneError``, which says what is missing.
    """
    if choice in ("gloo", "nccl"):
        backend = _backend(choice, device)
        from ep_kernels.group.expert import GroupExpertPlane  # noqa: PLC0415 - where it is chosen

        return GroupExpertPlane(
            expert_id, incarnation, hidden, digest, max_lanes, backend=backend,
            host=at.host, ports=at.ports, key=at.key, silence_s=silence_s,
        )  # fmt: skip
    if choice == "symm":
        computing = _check_device(device)
        from ep_kernels.triton.symm import SymmExpertPlane  # noqa: PLC0415 - the same

        return SymmExpertPlane(
            expert_id, incarnation, at.path, hidden, digest, max_lanes, device=computing
        )
    if at.host:
        return TcpExpertPlane(
            expert_id, incarnation, at.path, hidden, digest, max_lanes,
            host=at.host, ports=at.ports, key=at.key, silence_s=silence_s,
        )  # fmt: skip
    return ShmExpertPlane(expert_id, incarnation, at.path, hidden, digest, max_lanes)


def _backend(choice: Choice, device: Device | None) -> Backend:
    if not torch.distributed.is_available():
        raise PlaneError(
            f"the {choice} plane needs torch.distributed, which torch {torch.__version__} is built "
            "without"
        )
    from ep_kernels.group.backend import GlooBackend, NcclBackend  # noqa: PLC0415 - where chosen

    if choice == "nccl":
        return NcclBackend(_CPU if device is None else device.place)
    return GlooBackend(on_device=device is not None and device.place == _CPU)


def _check_device(device: Device | None) -> Device:
    if device is None:
        raise PlaneError(
            "the symm plane's rows lie on devices, and this process computes on the CPU: "
            "router.device and expert.device must both be cuda (or both interpreter)"
        )
    return device
