"""Give freed memory back to the system after loading.

Packing an expert takes several times its size in short-lived tensors, which glibc's allocator keeps
for itself: about as much again as the weights of a large model.
"""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Return free pages of the heap to the kernel; does nothing where libc cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
