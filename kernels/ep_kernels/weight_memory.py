"""Memory for packed weights, in huge pages where the kernel gives them.

A decode step reads every weight once. In pages of 4 KiB that is a walk through the page tables for
each of them, and hardware that fetches ahead stops at their ends. Matrices are smaller than a huge
page, or end within one, so many of them share a large block. Pieces that nobody refers to any more
are given out again, to what is as large: experts that move are.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import defaultdict, deque
from typing import Final

import numpy as np
import torch

BLOCK_BYTES: Final = 1 << 25
_HUGE_PAGE: Final = 1 << 21
_ALIGN: Final = 64
"""A cache line."""


class _Block:
    """Zeros that lie together. Unmapped when neither this nor a piece of it is referred to."""

    def __init__(self, nbytes: int) -> None:
        self._mapping = mmap.mmap(
            -1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        address = np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data
        self._begin = -address % _HUGE_PAGE
        self._left = nbytes
        self._at = self._begin
        self.live = 0
        """Pieces that are given out."""

    def has(self, nbytes: int) -> bool:
        """Whether so much was never given out yet."""
        return nbytes <= self._left

    def next(self, nbytes: int) -> int:
        """The offset of a new piece."""
        at = self._at
        self._at += nbytes
        self._left -= nbytes
        return at

    def piece(self, at: int, nbytes: int) -> np.ndarray:
        return np.frombuffer(self._mapping, dtype=np.uint8, count=nbytes, offset=at)


class WeightMemory:
    """Gives out pieces of blocks. Thread-safe."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._newest: _Block | None = None
        self._free: defaultdict[int, list[tuple[_Block, int]]] = defaultdict(list)
        """Pieces that were returned, by their size."""
        self._returned: deque[tuple[_Block, int, int]] = deque()
        """Such that are not among those yet: their ends come at any time, under the lock too."""

    def zeros(self, count: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """``[count, size]``, which begins at a cache line. Raises ``MemoryError``."""
        needed = count * size * dtype.itemsize
        nbytes = max(_ALIGN, -(-needed // _ALIGN) * _ALIGN)
        with self._lock:
            self._take_back()
            free = self._free[nbytes]
            used = bool(free)
            block, at = free.pop() if free else self._new(nbytes)
            block.live += 1
        piece = block.piece(at, nbytes)
        weakref.finalize(piece, self._returned.append, (block, at, nbytes)).atexit = False
        if used:
            piece[:] = 0
        return torch.from_numpy(piece)[:needed].view(dtype).view(count, size)

    def _new(self, nbytes: int) -> tuple[_Block, int]:
        block = self._newest
        if block is None or not block.has(nbytes):
            try:
                block = _Block(max(nbytes, self._block_bytes))
            except OSError as error:
                raise MemoryError(f"no {nbytes} bytes for weights: {error}") from error
            self._newest = block
        return block, block.next(nbytes)

    def _take_back(self) -> None:
        while self._returned:
            block, at, nbytes = self._returned.popleft()
            block.live -= 1
            self._free[nbytes].append((block, at))
            if block.live == 0:  # to the kernel with it
                for size, pieces in list(self._free.items()):
                    self._free[size] = [piece for piece in pieces if piece[0] is not block]
                if self._newest is block:
                    self._newest = None


weight_memory: Final = WeightMemory()
"""Of this process."""
