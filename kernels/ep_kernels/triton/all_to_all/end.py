"""What both ends of an exchange have, and what they agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
import triton

from ep_kernels.plane import LaneLost, PlaneError
from ep_kernels.triton.all_to_all.inbox import (
    HEADER_WORDS,
    SCALED_VALUES,
    Header,
    InboxLayout,
    InboxShape,
    LaneState,
    Wire,
    lay_out,
)
from ep_kernels.triton.all_to_all.symmetric import SymmetricBuffer
from ep_kernels.triton.arguments import KernelArgumentError
from ep_kernels.triton.tuning import architecture_of

_REASONS: Final = {
    LaneState.TIMED_OUT: "no flag came within {deadline_s:g} s",
    LaneState.ABORTED: "the host gave it up",
    LaneState.CORRUPT: "the peer wrote nonsense",
}


class LaneTimedOut(LaneLost):
    """A peer's flag did not come in time. Its lane stays closed in this exchange."""


@dataclass(frozen=True, slots=True)
class Peer:
    """``inbox`` is the peer's memory as this process sees it, ``me`` our number among its peers."""

    name: str
    inbox: SymmetricBuffer
    me: int


@dataclass(frozen=True)
class ExchangeShape:
    """What both sides agree on: ``routers`` and ``experts`` ranks, ``wire`` out and ``back``."""

    routers: int
    experts: int
    ring_slots: int
    capacity_tokens: int
    top_k: int
    hidden: int
    wire: Wire = Wire.FP8
    back: Wire = Wire.BF16
    exact: bool = False

    def __post_init__(self) -> None:
        if self.back is Wire.FP8:
            raise PlaneError("answers travel as fp32 or bf16: they are sums")

    @property
    def capacity_pairs(self) -> int:
        return self.capacity_tokens * self.top_k

    @cached_property
    def requests(self) -> InboxLayout:
        """An expert rank's inbox."""
        return lay_out(
            InboxShape(
                self.routers,
                self.ring_slots,
                self.capacity_tokens,
                self.capacity_pairs,
                self.hidden,
                self.wire,
            )
        )

    @cached_property
    def answers(self) -> InboxLayout:
        """A router's inbox."""
        rows = self.capacity_pairs if self.exact else self.capacity_tokens
        return lay_out(InboxShape(self.experts, self.ring_slots, rows, 0, self.hidden, self.back))


class End:
    """What both ends have: their inbox, their lanes and what their kernels say of these.

    ``stamp`` ``[3]`` int64 on the device: step and epoch of the next messages, and a spare.
    """

    def __init__(
        self,
        layout: InboxLayout,
        inbox: SymmetricBuffer,
        peers: Sequence[Peer],
        peer_layout: InboxLayout,
        deadline_s: float,
    ) -> None:
        if inbox.nbytes < layout.total_bytes:
            raise PlaneError(f"an inbox needs {layout.total_bytes} bytes, got {inbox.nbytes}")
        if len(peers) != layout.shape.peers:
            raise PlaneError(f"expected {layout.shape.peers} peers, got {len(peers)}")
        for peer in peers:
            if peer.inbox.nbytes < peer_layout.total_bytes:
                raise PlaneError(
                    f"the inbox of {peer.name} needs {peer_layout.total_bytes} bytes, "
                    f"it has {peer.inbox.nbytes}"
                )
        device = inbox.bytes.device
        self.layout = layout
        self.peer_layout = peer_layout
        self.inbox = inbox
        self.peers = tuple(peers)
        self.device = device
        self.deadline_s = deadline_s
        self.limit_ns = int(deadline_s * 1e9)
        self.architecture = architecture_of(device)
        count, slots = len(peers), layout.shape.ring_slots
        self.addresses = torch.tensor([p.inbox.address for p in peers], device=device)
        self.me = torch.tensor([p.me for p in peers], dtype=torch.int32, device=device)
        self.stamp = torch.zeros(3, dtype=torch.int64, device=device)
        self.sent = torch.zeros((count, slots), dtype=torch.int64, device=device)
        self.seen = torch.zeros((count, slots), dtype=torch.int64, device=device)
        self.counter = torch.zeros(count, dtype=torch.int32, device=device)
        self.state = torch.zeros(count, dtype=torch.int32, device=device)
        self.firsts = torch.zeros(count, dtype=torch.int32, device=device)
        # Written by the host while a kernel may be waiting, so it is host memory.
        self.abort = torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._told = [False] * count

    def set_stamp(self, step: int, epoch: int) -> None:
        """For the next messages: written in stream order, before a captured graph is replayed."""
        self.stamp.copy_(torch.tensor([step, epoch, 0]))

    def give_up(self, lane: int) -> None:
        """Make kernels that wait for this lane, now or later, go on without it. Any thread."""
        self.abort[lane] = 1

    def lost(self) -> list[LaneLost]:
        """Lanes given up since the last call; waits for the device."""
        found = []
        for lane, code in enumerate(self.state.tolist()):
            if code == LaneState.OPEN or self._told[lane]:
                continue
            self._told[lane] = True
            kind = LaneTimedOut if code == LaneState.TIMED_OUT else LaneLost
            reason = _REASONS[LaneState(code)].format(deadline_s=self.deadline_s)
            found.append(kind(self.peers[lane].name, reason))
        return found

    def open_lanes(self) -> list[int]:
        return [lane for lane, code in enumerate(self.state.tolist()) if code == LaneState.OPEN]

    def posted(self, slot: int) -> list[int]:
        """Lanes with a message in this ring slot that was not answered; waits for the device."""
        flags = self.inbox.view(0, torch.int64, len(self.peers), self.layout.flag_stride // 8)[
            :, slot
        ]
        fresh = (flags > self.seen[:, slot]) & (self.state == LaneState.OPEN)
        lanes: list[int] = torch.nonzero(fresh).flatten().tolist()
        return lanes

    def header(self, lane: int, slot: int) -> dict[Header, int]:
        """A message's header as the peer wrote it; waits for the device."""
        at = self.layout.headers + self.layout.message(lane, slot) * HEADER_WORDS * 8
        words = self.inbox.view(at, torch.int64, HEADER_WORDS).tolist()
        return {word: words[word] for word in Header}

    def check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.layout.shape.ring_slots:
            raise KernelArgumentError(
                "slot", str(slot), f"a ring slot of 0 to {self.layout.shape.ring_slots - 1}"
            )


def columns_of(block: int, hidden: int, *, scaled: bool) -> int:
    """A block of columns no wider than the row needs; whole scales on an FP8 wire."""
    whole = int(triton.next_power_of_2(hidden))
    return max(min(block, whole), SCALED_VALUES if scaled else 1)
