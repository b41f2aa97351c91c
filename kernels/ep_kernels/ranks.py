"""The ranks of a tensor-parallel group on devices: rows from the first to all, sums and parts back.

The same calls of torch.distributed by gloo, for rows in host memory, and NCCL, between GPUs. With
gloo a call ends when its rows are there; with NCCL it is queued in the calling thread's stream, and
who waits for the device learns whether they came.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import perf_counter_ns, sleep
from typing import Any, Final

import torch
import torch.distributed
from torch._C._distributed_c10d import FileStore

from ep_kernels.group.backend import GlooBackend, NcclBackend

_HOST: Final = "127.0.0.1"
_LIMIT_S: Final = 60.0
"""For ranks to meet, and for a call to end: longer than any part takes in the interpreter."""
_FIRST_PAUSE_S: Final = 2e-5
_LONGEST_PAUSE_S: Final = 1e-3


class RanksLost(RuntimeError):
    """Another rank has ended or does not do its part. The group cannot go on."""


class Ranks:
    """One rank's end. One thread calls everything, all ranks the same in the same order. Methods
    raise ``RanksLost``.
    """

    def __init__(
        self,
        place: torch.device,
        store: int,
        rank: int,
        size: int,
        *,
        look: Callable[[float], None] = lambda _waited_s: None,
    ) -> None:
        """Blocks until all ranks are there, for a minute at most. ``place``: where the rows lie,
        for each rank another GPU. ``store``: a descriptor of one file, empty at first, that all
        ranks have. ``look`` is called again and again while the host waits for rows, with the
        seconds since it began to, and may raise.
        """
        self.rank = rank
        self.waited_ns = 0
        """Time spent waiting for rows, since start."""
        self._look = look
        self._on_host = place.type == "cpu"
        backend = GlooBackend() if self._on_host else NcclBackend(place)
        try:
            # Never closed: the store opens it by this name once more at its own end, whenever that
            # comes, and ends the process if it cannot.
            met = FileStore(f"/proc/self/fd/{os.dup(store)}", size)
            met.set_timeout(timedelta(seconds=_LIMIT_S))
            self._group: Any = backend.make(met, rank, _HOST, _LIMIT_S, size)
        except RuntimeError as error:
            raise RanksLost(f"the group's ranks do not meet: {error}") from error
        # NCCL connects with the first call: not in the middle of a step.
        self.broadcast(torch.zeros(1, device=place))

    def broadcast(self, rows: torch.Tensor) -> None:
        """Rank 0's rows into the others'. Contiguous, of one shape and type everywhere."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        self._finish(lambda: self._group.broadcast([rows], options))

    def reduce(self, rows: torch.Tensor) -> None:
        """The sum of all ranks' rows into rank 0's; what the others' are then is undefined."""
        options = torch.distributed.ReduceOptions()
        options.rootRank = 0
        self._finish(lambda: self._group.reduce([rows], options))

    def side_by_side(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """``part [rows, widths[rank]]`` of each rank -> ``[rows, sum(widths)]``."""
        rows, widest = part.shape[0], max(widths)
        # The ranks' parts have to be of one size.
        padded = part.new_zeros(rows, widest)
        padded[:, : part.shape[1]] = part
        parts = [torch.empty_like(padded) for _ in widths]
        self._finish(lambda: self._group.allgather([parts], [padded]))
        cut = [one[:, :width] for one, width in zip(parts, widths, strict=True)]
        return torch.cat(cut, 1)

    def _finish(self, begin: Callable[[], Any]) -> None:
        began, pause_s = perf_counter_ns(), _FIRST_PAUSE_S
        try:
            work = begin()
            while self._on_host and not work.is_completed():
                self._look((perf_counter_ns() - began) / 1e9)
                sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            work.wait()
        except RuntimeError as error:
            raise RanksLost(str(error)) from error
        finally:
            self.waited_ns += perf_counter_ns() - began
