"""The doorbell: one futex word a process, rung by all its peers.

The owner notes the word, looks for work, and sleeps only while the word is still the same. A peer
publishes its work, changes the word to a value that no other peer writes, and wakes the owner. So
no wake-up is lost, though the peers use no atomic operation: if two write at once, either value
differs from the one noted before.

Spinning before the sleep saves a system call and a context switch where a core is idle, and takes
the core from the very peer it waits for where none is. So it is short, stops for a while when it
does not pay or the scheduler interrupts it, and is off on a single core.

A thread that is woken on the core of the one that wakes it may take that core at once. Beside the
word therefore stands the CPU on which its owner went to sleep: ``ring_all``, for several bells,
rings last where that could happen.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import platform
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from ep_kernels.plane import PlaneError
from ep_kernels.shm import memory

BELL_BYTES: Final = 4096
MAX_SENDERS: Final = 1 << 12

_COUNTER_BITS: Final = 20
_COUNTER_MASK: Final = (1 << _COUNTER_BITS) - 1
_OWNER: Final = 0
"""Sender index of the owner's own threads; peers count from 1."""

_FUTEX_NUMBERS: Final = {
    "x86_64": 202,
    "aarch64": 98,
    "riscv64": 98,
    "ppc64le": 221,
    "s390x": 238,
}
_FUTEX_WAIT: Final = 0
_FUTEX_WAKE: Final = 1
_EVERY_WAITER: Final = 2**31 - 1

_LONGEST_SLEEP_S: Final = 3600.0

SPIN_NS: Final = 30_000
_LONGEST_REST: Final = 256
"""Waits without a spin after spins that did not pay (doubling up to this)."""


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def _futex_call(library: Any) -> Any:
    call = library.syscall
    call.restype = ctypes.c_long
    call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
    ]
    return call


# Waking returns at once, so it keeps the GIL; sleeping gives it up. So does waking a thread of this
# process, which needs the GIL first of all.
_wake_call = _futex_call(ctypes.PyDLL(None, use_errno=True))
_wait_call = _hand_over_call = _futex_call(ctypes.CDLL(None, use_errno=True))


def _unknown_cpu() -> int:
    return -1


current_cpu: Final[Callable[[], int]] = getattr(ctypes.PyDLL(None), "sched_getcpu", _unknown_cpu)
"""That the calling thread runs on; -1 where that is not to be known."""


def _futex_number() -> int:
    try:
        return _FUTEX_NUMBERS[platform.machine()]
    except KeyError:
        raise PlaneError(
            f"the shm plane does not know the futex system call of {platform.machine()}, only of "
            f"{', '.join(sorted(_FUTEX_NUMBERS))}"
        ) from None


class _Word:
    """A mapped doorbell word."""

    def __init__(self, fd: int) -> None:
        mapping = memory.attach(fd, BELL_BYTES)
        self._number = _futex_number()
        self._cell = ctypes.c_uint32.from_buffer(mapping)  # keeps the mapping alive
        self._address = ctypes.addressof(self._cell)
        self._values = memoryview(mapping)[:4].cast("I")
        self._asleep_on = memoryview(mapping)[4:8].cast("i")
        self.asleep_on_address = self._address + 4
        """Of the CPU that stands beside the word, for C."""

    def _write(self, value: int, wake: Any = _wake_call) -> None:
        self._values[0] = value
        wake(self._number, self._address, _FUTEX_WAKE, _EVERY_WAITER, None)


class Signal(Protocol):
    """How a lane's end tells the other that it has published something."""

    @property
    def wakes_on(self) -> int:
        """The CPU on which whom it wakes went to sleep; -1 if it wakes nobody, or if that is not
        known.
        """

    def ring(self) -> None: ...


def ring_all(bells: Sequence[Signal]) -> None:
    """Ring each, those first whose owners will not take this thread's CPU."""
    if len(bells) > 1:
        own = current_cpu()
        bells = sorted(bells, key=lambda bell: bell.wakes_on == own)
    for bell in bells:
        bell.ring()


class _Rung(ctypes.Structure):
    """``bell`` of ``native/ahead.c``: whoever rings, Python or C, counts on."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("word", "asleep_on")),
        *((name, ctypes.c_uint32) for name in ("base", "count")),
    )


class Bell(_Word):
    """A peer's doorbell. Takes over ``fd``; ``sender`` is this process's index with that peer.
    ``at`` is the address of C's ``bell``.
    """

    def __init__(self, fd: int, sender: int) -> None:
        if not 0 < sender < MAX_SENDERS:
            os.close(fd)
            raise PlaneError(f"sender index {sender} is not in 1..{MAX_SENDERS - 1}")
        super().__init__(fd)
        base = sender << _COUNTER_BITS
        self._rung = _Rung(self._address, self.asleep_on_address, base, 0)
        self.at = ctypes.addressof(self._rung)

    @property
    def wakes_on(self) -> int:
        return self._asleep_on[0]

    def ring(self) -> None:
        """Tell the peer that something was published. Never blocks, whatever the peer does."""
        rung = self._rung
        rung.count += 1
        self._write(rung.base | (rung.count & _COUNTER_MASK))


class Doorbell(_Word):
    """The doorbell of this process; ``fd`` goes to every peer, ``close_fd`` ends that."""

    def __init__(self, name: str, *, spin_ns: int = SPIN_NS) -> None:
        self.fd = memory.create(name, BELL_BYTES)
        super().__init__(os.dup(self.fd))
        self._counter = itertools.count(1)
        self.spin_ns = spin_ns if (os.cpu_count() or 1) > 1 else 0
        self._rest = 0
        self._next_rest = 1
        self._timeout = _Timespec()
        self._timeout_address = ctypes.addressof(self._timeout)

    def value(self) -> int:
        return self._values[0]

    @property
    def address(self) -> int:
        """Of the word, for C."""
        return self._address

    def ring(self) -> None:
        """Wake the owner's waiting thread from another one."""
        self._write(_OWNER | (next(self._counter) & _COUNTER_MASK), _hand_over_call)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Return once the word differs from ``seen``, after ``timeout_s``, or on a signal."""
        if self._values[0] != seen or timeout_s <= 0:
            return
        if self.spin_ns and self._spin(seen, timeout_s):
            return
        timeout_s = min(timeout_s, _LONGEST_SLEEP_S)
        whole = int(timeout_s)
        self._timeout.tv_sec = whole
        self._timeout.tv_nsec = int((timeout_s - whole) * 1e9)
        self._asleep_on[0] = current_cpu()
        if _wait_call(self._number, self._address, _FUTEX_WAIT, seen, self._timeout_address) != 0:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
                raise PlaneError(f"cannot wait on the doorbell: {os.strerror(code)}")

    def close_fd(self) -> None:
        """Stop handing the doorbell out; peers that have it may still ring."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _spin(self, seen: int, timeout_s: float) -> bool:
        if self._rest > 0:
            self._rest -= 1
            return False
        values, now = self._values, time.perf_counter_ns
        preempted = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        deadline = now() + min(self.spin_ns, int(timeout_s * 1e9))
        while values[0] == seen:
            if now() >= deadline:
                self._back_off()
                return False
        if resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw != preempted:
            self._back_off()
        else:
            self._next_rest = 1
        return True

    def _back_off(self) -> None:
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
