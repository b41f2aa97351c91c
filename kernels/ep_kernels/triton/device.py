"""The device that kernels run on: streams, marks in them, pinned memory. All that is CUDA's own.

``open_device("cuda:1")`` is a GPU; ``open_device("interpreter")`` is the CPU, where Triton's
interpreter runs the same kernels and a stream's work is done as soon as it is queued. What uses a
``Device`` is the same code for both.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import TracebackType
from typing import Protocol, Self

import torch

INTERPRETER = "interpreter"
_INTERPRET = "TRITON_INTERPRET"
TIMEOUT_S = 30.0
"""Longer than any work that is waited for takes."""
_SPIN_S = 1e-3
_PAUSE_S = 5e-5


class DeviceUnavailable(RuntimeError):
    """``device`` cannot be computed on; nothing was started. Whoever configured it decides.

    Attributes: ``device`` as it was named, and what it ``lacks``, in words.
    """

    def __init__(self, device: str, lacks: str) -> None:
        super().__init__(f"device {device!r} cannot be used: {lacks}")
        self.device = device
        self.lacks = lacks


class DeviceHung(RuntimeError):
    """Work on the device has not ended within its deadline. The process should end: what it has
    under way there may still write to memory.
    """

    def __init__(self, device: str, waited_s: float) -> None:
        super().__init__(f"device {device!r} has not ended its work for {waited_s:g} s")


@dataclass(slots=True)
class Copied:
    """Bytes of what is computed with (not of weights) that were copied between host and device."""

    up: int = 0
    down: int = 0


class Mark(Protocol):
    """A point in a stream's work."""

    @property
    def done(self) -> bool:
        """Whether everything before it has ended. Never blocks; raises what the device raised."""


class Stream(Protocol):
    """Work that the device does in order. ``with stream:`` queues what the block starts; one
    thread at a time, not nested.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def mark(self) -> Mark:
        """Behind what has been queued so far."""

    def follow(self, mark: Mark) -> None:
        """What is queued from now on waits for ``mark``, which may be another stream's."""


class Replay(Protocol):
    """Work that has been captured. Each call does it again, on the same tensors."""

    outputs: tuple[torch.Tensor, ...]
    """Always the same tensors; written by each call."""

    def __call__(self) -> None: ...


class Graphs(Protocol):
    """Captures work that is always done in the order in which it was captured: what one needs no
    more, a later one may use.
    """

    def capture(self, work: Callable[[], tuple[torch.Tensor, ...]]) -> Replay:
        """``work`` must read and write tensors that stay where they are, wait for nothing, and do
        the same when it is done twice. In the stream in which the calling thread has settled.
        """

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """The same for work that leaves its results where they belong, and has been done before:
        it is not done now. What is returned does it.
        """


