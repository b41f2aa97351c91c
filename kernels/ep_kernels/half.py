"""Linear maps with fp16 weights and fp32 sums, in C: what reads the weights of a decode step.

A row's bits depend on the row and the matrix alone: not on the rows beside it, on the CPU's vectors
or on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch

from ep_kernels.native_library import load

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64

_LONG_CALL: Final = 1 << 25
"""From so many multiplications on, some 200 us, a call lets Python's other threads run."""


class _Matrix(ctypes.Structure):
    _fields_ = (
        *(("outputs", _LONG), ("inputs", _LONG), ("width", _LONG)),
        ("packed", _POINTER),
    )


class HalfMatrix:
    """``x [n, inputs] fp32 -> [n, outputs]``. Immutable, thread-safe."""

    __slots__ = ("_address", "_brief", "_held", "_long", "inputs", "outputs")

    def __init__(self, values: torch.Tensor, most_width: int = 32) -> None:
        """``values [outputs, inputs]`` fp16, contiguous; copied. ``has_kernel()`` must be true.

        ``most_width``: outputs that the CPU may take at a time, 32 with AVX-512 and 16 with AVX2.
        """
        assert values.dtype is torch.float16, "fp16 weights"
        assert values.is_contiguous(), "C reads them as they lie"
        self.outputs, self.inputs = values.shape
        width = panel_width(most_width)
        assert width, "no kernel for this CPU"
        packed = torch.empty(-(-self.outputs // width) * width * self.inputs, dtype=torch.float16)
        load("half").moemesh_half_pack(
            *(_POINTER(values.data_ptr()), _LONG(self.outputs), _LONG(self.inputs)),
            *(_LONG(width), _POINTER(packed.data_ptr())),
        )
        matrix = _Matrix(self.outputs, self.inputs, width, packed.data_ptr())
        self._held = (matrix, packed)
        self._address = ctypes.addressof(matrix)
        self._brief = _linear(load("half"))
        self._long = _linear(load("half", keeps_lock=False))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((x.shape[0], self.outputs))
        self.into(x, out)
        return out

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out [n, outputs]``. Rows of both may lie apart, as in a slice of columns."""
        rows, stride = x.shape[0], x.stride(0)
        assert x.shape[1] == self.inputs, "not a row of this matrix"
        assert x.dtype is torch.float32, "fp32 rows"
        assert x.stride(1) == 1 or self.inputs == 1, "a row's values lie together"
        long = rows * self.inputs * self.outputs >= _LONG_CALL
        call = self._long if long else self._brief
        call(self._address, x.data_ptr(), stride, rows, out.data_ptr(), out.stride(0))

    def values(self) -> torch.Tensor:
        """``[outputs, inputs]`` fp16, bit by bit as they were packed; the caller's own."""
        values = torch.empty((self.outputs, self.inputs), dtype=torch.float16)
        load("half").moemesh_half_unpack(_POINTER(self._address), _POINTER(values.data_ptr()))
        return values


def has_kernel() -> bool:
    """Whether this CPU multiplies fp16 weights: x86 with AVX-512, or with AVX2, FMA and F16C."""
    return panel_width(32) > 0


@lru_cache
def panel_width(most: int) -> int:
    """Outputs of the widest panel, up to ``most``, that this CPU has a kernel for; 0 if none."""
    width: Any = load("half").moemesh_half_width
    width.restype = _LONG
    return int(width(_LONG(most)))


def _linear(library: ctypes.CDLL) -> Callable[..., None]:
    call: Any = library.moemesh_half_linear
    call.restype = None
    call.argtypes = (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _LONG)
    return call  # type: ignore[no-any-return]
