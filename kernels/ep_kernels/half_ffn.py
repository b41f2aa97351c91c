"""SwiGLU FFNs with fp16 weights, each a call into C: ``down(silu(gate x) * up x)``.

With torch an expert is half a dozen calls, and a few tokens read its weights in 200 us. Rows depend
on themselves and their expert alone, as in ``ep_kernels.half``.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from ep_kernels.half import HalfMatrix
from ep_kernels.native_library import load
from ep_kernels.packed import PackedLinear
from ep_kernels.plane import FloatArray, IntArray

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64

_library = load("half", keeps_lock=False)
_expert = _library.moemesh_half_expert
_expert.restype = None
_expert.argtypes = (_POINTER, _POINTER, _LONG, _POINTER)
_ffn = _library.moemesh_half_ffn
_ffn.restype = _LONG
_ffn.argtypes = (
    *(_POINTER, _POINTER, _LONG),
    *(_POINTER, _POINTER, _POINTER, _LONG),
    _POINTER,
)


class _Bank(ctypes.Structure):
    _fields_ = (("experts", _POINTER), *((name, _LONG) for name in ("slots", "hidden", "inner")))


class HalfExpert:
    """One FFN: ``x [n, hidden] fp32 -> [n, hidden]``. Immutable, thread-safe. ``address`` is C's
    ``half_expert``.
    """

    __slots__ = ("_held", "_hidden", "address", "pointers")

    def __init__(self, gate_up: HalfMatrix, down: HalfMatrix) -> None:
        """``gate_up [2 inner, hidden]``, gate first; ``down [hidden, inner]``."""
        assert gate_up.outputs == 2 * down.inputs, "gate and up are as wide as down's input"
        assert gate_up.inputs == down.outputs, "an FFN keeps the width"
        self._hidden = down.outputs
        self.pointers = (gate_up.address, down.address)
        """What stands there."""
        at = (_POINTER * 2)(*self.pointers)
        self.address = ctypes.addressof(at)
        self._held = (gate_up, down, at)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, hidden = x.shape
        assert hidden == self._hidden, "not a row of this FFN"
        assert x.is_contiguous(), "C reads rows as they lie"
        out = torch.empty((rows, hidden))
        _expert(self.address, x.data_ptr(), rows, out.data_ptr())
        return out


def half_expert(gate_up: PackedLinear, down: PackedLinear) -> HalfExpert | None:
    """The FFN of both matrices; None unless both are kept in fp16."""
    if gate_up.half is None or down.half is None:
        return None
    return HalfExpert(gate_up.half, down.half)


class HalfFfn:
    """Experts in slots. The caller keeps those alive that it puts there. ``address`` is C's
    ``half_bank``.
    """

    __slots__ = ("_bank", "_slots", "address")

    def __init__(self, hidden: int, inner: int, slots: int) -> None:
        self._bank = _Bank(hidden=hidden, inner=inner)
        self.address = ctypes.addressof(self._bank)
        self._slots = np.zeros((0, 2), dtype=np.uintp)
        self.resize(slots)

    def resize(self, slots: int) -> None:
        """Have so many slots: new ones are empty, the others stay as they are."""
        kept = np.zeros((slots, 2), dtype=np.uintp)
        stay = min(slots, len(self._slots))
        kept[:stay] = self._slots[:stay]
        self._slots = kept
        self._bank.experts, self._bank.slots = kept.ctypes.data, slots

    def put(self, slot: int, expert: HalfExpert) -> None:
        self._slots[slot] = expert.pointers

    def clear(self, slot: int) -> None:
        self._slots[slot] = 0

    def __call__(
        self,
        x: torch.Tensor,
        pair_token: IntArray,
        pair_slot: IntArray,
        pair_weight: FloatArray | None,
        out: torch.Tensor,
    ) -> int | None:
        """``x [n, hidden]`` fp32 and pairs whose tokens lie in range -> ``out``: with weights
        ``[n, hidden]``, each token's weighted sum over its pairs in the order of slots; without
        ``[pairs, hidden]``, each pair's row. Returns the first pair whose slot is empty or not
        there, and leaves ``out`` as it was.
        """
        assert x.is_contiguous(), "C reads rows as they lie"
        assert out.is_contiguous(), "C writes rows as they lie"
        bad = _ffn(
            *(self.address, x.data_ptr(), x.shape[0]),
            *(pair_token.ctypes.data, pair_slot.ctypes.data),
            *(None if pair_weight is None else pair_weight.ctypes.data, pair_slot.size),
            out.data_ptr(),
        )
        return None if bad < 0 else int(bad)
