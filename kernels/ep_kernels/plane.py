"""The data plane's Protocols: many-to-many, point to point, one lane per router-expert pair.

A lane is a ring of message slots that both ends can reach. A router writes a *part* (the tokens
of one micro-batch that go to one expert rank, each token once, with its pairs) into a free ring
slot; the expert worker answers into the reply area of the same slot. Back ends implement
``RouterPlane`` and ``ExpertPlane``; nothing else knows how bytes travel.

Terms: a *pair* is one (token, expert) assignment. ``pair_token`` indexes the part's own rows.
Every pair names the local slot and the logical expert; the expert worker checks both. What is made
for every message is not frozen, which would cost more than all its checks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from ep_kernels.serve import Served, ServedBanks

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class PlaneError(Exception):
    """The plane cannot do what was asked; the message names the lane and the numbers."""


class LaneLost(PlaneError):
    """The peer of a lane is gone. The caller still holds its inputs and sends them elsewhere."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"lane to {peer} is lost: {reason}")
        self.peer = peer
        self.reason = reason


class LaneRefused(PlaneError):
    """The peer exists and refuses the lane; trying again helps only once the cause is gone."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer} refused the lane: {reason}")
        self.peer = peer
        self.reason = reason


class LanePending(PlaneError):
    """The lane is being opened in the background. The same call again takes it, or says what has
    become of it.
    """


class AnswerStatus(IntEnum):
    OK = 1
    STALE = 2
    """At least one pair named a slot that does not hold its logical expert; no row is valid."""


@dataclass(frozen=True, slots=True)
class LaneShape:
    """Size of a lane; both ends must agree on it.

    ``capacity_tokens`` rows of ``hidden`` values a message, at most ``top_k`` pairs a token,
    ``ring_slots`` messages in flight. ``exact`` lanes carry one fp32 row per pair back instead of
    one partial sum per token. ``wire`` is the dtype of activations on the way out.
    """

    hidden: int
    top_k: int
    capacity_tokens: int
    ring_slots: int
    exact: bool = False
    wire: torch.dtype = torch.float32

    @property
    def capacity_pairs(self) -> int:
        return self.capacity_tokens * self.top_k


class PairBlock:
    """The arrays of one message, one behind another in ``data``: ``rows`` ``[num_tokens]`` of the
    batch, in what order they are sent; then of each pair its row among these, the slot at the rank,
    the logical expert and the weight, ``[num_pairs]`` each. More may follow. ``address`` is that of
    ``data``, for C.
    """

    __slots__ = ("address", "data", "num_pairs", "num_tokens")

    def __init__(self, data: IntArray, num_tokens: int, num_pairs: int, address: int) -> None:
        self.data = data
        self.num_tokens = num_tokens
        self.num_pairs = num_pairs
        self.address = address

    @classmethod
    def of(
        cls,
        rows: IntArray,
        pair_token: IntArray,
        pair_slot: IntArray,
        pair_expert: IntArray,
        pair_weight: FloatArray,
    ) -> PairBlock:
        """From arrays that lie apart."""
        arrays = (rows, pair_token, pair_slot, pair_expert, pair_weight.view(np.int32))
        data = np.concatenate(arrays, dtype=np.int32)
        return cls(data, rows.size, pair_token.size, data.ctypes.data)

    def _pairs(self, index: int) -> IntArray:
        first = self.num_tokens + index * self.num_pairs
        return self.data[first : first + self.num_pairs]

    @property
    def rows(self) -> IntArray:
        return self.data[: self.num_tokens]

    @property
    def pair_token(self) -> IntArray:
        return self._pairs(0)

    @property
    def pair_slot(self) -> IntArray:
        return self._pairs(1)

    @property
    def pair_expert(self) -> IntArray:
        return self._pairs(2)

    @property
    def pair_weight(self) -> FloatArray:
        return self._pairs(3).view(np.float32)


@dataclass(slots=True, eq=False)
class Part:
    """What one message carries to one expert rank: tokens of ``x`` ``[batch tokens, hidden]`` fp32,
    which are copied straight into the lane, and their pairs. The gate's weights are applied by the
    expert worker unless the lane is exact. ``x`` lies where the plane has its rows.
    """

    step: int
    layer: int
    epoch: int
    x: torch.Tensor
    block: PairBlock
    _rows: torch.Tensor | None = None

    @property
    def rows(self) -> torch.Tensor:
        """``block.rows`` where ``x`` lies. The host does not wait for a device."""
        if self.x.is_cpu:
            return torch.from_numpy(self.block.rows)
        if self._rows is None:
            rows = torch.from_numpy(self.block.rows).pin_memory()
            self._rows = rows.to(self.x.device, non_blocking=True)
        return self._rows


@dataclass(slots=True, eq=False)
class Answer:
    """A completed part. ``out`` is a view into the lane, valid until ``RouterPlane.release``:
    ``[n tokens, hidden]`` partial sums, or ``[pairs, hidden]`` unweighted rows when exact."""

    peer: str
    ticket: int
    status: AnswerStatus
    out: torch.Tensor
    began_ns: int
    """When the expert worker began to compute, on the monotonic clock; meaningful on one host."""
    compute_ns: int


class RouterPlane(Protocol):
    """A router's end of all its lanes. One thread calls everything but ``wake`` (any thread)."""

    on_device: bool
    """Whether x of parts and out of answers lie on the device that this process computes on, where
    they are written and read by what the calling thread queues; else in host memory."""
    copy_ns: int
    """Time spent writing parts into lanes, since start."""
    signal_ns: int
    """Time spent publishing them and waking their receivers, since start."""
    corrupt_lanes: int
    """Lanes dropped because the peer wrote nonsense, since start."""

    def connect(self, peer: str, address: str, incarnation: int, timeout_s: float) -> None:
        """Open a lane; raises ``PlaneError`` on refusal or time-out, ``LanePending`` where opening
        it goes on meanwhile. Replaces a lost one."""

    def disconnect(self, peer: str) -> None: ...

    def peers(self) -> dict[str, int]:
        """Peers with a live lane -> their incarnation."""

    def try_send(self, peer: str, part: Part) -> int | None:
        """Write and signal; returns a ticket, or None while the ring is full.

        Raises ``LaneLost``, or ``PlaneError`` when the part is larger than the lane's capacity
        (the caller splits it)."""

    def together(self) -> AbstractContextManager[None]:
        """Within it ``try_send`` writes only: peers are signalled at its end, each once. A peer
        that wakes earlier may take this thread's core, and keep the others waiting."""

    def poll(self) -> list[Answer]:
        """Answers that have arrived, each once. Never blocks."""

    def release(self, answer: Answer) -> None:
        """Free the ring slot of an answer; ``answer.out`` may not be touched afterwards."""

    def lost(self) -> list[LaneLost]:
        """Lanes that died since the last call; their tickets will never be answered."""

    def wait(self, timeout_s: float) -> None:
        """Block until an answer, a lost lane, ``wake()`` or the time-out. May wake spuriously."""

    def wake(self) -> None: ...

    def in_flight(self) -> int:
        """Ring slots in use over all lanes."""

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Arrival:
    """A part as the expert worker sees it: views into the lane, valid until answered.

    ``x`` ``[n, hidden]`` in the wire dtype; pair arrays ``[pairs]``; ``out`` is where the answer
    belongs: ``[n, hidden]`` or, on an exact lane, ``[pairs, hidden]``, fp32, uninitialised.
    """

    lane: int
    ring_slot: int
    sequence: int
    peer: str
    exact: bool
    step: int
    layer: int
    epoch: int
    x: torch.Tensor
    pair_token: IntArray
    pair_slot: IntArray
    pair_expert: IntArray
    pair_weight: FloatArray
    out: torch.Tensor


class ExpertPlane(Protocol):
    """An expert worker's end of all its lanes. One thread calls everything but ``wake``."""

    on_device: bool
    """Whether x and out of arrivals lie on the device that this process computes on; else in host
    memory. x is there when a part arrives, out must be when it is answered."""
    corrupt_lanes: int
    """Lanes dropped because the peer wrote nonsense, since start."""

    def serve(self, banks: ServedBanks) -> Served | None:
        """Read, compute and answer the part that has arrived, if it is the only one and ``banks``
        can; None if not, and then nothing was touched."""

    def poll(self) -> list[Arrival]:
        """Parts that have arrived since the last call, each once, oldest first. Never blocks."""

    def answer(
        self, arrival: Arrival, status: AnswerStatus, began_ns: int, compute_ns: int
    ) -> None:
        """Publish ``arrival.out`` and signal the router. A dead router is ignored."""

    def wait(self, timeout_s: float) -> None: ...

    def wake(self) -> None: ...

    def peers(self) -> list[str]: ...

    def close(self) -> None: ...
