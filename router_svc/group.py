"""The processes that compute one router's model together: this one alone, or a leader's followers.

A router with ``router.tp`` = n is a group of n processes on one host. The one that is started as a
router is the leader and starts the others itself, so that a router is one service wherever it runs.
The group lives and dies as one: followers end with their leader, and when one of them ends, so does
the leader, which whoever started it starts again.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import msgspec
from ep_kernels.plane import RouterPlane
from ep_kernels.shm.router import ShmRouterPlane
from ep_kernels.triton.device import INTERPRETER, Device, open_device

from mesh.service import CannotServe, Context, ExitCode
from mesh.settings import Settings
from moe_model.ahead import host_ahead
from moe_model.forward import ServedModel
from moe_model.model import RouterModel, load_router_model
from moe_model.shard_model import load_shard
from router_svc.ahead import StepsAhead
from router_svc.follower import Assignment
from router_svc.group_model import GroupModel
from router_svc.peers import FollowerLinks, GroupLost

Progress = Callable[[float], None]

_MOST_MATRIX_THREADS = 4
"""By default: so many cores read about as fast as memory gives."""


class Group(Protocol):
    """A router's processes. ``load`` is for the compute thread, the rest for the event loop."""

    pids: tuple[int, ...]
    """Those beside this one, in order of rank."""

    @property
    def device(self) -> Device | None:
        """Where this one computes, if not on the CPU."""

    @property
    def heard(self) -> int:
        """Grows while the others get on with loading."""

    async def start(self) -> None:
        """Start the others; ``close`` must follow."""

    async def watch(self) -> None:
        """Raises ``GroupLost`` when one of the others ends, ``CannotServe`` when it cannot load."""

    def load(self, progress: Progress) -> ServedModel:
        """The model, once every process has its part. ``progress`` gets the share that this one has
        done, 1.0 again and again while it waits for the others; it may raise. Raises
        ``CheckpointError`` and ``GroupLost``.
        """

    def steps_ahead(self, model: ServedModel, plane: RouterPlane) -> StepsAhead | None:
        """Steps of the ``model`` that ``load`` has returned, over the ``plane``'s lanes, which a
        device or C goes through by itself; None where they are not to be had. On the compute
        thread.
        """

    async def close(self) -> None:
        """End the others."""


class Alone:
    """``router.tp`` = 1: no others."""

    device: Device | None = None
    pids: tuple[int, ...] = ()
    heard = 0

    def __init__(self, ctx: Context, path: Path) -> None:
        self._model = ctx.settings.model
        self._settings = ctx.settings
        self._path = path

    async def start(self) -> None:
        pass

    async def watch(self) -> None:
        pass

    def load(self, progress: Progress) -> ServedModel:
        model = self._model
        return load_router_model(
            self._path, weights=model.weights, exact=model.exact, progress=progress
        )

    def steps_ahead(self, model: ServedModel, plane: RouterPlane) -> StepsAhead | None:
        assert isinstance(model, RouterModel), "what load returned"
        if self._settings.network.data_plane not in {"auto", "shm"}:
            return None
        assert isinstance(plane, ShmRouterPlane), "both planes' routers are"
        choice, shares = self._settings.router.replica_choice, matrix_threads(self._settings) > 1
        return host_ahead(model, plane, choice=choice, shares=shares)

    async def close(self) -> None:
        pass


class OnDevice(Alone):
    """The same on a device."""

    def __init__(self, ctx: Context, path: Path) -> None:
        """Raises ``DeviceUnavailable``."""
        super().__init__(ctx, path)
        self.device: Device = open_device(ctx.settings.router.device)

    def load(self, progress: Progress) -> ServedModel:
        # Imported here: a router on a CPU needs no Triton, and takes no time to load it.
        from moe_model.device.model import load_device_model  # noqa: PLC0415

        return load_device_model(
            self._path,
            self.device,
            weights=device_weights(self._model.weights),
            progress=progress,
        )

    def steps_ahead(self, model: ServedModel, plane: RouterPlane) -> StepsAhead | None:
        from ep_kernels.triton.symm import SymmRouterPlane  # noqa: PLC0415 - as above

        from moe_model.device.ahead import DeviceAhead  # noqa: PLC0415
        from moe_model.device.model import DeviceModel  # noqa: PLC0415

        assert isinstance(model, DeviceModel), "what load returned"
        if not isinstance(plane, SymmRouterPlane):
            return None
        return DeviceAhead(model, plane, self.device)