class Device(Protocol):
    """Where kernels run."""

    name: str
    place: torch.device
    """Where tensors that kernels take lie."""
    compiles: bool
    """Whether a kernel's first run takes seconds."""
    copied: Copied
    """Since start. Whoever copies counts."""

    def stream(self) -> Stream:
        """A new one. Any thread."""

    def settle(self) -> Stream:
        """A new one in which the calling thread queues all that it starts from now on."""

    def mark(self) -> Mark:
        """Behind what the calling thread has queued so far."""

    def graphs(self) -> Graphs: ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory ``[nbytes]`` uint8 that is copied to and from without the host's help. Any
        thread.
        """


def wait_for(device: Device, mark: Mark, timeout_s: float = TIMEOUT_S) -> None:
    """Block until ``mark`` is done: at first without a pause, since most waits are shorter than one
    takes. Raises ``DeviceHung``.
    """
    began = time.monotonic()
    while not mark.done:
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise DeviceHung(device.name, timeout_s)
        # Without a pause other threads get the interpreter all the same.
        time.sleep(_PAUSE_S if waited_s > _SPIN_S else 0)


def open_device(name: str) -> Device:
    """``cuda``, ``cuda:N`` or ``interpreter``. Raises ``DeviceUnavailable``.

    ``interpreter`` must be opened before triton is imported: it is chosen for the whole process.
    """
    if find_spec("triton") is None:
        raise DeviceUnavailable(name, "Triton is not installed; `moemesh doctor` says what to do")
    if name == INTERPRETER:
        return _open_interpreter()
    if os.environ.get(_INTERPRET, "0") not in {"", "0"}:
        raise DeviceUnavailable(name, f"{_INTERPRET} is set: kernels would run on the CPU")
    return _open_cuda(name)


def _open_cuda(name: str) -> Device:
    if torch.version.cuda is None:
        raise DeviceUnavailable(name, f"torch {torch.__version__} is a build for CPUs")
    try:
        device = torch.device(name)
        count = torch.cuda.device_count()
        if not count:
            raise DeviceUnavailable(name, "torch sees no GPU; `moemesh doctor` says more")
        index = device.index or 0
        if index >= count:
            raise DeviceUnavailable(name, f"torch sees {count} GPUs, counted from 0")
        device = torch.device("cuda", index)
        torch.zeros(1, device=device)  # what the driver has to say, it says now
        from ep_kernels.triton.tuning import architecture_of  # noqa: PLC0415

        architecture_of(device)
    except DeviceUnavailable:
        raise
    except RuntimeError as error:
        raise DeviceUnavailable(name, str(error)) from error
    return _Cuda(name, device)


def _open_interpreter() -> Device:
    chosen = os.environ.get(_INTERPRET) == "1"
    if not chosen:
        if "triton" in sys.modules:
            raise DeviceUnavailable(INTERPRETER, "triton was imported before it was chosen")
        os.environ[_INTERPRET] = "1"
    from ep_kernels.triton.interpreter import correct_interpreter  # noqa: PLC0415

    correct_interpreter()
    return _Interpreter()


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    @property
    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._context = torch.cuda.stream(self._stream)

    def __enter__(self) -> Self:
        self._context.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.__exit__(kind, error, trace)

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaMark(event)

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark), "a mark of another device"
        self._stream.wait_event(mark.event)


class _CudaReplay:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[torch.Tensor, ...]) -> None:
        self._graph = graph
        self.outputs = outputs

    def __call__(self) -> None:
        self._graph.replay()


class _CudaGraphs:
    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], tuple[torch.Tensor, ...]]) -> Replay:
        work()  # compiles kernels, and makes what libraries keep: neither can be captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = work()
        return _CudaReplay(graph, outputs)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay


class _Cuda:
    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.place = device
        self.compiles = True
        self.copied = Copied()

    def stream(self) -> Stream:
        return _CudaStream(self.place)

    def settle(self) -> Stream:
        return _CudaStream(self.place).__enter__()

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.place))
        return _CudaMark(event)

    def graphs(self) -> Graphs:
        return _CudaGraphs()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class _Passed:
    """Work that ended when it was queued."""

    done = True


_PASSED = _Passed()
_ONE_AT_A_TIME = threading.RLock()
"""The interpreter keeps the program that it runs in variables of its module."""


class _HostStream:
    def __enter__(self) -> Self:
        _ONE_AT_A_TIME.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _ONE_AT_A_TIME.release()

    def mark(self) -> Mark:
        return _PASSED

    def follow(self, mark: Mark) -> None:
        del mark


class _HostReplay:
    """A plain call."""

    def __init__(self, work: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        self._work = work
        self.outputs = work()
        self._fresh = True

    def __call__(self) -> None:
        if not self._fresh:
            for into, made in zip(self.outputs, self._work(), strict=True):
                into.copy_(made)
        self._fresh = False


class _HostGraphs:
    def capture(self, work: Callable[[], tuple[torch.Tensor, ...]]) -> Replay:
        return _HostReplay(work)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


class _Interpreter:
    def __init__(self) -> None:
        self.name = INTERPRETER
        self.place = torch.device("cpu")
        self.compiles = False
        self.copied = Copied()

    def stream(self) -> Stream:
        return _HostStream()

    def settle(self) -> Stream:
        return _HostStream().__enter__()

    def mark(self) -> Mark:
        return _PASSED

    def graphs(self) -> Graphs:
        return _HostGraphs()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)
