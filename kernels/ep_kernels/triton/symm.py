"""The ``symm`` plane: lanes whose messages are written by the one-sided kernels.

A lane opens, sleeps, wakes and dies as a ``shm`` lane does. Its memory is two inboxes, the expert
worker's for parts and the router's for answers, and one launch of ``put`` writes a message into the
peer's: rows, pairs, header, then the flag, released at system scope. The answer of an expert worker
is computed in memory of its own and then put.

So far both inboxes lie in one memfd, so the kernels run on the CPU, in Triton's interpreter: what
this shows is that the kernels carry the plane's messages between processes. On a GPU the inboxes
would come from ``all_to_all.symmetric``'s other allocators.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from struct import Struct
from time import monotonic_ns
from typing import ClassVar, Final

import torch

from ep_kernels.plane import AnswerStatus, LaneShape, Part, PlaneError
from ep_kernels.shm.doorbell import SPIN_NS
from ep_kernels.shm.expert import ShmExpertPlane
from ep_kernels.shm.lane import LaneMemory, RingSlot
from ep_kernels.shm.layout import MAX_LANE_BYTES, MAX_RING_SLOTS, LaneLayout, SlotOffsets
from ep_kernels.shm.router import ShmRouterPlane
from ep_kernels.triton.all_to_all import inbox
from ep_kernels.triton.all_to_all.inbox import HEADER_WORDS, InboxLayout, InboxShape, Wire
from ep_kernels.triton.all_to_all.plan import Lists
from ep_kernels.triton.all_to_all.put import put
from ep_kernels.triton.parts import INTERPRETING
from ep_kernels.triton.tuning import INTERPRETED

_WIRES: Final = {torch.float32: Wire.FP32, torch.bfloat16: Wire.BF16}
_HEADER_BYTES: Final = 8 * HEADER_WORDS
_ANSWER: Final = Struct("=7q")


@dataclass(frozen=True, slots=True)
class SymmLayout(LaneLayout):
    """A lane as two inboxes, the second of which begins at ``answer_flags``."""

    requests: InboxLayout
    answers: InboxLayout

    def slot(self, index: int) -> SlotOffsets:
        requests, answers, second = self.requests, self.answers, self.answer_flags
        first, step = requests.pairs + index * 4 * requests.pair_stride, requests.pair_stride
        return SlotOffsets(
            request_header=requests.headers + index * _HEADER_BYTES,
            answer_header=second + answers.headers + index * _HEADER_BYTES,
            pairs=(first, first + step, first + 2 * step, first + 3 * step),
            x=requests.rows + index * requests.shape.capacity_rows * requests.row_bytes,
            out=second + answers.rows + index * answers.shape.capacity_rows * answers.row_bytes,
            out_rows=self.out_rows,
        )


def lay_out(shape: LaneShape) -> SymmLayout:
    """Raises ``PlaneError`` with the arithmetic when the lane is impossible or too large."""
    if min(shape.hidden, shape.top_k, shape.capacity_tokens, shape.ring_slots) < 1:
        raise PlaneError(f"a lane needs positive sizes of at least 1, got {shape}")
    if shape.ring_slots > MAX_RING_SLOTS:
        raise PlaneError(f"a lane has at most {MAX_RING_SLOTS} ring slots, not {shape.ring_slots}")
    if shape.wire not in _WIRES:
        raise PlaneError(f"the symm plane carries one of {tuple(_WIRES)}, not {shape.wire}")
    out_rows = shape.capacity_pairs if shape.exact else shape.capacity_tokens
    requests = inbox.lay_out(
        InboxShape(
            1,
            shape.ring_slots,
            shape.capacity_tokens,
            shape.capacity_pairs,
            shape.hidden,
            _WIRES[shape.wire],
        )
    )
    answers = inbox.lay_out(InboxShape(1, shape.ring_slots, out_rows, 0, shape.hidden, Wire.FP32))
    total_bytes = requests.total_bytes + answers.total_bytes
    if total_bytes > MAX_LANE_BYTES:
        raise PlaneError(
            f"a lane may take {MAX_LANE_BYTES} bytes, this one needs {total_bytes}: "
            f"{requests.total_bytes} for parts and {answers.total_bytes} for answers; "
            "lower capacity_tokens or ring_slots"
        )
    return SymmLayout(
        shape=shape,
        answer_flags=requests.total_bytes,
        slots=requests.headers,
        slot_bytes=0,
        answer_header=answers.headers,
        pairs=requests.pairs,
        pair_array_bytes=requests.pair_stride,
        x=requests.rows,
        out=answers.rows,
        out_rows=out_rows,
        total_bytes=total_bytes,
        requests=requests,
        answers=answers,
    )


class SymmSlot(RingSlot):
    """A ring slot whose answer's header is as ``put`` writes it."""

    __slots__ = ()

    def answer_header(self) -> tuple[int, int, int, int, int]:
        sequence, began_ns, compute_ns, _, rows, _, status = _ANSWER.unpack_from(
            self._mapping, self._answer_at
        )
        return sequence, status, began_ns, compute_ns, rows


class _Sender:
    """What ``put`` needs to know of one lane's sender; the peer's inbox is at ``address``."""

    def __init__(self, address: int, peer_layout: InboxLayout) -> None:
        self.peer_layout = peer_layout
        self.architecture = INTERPRETED
        self.addresses = torch.tensor([address])
        self.me = torch.zeros(1, dtype=torch.int32)
        self.stamp = torch.zeros(3, dtype=torch.int64)
        self.counter = torch.zeros(1, dtype=torch.int32)
        self.go = torch.zeros(1, dtype=torch.int64)
        self.counts = torch.zeros((1, 2), dtype=torch.int32)
        self.firsts = torch.zeros(1, dtype=torch.int32)
        self.statuses = torch.zeros(1, dtype=torch.int32)


