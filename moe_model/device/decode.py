"""Decode steps over tensors that stay where they are, so that a device may be given their work as
one: each call of the model becomes a *segment*, captured once and replayed from then on.

A micro-batch of up to 64 single tokens borrows a *frame*: index tensors for a power of two of
sequences, and the segments captured over them. Rows beyond the micro-batch's are computed and never
looked at; they write to a cache row that no block has. On a GPU a segment is a CUDA graph, else a
plain call with the same copies in and out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from ep_kernels.triton.attention import Queries
from ep_kernels.triton.device import Device, Graphs, Replay
from ep_kernels.triton.transfer import Fixed, upload

from moe_model.device.plan import DevicePlan, StepIndex

MOST_SEQUENCES = 64

Work = Callable[..., tuple[torch.Tensor, ...]]


class Segment:
    """``work`` on ``[size, ...]`` tensors, for any number of rows up to ``size``."""

    def __init__(self, graphs: Graphs, size: int, work: Work) -> None:
        self._graphs = graphs
        self._size = size
        self._work = work
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._replay: Replay | None = None

    def __call__(self, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``[n, ...]`` tensors, always of the same shapes but for ``n`` -> what ``work`` makes of
        them, ``[n, ...]``, valid until the next call.
        """
        count = rows[0].shape[0]
        if self._replay is None:
            self._inputs = tuple(row.new_zeros(self._size, *row.shape[1:]) for row in rows)
        for into, row in zip(self._inputs, rows, strict=True):
            into[:count].copy_(row)
        if self._replay is None:
            self._replay = self._graphs.capture(lambda: self._work(*self._inputs))
        self._replay()
        return tuple(out[:count] for out in self._replay.outputs)


class Frame:
    """The fixed tensors of decode steps of up to ``size`` sequences over one cache."""

    def __init__(
        self, device: Device, size: int, most_blocks: int, block_size: int, turn: int
    ) -> None:
        """``turn``: pairs of a rotation."""
        self.size = size
        self._device = device
        self._graphs = device.graphs()
        self._index = Fixed(
            device,
            *(torch.empty(size, dtype=torch.int64) for _ in range(2)),
            torch.empty(size, turn, 2),
            torch.empty(size + 1, dtype=torch.int32),
            torch.empty(size, dtype=torch.int32),
        )
        token_ids, cache_rows, turned, begins, contexts = self._index.views
        self._blocks = torch.zeros(size, most_blocks, dtype=torch.int32, device=device.place)
        self.plan = DevicePlan(
            num_tokens=size,
            block_size=block_size,
            token_ids=token_ids,
            cache_rows=cache_rows,
            turn=torch.view_as_complex(turned),
            queries=Queries(begins, contexts, self._blocks, 1, most_blocks * block_size),
        )
        self._segments: dict[tuple[str, int], Segment] = {}

    def fill(self, index: StepIndex, spare_row: int) -> None:
        """Hold a step of at most ``size`` single tokens; rows beyond it write to ``spare_row``."""
        count, size = index.tokens.size, self.size
        turn = torch.zeros(self._index.views[2].shape)
        turn[:count] = index.turn
        self._index.send(
            torch.from_numpy(_padded(index.tokens, size, 0)),
            torch.from_numpy(_padded(index.cache_rows, size, spare_row)),
            turn,
            torch.from_numpy(_padded(index.begins, size + 1, count)),
            torch.from_numpy(_padded(index.contexts, size, 0)),
        )
        (blocks,) = upload(self._device, torch.from_numpy(index.blocks))
        self._blocks[: blocks.shape[0], : blocks.shape[1]].copy_(blocks)

    def segment(self, name: str, layer: int, work: Work) -> Segment:
        """The segment of this name and layer; ``work`` is what it does, the same each time."""
        found = self._segments.get((name, layer))
        if found is None:
            found = self._segments[name, layer] = Segment(self._graphs, self.size, work)
        return found


class Loan:
    """A frame in use by one micro-batch, given back when nobody refers to this any more."""

    __slots__ = ("_home", "frame")

    def __init__(self, frame: Frame, home: list[Frame]) -> None:
        self.frame = frame
        self._home = home

    def __del__(self) -> None:
        self._home.append(self.frame)


class Frames:
    """The frames of one cache, made as micro-batches need them."""

    def __init__(self, make: Callable[[int], Frame]) -> None:
        self._make = make
        self._free: dict[int, list[Frame]] = {}

    def borrow(self, sequences: int) -> Loan:
        """A frame for ``sequences`` single tokens."""
        size = 1 << (sequences - 1).bit_length()
        free = self._free.setdefault(size, [])
        return Loan(free.pop() if free else self._make(size), free)


def fits(counts: Sequence[int]) -> bool:
    """Whether chunks of ``counts`` tokens are a decode step that a frame holds."""
    return len(counts) <= MOST_SEQUENCES and max(counts) == 1


def _padded(values: np.ndarray, size: int, rest: int) -> np.ndarray:
    padded = np.full(size, rest, dtype=values.dtype)
    padded[: values.size] = values
    return padded
