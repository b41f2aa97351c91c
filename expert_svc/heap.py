"""Memory at its limits: giving freed memory back after loading, and noticing that there is none.

Packing an expert takes several times its size in short-lived tensors, which glibc's allocator keeps
for itself: about as much again as the weights of a large model.
"""

from __future__ import annotations

import ctypes

import torch


def trim_heap() -> None:
    """Return free pages of the heap to the kernel; does nothing where libc cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that an allocation failed. torch's CPU allocator has no type of its
    own for that: it raises a bare ``RuntimeError``.
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
