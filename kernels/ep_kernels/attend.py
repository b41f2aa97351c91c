"""Attention of single tokens of many sequences over a paged cache, as one call into C.

Keys are read where they lie: nothing is gathered or padded, and sequences may be of any length. A
row's result depends on its own query and keys alone.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from ep_kernels.native_library import load

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """Which rows of a cache each of ``n`` queries sees. int64 on the CPU, contiguous.

    Row ``i`` sees ``keys[i]`` rows, at least one: they lie in blocks ``blocks[offset[i]]`` and
    following, of whose first it does not see the first ``skip[i]`` rows.
    """

    blocks: torch.Tensor
    offset: torch.Tensor
    skip: torch.Tensor
    keys: torch.Tensor


class _Work(ctypes.Structure):
    _fields_ = (
        *((name, _LONG) for name in ("heads", "shared", "key_dim", "value_dim", "value_offset")),
        *((name, _LONG) for name in ("q_row", "stride", "block_size", "most_lanes")),
        *((name, _POINTER) for name in ("q", "cache", "blocks", "offset", "skip", "keys", "out")),
        *((name, _LONG) for name in ("lanes", "parts")),
    )


_crew: Any = load("half", keeps_lock=False).moemesh_crew_do
_attend: Any = load("attend", keeps_lock=False).moemesh_attend
_attend.restype = None
_attend.argtypes = (_POINTER, _POINTER, _LONG)
_share = ctypes.cast(_crew, _POINTER)


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_size: int,
    visible: VisibleKeys,
    *,
    value_dim: int,
    value_offset: int,
    most_lanes: int = 16,
) -> torch.Tensor:
    """``q [n, heads, shared, key_dim]``, scaled, ``shared`` query heads a key head -> ``[n, heads,
    shared, value_dim]``. All fp32. Rows of ``q`` may lie apart.

    Of a row of ``cache [rows, stride]`` key head ``h`` is values ``h * key_dim`` and following, and
    its value those from ``value_offset + h * value_dim`` on. ``most_lanes``: values that a vector
    may hold, as far as the CPU has such: 16 is AVX-512, 8 AVX2.
    """
    rows, heads, shared, key_dim = q.shape
    assert q[0].is_contiguous(), "C reads a row's queries as they lie"
    assert q.dtype is cache.dtype is torch.float32, "fp32"
    out = torch.empty((rows, heads, shared, value_dim))
    work = _Work(
        *(heads, shared, key_dim, value_dim, value_offset),
        *(q.stride(0), cache.stride(0), block_size, most_lanes),
        *(q.data_ptr(), cache.data_ptr()),
        *(visible.blocks.data_ptr(), visible.offset.data_ptr()),
        *(visible.skip.data_ptr(), visible.keys.data_ptr()),
        out.data_ptr(),
    )
    _attend(_share, ctypes.addressof(work), rows)
    return out
