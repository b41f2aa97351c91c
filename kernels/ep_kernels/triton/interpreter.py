"""Triton's interpreter, made right for narrow types.

As it comes, it multiplies matrices of bf16 as if their bits were integers, cuts off what a GPU
rounds when it narrows to bf16, and loses the carry of some values that it rounds to FP8. Kernels
should not work around that, so what converts and what multiplies is replaced by torch.

It also looks for the language's built-in functions anew at each call of a kernel, for a quarter of
its time; they are found once.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _as_torch(data: np.ndarray, dtype: Any) -> torch.Tensor:
    # torch has no arithmetic on unsigned integers, but views their bits.
    bits = np.ascontiguousarray(data).view(_BITS[data.dtype.itemsize])
    return torch.from_numpy(bits).view(_TYPES[dtype]).reshape(data.shape)


def _convert(data: np.ndarray, source: Any, target: Any, _rounding: Any) -> np.ndarray:
    narrow = _as_torch(data, source).to(_TYPES[target])
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    return narrow.view(bits[narrow.element_size()]).numpy()


def _dot(_builder: Any, a: Any, b: Any, d: Any, _precision: Any, _imprecise: Any) -> Any:
    left, right = (_as_torch(x.data, x.dtype.scalar).float().numpy() for x in (a, b))
    product = np.matmul(left, right).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


@functools.cache
def _builtins(package: Any) -> tuple[str, ...]:
    return tuple(name for name, it in inspect.getmembers(package) if tl.core.is_builtin(it))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):  # or this is a kernel's call of another, in its scope
            interpreter._patch_attr(package, name, member, builder, scope)  # noqa: SLF001


def correct_interpreter() -> None:
    """For the rest of this process. Call it before any kernel runs."""
    interpreter._convert_float = _convert  # noqa: SLF001 - there is no public place for it
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter._patch_builtin = _patch_builtin  # noqa: SLF001