class SymmMemory(LaneMemory):
    """A lane's memory. Each end puts its own kind of message into the other's inbox."""

    __slots__ = ("_answering", "_lists", "_mapping", "_outs", "_requesting")

    out_in_slot: ClassVar[bool] = False

    def __init__(self, mapping: mmap.mmap, layout: LaneLayout) -> None:
        assert isinstance(layout, SymmLayout), "lay_out made it"
        super().__init__(mapping, layout)
        shape = layout.shape
        address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        self.slots = tuple(SymmSlot(mapping, layout, i) for i in range(shape.ring_slots))
        self._mapping = mapping  # the kernels know its address alone
        self._requesting = _Sender(address, layout.requests)
        self._answering = _Sender(address + layout.answer_flags, layout.answers)
        self._lists = Lists(1, shape.capacity_tokens, shape.top_k, torch.device("cpu"))
        self._lists.begin.zero_()
        self._outs: dict[int, torch.Tensor] = {}

    @classmethod
    def lay_out(cls, shape: LaneShape) -> LaneLayout:
        return lay_out(shape)

    def send(self, slot: RingSlot, part: Part, sequence: int) -> None:
        lists, sender, block = self._lists, self._requesting, part.block
        tokens, pairs = block.num_tokens, block.num_pairs
        lists.row_token[0, :tokens] = torch.from_numpy(block.rows)
        for to, values in (
            (lists.pair_row, block.pair_token),
            (lists.pair_slot, block.pair_slot),
            (lists.pair_expert, block.pair_expert),
            (lists.pair_weight, block.pair_weight),
        ):
            to[0, :pairs] = torch.from_numpy(values)
        # Of a row's pairs only their sum is asked for: an expert worker reads the arrays.
        lists.begin[0, : tokens + 1] = 0
        lists.begin[0, tokens] = pairs
        sender.stamp.copy_(torch.tensor([part.step, part.epoch, monotonic_ns()]))
        sender.counts.copy_(torch.tensor([[tokens, pairs]]))
        sender.go[0] = sequence
        # A kernel must not be given an address of nothing.
        x = part.x if part.x.numel() else torch.zeros(1, self.layout.shape.hidden)
        put(
            sender,
            x if x.stride(1) == 1 else x.contiguous(),
            sender.counts,
            slot.index,
            sender.go,
            part.layer,
            sender.firsts,
            lists=self._lists,
        )

    def out(self, slot: RingSlot, rows: int) -> torch.Tensor:
        """Memory of the expert worker's own, one for each ring slot."""
        shape = self.layout.shape
        if slot.index not in self._outs:
            self._outs[slot.index] = torch.empty(self.layout.out_rows, shape.hidden)
        return self._outs[slot.index][:rows]

    def publish_answer(
        self,
        slot: RingSlot,
        sequence: int,
        status: AnswerStatus,
        times_ns: tuple[int, int],
        out: torch.Tensor,
    ) -> None:
        sender = self._answering
        began_ns, compute_ns = times_ns
        sender.stamp.copy_(torch.tensor([began_ns, 0, 0]))
        sender.counts[0, 0] = out.shape[0]
        sender.statuses[0] = int(status)
        sender.go[0] = sequence
        put(
            sender,
            self._outs[slot.index],
            sender.counts,
            slot.index,
            sender.go,
            compute_ns,
            sender.firsts,
            statuses=sender.statuses,
        )


class SymmRouterPlane(ShmRouterPlane):
    """``RouterPlane`` by the one-sided kernels; as ``ShmRouterPlane`` in all else.

    Raises ``PlaneError`` in a process that does not interpret its kernels.
    """

    _memory: ClassVar[type[LaneMemory]] = SymmMemory

    def __init__(
        self,
        router_id: str,
        incarnation: int,
        shape: LaneShape,
        digest: str,
        *,
        spin_ns: int = SPIN_NS,
    ) -> None:
        _check_interpreting()
        super().__init__(router_id, incarnation, shape, _own(digest), spin_ns=spin_ns)


class SymmExpertPlane(ShmExpertPlane):
    """``ExpertPlane`` by the one-sided kernels; as ``ShmExpertPlane`` in all else.

    Raises ``PlaneError`` in a process that does not interpret its kernels.
    """

    _memory: ClassVar[type[LaneMemory]] = SymmMemory

    def __init__(
        self,
        expert_id: str,
        incarnation: int,
        path: str,
        hidden: int,
        digest: str,
        max_lanes: int = 64,
        *,
        spin_ns: int = SPIN_NS,
    ) -> None:
        _check_interpreting()
        super().__init__(
            expert_id, incarnation, path, hidden, _own(digest), max_lanes, spin_ns=spin_ns
        )


def _own(digest: str) -> str:
    """Lanes of the two planes lie differently: neither takes the other's offer."""
    return f"{digest} by symm"


def _check_interpreting() -> None:
    if not INTERPRETING:
        raise PlaneError(
            "the symm plane's lanes lie in host memory, where kernels run in Triton's interpreter "
            "alone: set TRITON_INTERPRET=1 before triton is imported"
        )