class Several:
    """``router.tp`` > 1: a follower for each rank but 0, which is this process."""

    device: Device | None = None

    def __init__(self, ctx: Context, path: Path, *, timeout_s: float) -> None:
        """``timeout_s``: how long a follower may take for a part before it counts as hung."""
        self._ctx = ctx
        self._path = path
        self._timeout_s = timeout_s
        self._size = ctx.settings.router.tp
        self._sockets: list[socket.socket] = []
        self._links: FollowerLinks | None = None
        self._processes: list[asyncio.subprocess.Process] = []
        self._inherited: tuple[int, ...] = ()
        """Descriptors that followers get beside their link's."""
        self.pids: tuple[int, ...] = ()

    @property
    def heard(self) -> int:
        return 0 if self._links is None else self._links.heard

    async def start(self) -> None:
        # Followers watch the thread that forks them: this one, which lasts as long as the process.
        for rank in range(1, self._size):
            ours, theirs = socket.socketpair()
            self._sockets.append(ours)
            with theirs:
                self._processes.append(
                    await asyncio.create_subprocess_exec(
                        *(sys.executable, "-P", "-m", "router_svc.follower"),
                        self._assignment(rank, theirs.fileno()),
                        stdin=asyncio.subprocess.DEVNULL,
                        pass_fds=[theirs.fileno(), *self._inherited],
                    )
                )
        self.pids = tuple(process.pid for process in self._processes)
        self._ctx.log.info("group.started", size=self._size, pids=self.pids)

    async def watch(self) -> None:
        ended = [asyncio.ensure_future(process.wait()) for process in self._processes]
        try:
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in ended:
                one.cancel()
        rank, code = next((r, e.result()) for r, e in enumerate(ended, 1) if e.done())
        what = f"rank {rank} of the router's group (pid {self.pids[rank - 1]})"
        if code == ExitCode.CANNOT_SERVE:
            raise CannotServe(f"{what} cannot serve")
        raise GroupLost(f"{what} ended: " + (f"signal {-code}" if code < 0 else f"code {code}"))

    def load(self, progress: Progress) -> ServedModel:
        model = self._ctx.settings.model
        self._links = self._open_links()
        parts = load_shard(
            self._path,
            0,
            self._size,
            weights=model.weights,
            exact=model.exact,
            progress=progress,
        )
        self._links.until_loaded(lambda: progress(1.0))
        return GroupModel(parts, self._links)

    def steps_ahead(self, model: ServedModel, plane: RouterPlane) -> StepsAhead | None:
        """Each layer has sums of the group, which are no part of one device's work."""
        del model, plane
        return None

    async def close(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()  # it holds nothing that is worth a farewell
            await process.wait()
        for one in self._sockets:
            one.close()

    def _open_links(self) -> FollowerLinks:
        return FollowerLinks(self._sockets, self.pids, timeout_s=self._timeout_s)

    def _assignment(self, rank: int, link_fd: int) -> str:
        return msgspec.json.encode(self._task(rank, link_fd)).decode()

    def _task(self, rank: int, link_fd: int) -> Assignment:
        settings = self._ctx.settings
        return Assignment(
            router=self._ctx.id,
            rank=rank,
            size=self._size,
            leader_pid=os.getpid(),
            link_fd=link_fd,
            model=str(self._path),
            weights=settings.model.weights,
            exact=settings.model.exact,
            threads=settings.router.threads,
            logs=settings.logs,
        )


class SeveralOnDevices(Several):
    """The same with a device for each rank: ``cuda:N`` and the GPUs after it."""

    def __init__(self, ctx: Context, path: Path, *, timeout_s: float) -> None:
        """Raises ``DeviceUnavailable``."""
        super().__init__(ctx, path, timeout_s=timeout_s)
        self.device: Device = open_device(ctx.settings.router.device)
        self._store = os.memfd_create("ranks")  # nothing is left of it when the ranks have ended
        self._inherited = (self._store,)

    def load(self, progress: Progress) -> ServedModel:
        from router_svc.device_group import load_device_group  # noqa: PLC0415

        self._links = self._open_links()
        return load_device_group(
            self._path,
            self.device,
            self._size,
            self._store,
            self._links,
            weights=device_weights(self._ctx.settings.model.weights),
            progress=progress,
        )

    async def close(self) -> None:
        await super().close()
        os.close(self._store)

    def _task(self, rank: int, link_fd: int) -> Assignment:
        device = device_of_rank(self._ctx.settings.router.device, rank)
        return msgspec.structs.replace(
            super()._task(rank, link_fd), device=device, store_fd=self._store
        )


def matrix_threads(settings: Settings) -> int:
    """Threads of a router's products while none of its tokens is with the experts."""
    router = settings.router
    cores = len(os.sched_getaffinity(0)) // (settings.mesh.routers * router.tp)
    return max(router.matrix_threads or min(cores, _MOST_MATRIX_THREADS), router.threads)


def device_weights(weights: str) -> Literal["auto", "fp32"]:
    """What ``model.weights`` means on a device, where anything but fp32 is bf16."""
    return "fp32" if weights == "fp32" else "auto"


def device_of_rank(device: str, rank: int) -> str:
    """``router.device`` of rank 0 -> that of another rank."""
    if device == INTERPRETER:
        return device
    first = re.fullmatch(r"cuda(?::(\d+))?", device)
    assert first is not None, "checked by mesh.config"
    return f"cuda:{int(first[1] or 0) + rank}"
