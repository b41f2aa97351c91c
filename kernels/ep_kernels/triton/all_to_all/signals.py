"""Flags between processes: wait for one with a deadline, publish one.

A waiter that times out, or is told by the host to give up, says so in the lane's state and the
kernel goes on without that lane: no kernel hangs on a dead peer, and none traps.
"""

from __future__ import annotations

import time
from typing import Any

import triton.language as tl
from triton.language.extra.cuda import globaltimer

from ep_kernels.triton.all_to_all.inbox import LaneState
from ep_kernels.triton.parts import INTERPRETING, part_of_kernel

_INTERPRETER_PAUSE_S = 2e-3

TIMED_OUT = tl.constexpr(int(LaneState.TIMED_OUT))
ABORTED = tl.constexpr(int(LaneState.ABORTED))


def _host_clock() -> Any:
    """The interpreter's clock; the pause lets the peer's process have the core."""
    time.sleep(_INTERPRETER_PAUSE_S)
    return tl.full((), time.monotonic_ns(), tl.int64)


# Inline assembly, which the interpreter cannot run.
clock_ns = _host_clock if INTERPRETING else globaltimer


@part_of_kernel
def array(address: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """The array of ``kind`` at an address that, as all regions do, starts on a line: saying so
    lets rows be read and written as vectors.
    """
    return tl.multiple_of(address.to(tl.pointer_type(kind)), 16)


@part_of_kernel
def flag_at(address: tl.tensor) -> tl.tensor:
    return address.to(tl.pointer_type(tl.int64))


@part_of_kernel
def wait_for_flag(
    flag_ptr: tl.tensor,
    wanted: tl.tensor,
    state_ptr: tl.tensor,
    abort_ptr: tl.tensor,
    limit_ns: tl.tensor,
) -> tl.tensor:
    """The flag once it is at least ``wanted``; a smaller value if the lane was given up.

    Memory that the flag's writer wrote before it may be read afterwards. A lane whose state is not
    open is not waited for. Gives up after ``limit_ns`` or when the host sets ``abort_ptr``, and
    says in ``state_ptr`` which it was.
    """
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    if seen < wanted:
        closed = tl.load(state_ptr, volatile=True) != 0
        aborted = tl.load(abort_ptr, volatile=True) != 0
        now = clock_ns()
        end = now + limit_ns
        while (seen < wanted) & (now < end) & (closed == 0) & (aborted == 0):
            seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
            aborted = tl.load(abort_ptr, volatile=True) != 0
            now = clock_ns()
        if (seen < wanted) & (closed == 0):
            tl.store(state_ptr, tl.where(aborted, ABORTED, TIMED_OUT))
    return seen


@part_of_kernel
def last_to_finish(counter_ptr: tl.tensor, programs: tl.tensor) -> tl.tensor:
    """Whether all other ``programs`` came here before; their writes are then visible to this one,
    and covered by a flag that it releases. Sets the counter back for the next launch.
    """
    tl.debug_barrier()
    done = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    last = done == programs - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@part_of_kernel
def publish(flag_ptr: tl.tensor, value: tl.tensor) -> None:
    """Set a flag in a peer's memory after everything this program, and those it knows to have
    finished, wrote there.
    """
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, value, sem="release", scope="sys")
