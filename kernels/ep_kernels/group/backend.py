"""What carries a lane's rows: a back end of torch.distributed, on the device it moves memory of."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed

from ep_kernels.plane import PlaneError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import Work

_ABORT_TAG: Final = 1
"""Of no message; rows have 0."""
_AT_ONCE: Final = timedelta(milliseconds=1)
_FIRST_PAUSE_S: Final = 2e-5
_LONGEST_PAUSE_S: Final = 1e-3

_QUIET_NCCL: Final = {
    # A failed or late operation costs its lane. By default torch ends the whole process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class PlaneUnavailableError(PlaneError):
    """No such plane in this process; the message names what is missing."""


class Backend(Protocol):
    """Makes groups of two ranks on one device, for all lanes of a process. Any thread."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device:
        """Where the rows of a lane lie."""

    @property
    def on_device(self) -> bool:
        """Whether that is the device which this process computes on; see ``RouterPlane``."""

    @property
    def alone_on(self) -> str:
        """Names the device if one process of a lane must have it for itself; else empty."""

    @property
    def limit_s(self) -> float:
        """Opening a lane takes no longer."""

    def make(self, store: Store, rank: int, host: str, timeout_s: float, size: int = 2) -> Any:
        """A group with whoever uses the same ``store`` as the other ranks. Blocks; ``host`` is the
        address of this end. Raises ``RuntimeError`` and what the store raises.
        """

    def receiving(self) -> AbstractContextManager[None]:
        """Around a thread that calls ``finish``."""

    def finish(self, work: Work, timeout_s: float) -> None:
        """Block until what a receive was to bring is there. Raises ``RuntimeError``."""

    def give_up(self, group: Any, peer: int) -> None:
        """End what this group has pending, and it. Blocks; other groups do not notice."""


class GlooBackend:
    """Rows in host memory, over TCP connections that gloo opens on ports of its own choice.
    ``on_device``: what computes with them is Triton's interpreter, whose memory that is.

    Raises ``PlaneUnavailableError`` where torch has no gloo, or for another device than the CPU.
    """

    name: Final = "gloo"
    alone_on: str = ""
    limit_s: Final = 10.0

    def __init__(self, device: torch.device | None = None, *, on_device: bool = False) -> None:
        self.device = device or torch.device("cpu")
        self.on_device = on_device
        if self.device.type != "cpu":
            raise PlaneUnavailableError(
                f"the gloo plane carries rows in host memory, not on {self.device}: "
                "nccl is the plane for GPUs"
            )
        if not torch.distributed.is_gloo_available():
            raise PlaneUnavailableError(f"torch {torch.__version__} has no gloo")
        self._listeners: dict[str, Any] = {}

    def make(self, store: Store, rank: int, host: str, timeout_s: float, size: int = 2) -> Any:
        gloo: Any = torch.distributed.ProcessGroupGloo
        listener = self._listeners.get(host)
        if listener is None:
            # One listener and one thread an address, for all lanes there.
            listener = self._listeners[host] = gloo.create_device(hostname=host)
        options = gloo._Options()  # noqa: SLF001 - torch has no public ones
        options._devices = [listener]  # noqa: SLF001
        options._threads = 1  # noqa: SLF001 - none but collective operations use more
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
        return gloo(store, rank, size, options)

    @contextmanager
    def receiving(self) -> Iterator[None]:
        yield

    def finish(self, work: Work, timeout_s: float) -> None:
        work.wait(timedelta(seconds=timeout_s))

    def give_up(self, group: Any, peer: int) -> None:
        """An operation that runs out of time closes the group's connection, which ends whatever
        waits for it; gloo's own abort does nothing. Of a connection that broke in the middle of
        some rows gloo tells nobody who waits for them: that wait ends by its own time-out.
        """
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(_AT_ONCE)


class NcclBackend:
    """Rows on a GPU. NCCL's errors and time-outs cost the lane and never the process, for which it
    sets ``TORCH_NCCL_*`` in this process's environment.

    Raises ``PlaneUnavailableError`` for a device that is no GPU, and where torch has no NCCL or
    sees no GPU.
    """

    name: Final = "nccl"
    limit_s: Final = 60.0
    on_device: Final = True

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise PlaneUnavailableError(
                f"the nccl plane carries rows between GPUs, and this process computes on {device}: "
                "router.device and expert.device must both be cuda"
            )
        if not torch.distributed.is_nccl_available():
            raise PlaneUnavailableError(
                f"the nccl plane needs NCCL, and torch {torch.__version__} is built without: "
                "install moemesh[gpu-cu12] or moemesh[gpu-cu13]"
            )
        if not torch.cuda.is_available():
            raise PlaneUnavailableError("the nccl plane needs a GPU, and torch sees none")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        # It has no types. NCCL takes two ranks on one GPU from 2.30 on.
        shares = torch.cuda.nccl.version() >= (2, 30)  # type: ignore[no-untyped-call]
        uuid = torch.cuda.get_device_properties(self.device).uuid
        self.alone_on = "" if shares else str(uuid)
        os.environ.update(_QUIET_NCCL)

    def make(
        self,
        store: Store,
        rank: int,
        host: str,  # noqa: ARG002
        timeout_s: float,
        size: int = 2,
    ) -> Any:
        nccl: Any = torch.distributed.ProcessGroupNCCL
        with torch.cuda.device(self.device):
            # What ends a late operation is the lane's own deadline.
            return nccl(store, rank, size, timedelta(seconds=timeout_s))

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """On a stream of the thread's own, which waits for nothing but its receives."""
        with (
            torch.cuda.device(self.device),
            torch.cuda.stream(torch.cuda.Stream(self.device)),  # type: ignore[no-untyped-call]
        ):
            yield

    def finish(self, work: Work, timeout_s: float) -> None:
        work.wait()  # makes the thread's stream wait, not the thread
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        deadline, pause_s = monotonic() + timeout_s, _FIRST_PAUSE_S
        # No call of CUDA waits for an event with a time-out.
        while not arrived.query():  # type: ignore[no-untyped-call]
            if monotonic() > deadline:
                raise RuntimeError(f"nothing came in {timeout_s:g} s")
            sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def give_up(self, group: Any, peer: int) -> None:  # noqa: ARG002
        group.abort()
