"""A lone part from lane to answer, by one call into C: what a worker does while sequences decode.

A bank lends its layer's experts as a ``ServedBank``; ``ServedBanks`` has those of all layers. Parts
that are not alone, or not of this kind, are left as they are for Python.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, NamedTuple

import numpy as np

from ep_kernels.native_library import load
from ep_kernels.plane import IntArray

_POINTER, _NUMBER, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_SERVED: Final = 1


class _Bank(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("run", "of", "holds")),
        *(("slots", _LONG), ("most_pairs", _LONG)),
    )


def function_address(library: str, function: str) -> int:
    """Of a function of ``native/<library>.c``, for other libraries."""
    found: Any = getattr(load(library, keeps_lock=False), function)
    address = ctypes.cast(found, _POINTER).value
    assert address is not None, "loaded"
    return address


class ServedBank:
    """The experts of one layer, as C serves them. ``address`` is C's ``served_bank``."""

    __slots__ = ("_bank", "_holds", "address", "brief")

    def __init__(self, run: int, of: int, holds: IntArray, *, most_pairs: int, brief: bool) -> None:
        """``run`` and ``of``: C's function and what it takes first; the caller keeps that alive.
        ``holds`` ``[slots]``: the expert in each. ``brief``: parts of up to ``most_pairs`` take so
        little time that the process's other threads may wait for it.
        """
        self._bank = _Bank(run, of, most_pairs=most_pairs)
        self.address = ctypes.addressof(self._bank)
        self.brief = brief
        self.hold(holds)

    def hold(self, holds: IntArray) -> None:
        """Go by another array of slots."""
        self._holds = holds
        self._bank.holds, self._bank.slots = holds.ctypes.data, holds.size


class Served(NamedTuple):
    """A part that ``serve`` has answered."""

    lane: int
    slot: int
    sequence: int
    layer: int
    tokens: int
    pairs: int
    began_ns: int
    took_ns: int


class ServedBanks:
    """The experts of all layers. One thread at a time."""

    def __init__(self, layers: int) -> None:
        self._addresses = np.zeros(layers, dtype=np.uintp)
        self._at = self._addresses.ctypes.data
        self._told = np.zeros(len(Served._fields), dtype=np.int64)
        self._told_at = self._told.ctypes.data
        self._call = _serving(keeps_lock=True)

    def set(self, layer: int, bank: ServedBank) -> None:
        """Whoever has the ``bank`` keeps it alive."""
        self._addresses[layer] = bank.address
        if not bank.brief:
            self._call = _serving(keeps_lock=False)

    def serve(self, ends: int, count: int) -> Served | None:
        """Answer the part that has come over one of ``count`` lanes, C's ``lane_end`` at ``ends``,
        if it is the only one, and the slots hold what it names. None, and nothing was touched, if
        not.
        """
        if self._call(ends, count, self._at, self._addresses.size, self._told_at) != _SERVED:
            return None
        return Served(*self._told.tolist())


def _serving(*, keeps_lock: bool) -> Any:
    call: Any = load("serve", keeps_lock=keeps_lock).moemesh_serve
    call.restype = _NUMBER
    call.argtypes = (_POINTER, _LONG, _POINTER, _LONG, _POINTER)
    return call
