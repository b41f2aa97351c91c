"""Linear maps with 16-bit weights and fp32 rows and sums, in C: what reads a decode step's weights.

fp16 weights are multiplied with AVX-512 or AVX2, and a row's bits depend on the row and the matrix
alone: not on the rows beside it, on the CPU's vectors or on the number of threads. bf16 weights are
multiplied by the CPU's matrix unit (AMX), to fp32's precision too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch

from ep_kernels.native_library import load
from ep_kernels.weight_memory import weight_memory

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64

_TILE_WIDTH: Final = 32

_LONG_CALL: Final = 1 << 25
"""From so many multiplications on, some 200 us, a call lets Python's other threads run."""


class _Matrix(ctypes.Structure):
    _fields_ = (
        *(("outputs", _LONG), ("inputs", _LONG), ("width", _LONG), ("tiles", _LONG)),
        ("packed", _POINTER),
    )


class HalfMatrices:
    """Some matrices of one shape, each for its own part of a row. Immutable, thread-safe."""

    __slots__ = ("_brief", "_dtype", "_held", "_long", "address", "count", "inputs", "outputs")

    def __init__(self, values: torch.Tensor, most_width: int = 32) -> None:
        """``values [count, outputs, inputs]``, fp16 (``has_kernel()`` must be true) or bf16
        (``has_tiles()`` must); copied.

        ``most_width``: outputs of fp16 that the CPU may take at a time, 32 with AVX-512 and 16
        with AVX2.
        """
        self._dtype = values.dtype
        assert self._dtype in {torch.float16, torch.bfloat16}, "16-bit weights"
        tiles = self._dtype is torch.bfloat16
        width = _TILE_WIDTH * has_tiles() if tiles else panel_width(most_width)
        assert width, "no kernel for this CPU"
        self.count, self.outputs, self.inputs = values.shape
        matrices = (_Matrix * self.count)()
        shape = _Matrix(self.outputs, self.inputs, width, tiles, None)
        packed = weight_memory.zeros(self.count, _size(ctypes.byref(shape)), self._dtype)
        for i, (matrix, into) in enumerate(zip(values, packed, strict=True)):
            matrices[i] = _Matrix(self.outputs, self.inputs, width, tiles, into.data_ptr())
            given = matrix.contiguous()
            _pack(ctypes.byref(matrices[i]), given.data_ptr(), into.data_ptr())
        self._held = (matrices, packed)
        self.address = ctypes.addressof(matrices)
        """C's ``half_matrix[count]``."""
        self._brief = _linear(load("half"))
        self._long = _linear(load("half", keeps_lock=False))

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """``x [n, count, inputs]`` fp32 -> ``out [n, count, outputs]``; only the values of one
        matrix must lie together in either.
        """
        rows = x.shape[0]
        assert x.shape == (rows, self.count, self.inputs), "not a row of these matrices"
        assert out.shape == (rows, self.count, self.outputs), "not a row of these matrices"
        assert x.dtype is out.dtype is torch.float32, "fp32 rows"
        assert x.stride(2) == 1 or self.inputs == 1, "C reads a part of a row as it lies"
        assert out.stride(2) == 1 or self.outputs == 1, "C writes a part of a row as it lies"
        long = rows * self.count * self.inputs * self.outputs >= _LONG_CALL
        (self._long if long else self._brief)(
            *(self.address, self.count, rows),
            *(x.data_ptr(), x.stride(0), x.stride(1)),
            *(out.data_ptr(), out.stride(0), out.stride(1)),
        )

    def values(self) -> torch.Tensor:
        """``[count, outputs, inputs]``, bit by bit as they were packed; the caller's own."""
        values = torch.empty((self.count, self.outputs, self.inputs), dtype=self._dtype)
        for matrix, into in zip(self._held[0], values, strict=True):
            _unpack(ctypes.byref(matrix), into.data_ptr())
        return values


class HalfMatrix:
    """One matrix: ``x [n, inputs] fp32 -> [n, outputs]``. Immutable, thread-safe."""

    __slots__ = ("_brief", "_long", "_long_rows", "_one", "address", "inputs", "outputs")

    def __init__(self, values: torch.Tensor, most_width: int = 32) -> None:
        """``values [outputs, inputs]``; see ``HalfMatrices``."""
        self._one = HalfMatrices(values.unsqueeze(0), most_width)
        self.address = self._one.address
        self.outputs, self.inputs = values.shape
        self._long_rows = _LONG_CALL // max(1, values.numel())
        self._brief = _linear(load("half"))
        self._long = _linear(load("half", keeps_lock=False))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, inputs = x.shape
        assert inputs == self.inputs, "not a row of this matrix"
        assert x.dtype is torch.float32, "fp32 rows"
        assert x.is_contiguous(), "C reads rows as they lie"
        out = torch.empty((rows, self.outputs))
        call = self._long if rows > self._long_rows else self._brief
        call(self.address, 1, rows, x.data_ptr(), inputs, 0, out.data_ptr(), self.outputs, 0)
        return out

    def values(self) -> torch.Tensor:
        """``[outputs, inputs]``, bit by bit as they were packed; the caller's own."""
        return self._one.values().squeeze(0)


def has_kernel() -> bool:
    """Whether this CPU multiplies fp16 weights: x86 with AVX-512, or with AVX2, FMA and F16C."""
    return panel_width(32) > 0


@lru_cache(maxsize=1)
def has_tiles() -> bool:
    """Whether this CPU multiplies bf16 weights by its matrix unit: x86 with AMX, under Linux."""
    run: Any = load("half").moemesh_tiles_run
    run.restype = _LONG
    return bool(run())


@lru_cache
def panel_width(most: int) -> int:
    """Outputs of the widest panel, up to ``most``, that this CPU has a kernel for; 0 if none."""
    width: Any = load("half").moemesh_half_width
    width.restype = _LONG
    return int(width(_LONG(most)))


def _linear(library: ctypes.CDLL) -> Callable[..., None]:
    call: Any = library.moemesh_half_linear
    call.restype = None
    call.argtypes = (_POINTER, _LONG, _LONG, *(_POINTER, _LONG, _LONG) * 2)
    return call  # type: ignore[no-any-return]


_size: Any = load("half").moemesh_half_size
_size.restype, _size.argtypes = _LONG, (_POINTER,)
# Hundreds of matrices are packed while the process must answer.
_pack: Any = load("half", keeps_lock=False).moemesh_half_pack
_pack.restype, _pack.argtypes = None, (_POINTER, _POINTER, _POINTER)
_unpack: Any = load("half", keeps_lock=False).moemesh_half_unpack
_unpack.restype, _unpack.argtypes = None, (_POINTER, _POINTER)
