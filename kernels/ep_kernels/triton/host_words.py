"""Words in host memory that a kernel and another process's CPU tell each other by.

They lie behind PCI Express, where the device's atomic operations are a read and a write that a CPU
may come between: a word that others write must not be polled by adding 0 to it, as words in device
memory may (``all_to_all.signals``). So these are plain loads and stores with an order, which only
assembly can say; the interpreter, whose atomics are the CPU's own, uses those.

Whoever waits by them must be one warp, so that all of a program sees the same.
"""

from __future__ import annotations

import time
from typing import Any

import triton.language as tl

from ep_kernels.triton.parts import INTERPRETING, part_of_kernel

_INTERPRETER_PAUSE_S = 1e-3

_LOAD = tl.constexpr(
    """
    {
        .reg .b64 word;
        .reg .b32 low, high;
        ld.acquire.sys.global.b64 word, [$1];
        mov.b64 {low, high}, word;
        shfl.sync.idx.b32 low, low, 0, 31, -1;
        shfl.sync.idx.b32 high, high, 0, 31, -1;
        mov.b64 $0, {low, high};
    }
    """
)
_CLOCK = tl.constexpr(
    """
    {
        .reg .b64 now;
        .reg .b32 low, high;
        mov.u64 now, %globaltimer;
        mov.b64 {low, high}, now;
        shfl.sync.idx.b32 low, low, 0, 31, -1;
        shfl.sync.idx.b32 high, high, 0, 31, -1;
        mov.b64 $0, {low, high};
    }
    """
)
_STORE = tl.constexpr(
    """
    {
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first st.release.sys.global.b64 [$1], $2;
        mov.b32 $0, 0;
    }
    """
)


@part_of_kernel
def _load_on_device(address: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        _LOAD, "=l,l", [address], dtype=tl.int64, is_pure=False, pack=1
    )


def _load_interpreted(address: Any) -> Any:
    return tl.atomic_add(address.to(tl.pointer_type(tl.int64)), 0, sem="acquire", scope="sys")


@part_of_kernel
def _clock_on_device() -> tl.tensor:
    return tl.inline_asm_elementwise(_CLOCK, "=l", [], dtype=tl.int64, is_pure=False, pack=1)


def _clock_interpreted() -> Any:
    """The pause lets the peer's process have the core."""
    time.sleep(_INTERPRETER_PAUSE_S)
    return tl.full((), time.monotonic_ns(), tl.int64)


@part_of_kernel
def _store_on_device(address: tl.tensor, value: tl.tensor) -> None:
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        _STORE, "=r,l,l", [address, value], dtype=tl.int32, is_pure=False, pack=1
    )


def _store_interpreted(address: Any, value: Any) -> None:
    tl.atomic_xchg(address.to(tl.pointer_type(tl.int64)), value, sem="release", scope="sys")


load_word = _load_interpreted if INTERPRETING else _load_on_device
"""``(address) -> int64``. What its writer wrote before it may be read afterwards."""
clock_ns = _clock_interpreted if INTERPRETING else _clock_on_device
"""``() -> int64`` nanoseconds, of a clock that goes on."""
store_word = _store_interpreted if INTERPRETING else _store_on_device
"""``(address, value)``, after all that this program, and those it knows to have finished, wrote."""
