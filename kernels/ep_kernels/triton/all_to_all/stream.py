"""The high-throughput exchange: a batch of any size, in chunks, with exact counts.

A message holds ``capacity_tokens`` rows; a longer batch goes as several, each in the next ring slot
once the peer has drained what was there. The first chunk says how many rows and pairs there are, so
the receiver allocates exactly these. Answers come back the same way. The host drives both ends
(``poll``), since it must know the counts anyway, and it alone keeps the deadlines: no kernel waits,
and a slow peer holds up its own lane only. Neither end ever waits for one thing before it has moved
all others that can move, so rings that are full both ways come free.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ep_kernels.plane import AnswerStatus, PlaneError
from ep_kernels.triton.all_to_all.answer import answer
from ep_kernels.triton.all_to_all.combine import combine
from ep_kernels.triton.all_to_all.drain import drain
from ep_kernels.triton.all_to_all.end import End, ExchangeShape, Peer
from ep_kernels.triton.all_to_all.inbox import Header, InboxLayout, LaneState, Wire
from ep_kernels.triton.all_to_all.plan import Lists, Pairs, plan
from ep_kernels.triton.all_to_all.put import put
from ep_kernels.triton.all_to_all.symmetric import SymmetricBuffer
from ep_kernels.triton.arguments import KernelArgumentError, check_tensor

_DTYPES = {
    Wire.FP32: torch.float32,
    Wire.BF16: torch.bfloat16,
    Wire.FP8: torch.float8_e4m3fn,
}
_PAUSE_S = 2e-4


@dataclass(frozen=True, slots=True)
class Batch:
    """A whole batch on one lane, in memory of its own: ``rows [n, hidden]`` in the wire's format
    with ``scales [n, hidden / 128]``, ``begins [n + 1]`` and the pairs' arrays ``[pairs]``.

    For an answer only ``rows`` are there.
    """

    lane: int
    peer: str
    step: int
    layer: int
    epoch: int
    status: int
    rows: torch.Tensor
    scales: torch.Tensor
    begins: torch.Tensor
    pair_row: torch.Tensor
    pair_slot: torch.Tensor
    pair_expert: torch.Tensor
    pair_weight: torch.Tensor

    def arrays(self) -> tuple[torch.Tensor, ...]:
        return (
            self.rows,
            self.scales,
            self.begins,
            self.pair_row,
            self.pair_slot,
            self.pair_expert,
            self.pair_weight,
        )


@dataclass(slots=True)
class _Incoming:
    batch: Batch
    rows: int
    pairs: int


@dataclass(slots=True)
class _Outgoing:
    """``sent`` is -1 until the first chunk is: an empty batch has one, too."""

    x: torch.Tensor
    counts: torch.Tensor
    total: int
    layer: int
    lists: Lists | None
    statuses: torch.Tensor | None
    sent: int = -1


class Stream(End):
    """What both ends of a stream do: put chunks into free ring slots, drain those that came.

    ``max_rows`` bounds what a peer can make this end allocate. One thread calls everything.
    """

    def __init__(
        self,
        layout: InboxLayout,
        inbox: SymmetricBuffer,
        peers: Sequence[Peer],
        peer_layout: InboxLayout,
        deadline_s: float,
        max_rows: int,
    ) -> None:
        super().__init__(layout, inbox, peers, peer_layout, deadline_s)
        lanes, slots = len(peers), layout.shape.ring_slots
        self.max_rows = max_rows
        self._step = self._epoch = 0
        self._flag_sent = [[0] * slots for _ in range(lanes)]
        self._flag_seen = [[0] * slots for _ in range(lanes)]
        self._slot_out = [0] * lanes
        self._slot_in = [0] * lanes
        self._incoming: dict[int, _Incoming] = {}
        self._outgoing: dict[int, _Outgoing] = {}
        self._closed: set[int] = set()

    def set_stamp(self, step: int, epoch: int) -> None:
        super().set_stamp(step, epoch)
        self._step, self._epoch = step, epoch

    def sending(self) -> bool:
        """Whether chunks are left that found no free ring slot yet."""
        return bool(self._outgoing)

    def close_lane(self, lane: int, state: LaneState) -> None:
        """Forget what is under way on a lane; ``lost`` reports it."""
        if lane not in self._closed:
            self._closed.add(lane)
            self.state[lane] = int(state)
            self._incoming.pop(lane, None)
            self._outgoing.pop(lane, None)

    def move(self) -> tuple[list[Batch], set[int]]:
        """Put and drain all that can be; batches that are complete, and lanes that moved."""
        flags = self._flags()
        moved = self._put(flags[1])
        complete: list[Batch] = []
        for lane in range(len(self.peers)):
            while lane not in self._closed and self._drain(lane, flags[0][lane], complete):
                moved.add(lane)
        return complete, moved

    def _flags(self) -> list[list[list[int]]]:
        """``[posted or taken][lane][slot]``; waits for the device."""
        words = self.layout.flag_stride // 8
        view = self.inbox.view(0, torch.int64, 2, len(self.peers), words)
        flags: list[list[list[int]]] = view[:, :, : self.layout.shape.ring_slots].tolist()
        return flags

    def _put(self, taken: list[list[int]]) -> set[int]:
        free: dict[tuple[int, int], list[int]] = {}
        for lane, message in self._outgoing.items():
            slot = self._slot_out[lane]
            if taken[lane][slot] >= self._flag_sent[lane][slot]:
                free.setdefault((slot, id(message.counts)), []).append(lane)
        moved: set[int] = set()
        for (slot, _), lanes in free.items():
            self._put_chunks(slot, lanes)
            moved.update(lanes)
        return moved

    def _put_chunks(self, slot: int, lanes: list[int]) -> None:
        """One chunk on each of ``lanes``, whose messages come from the same arrays."""
        message = self._outgoing[lanes[0]]
        go, firsts = [0] * len(self.peers), [0] * len(self.peers)
        capacity = self.peer_layout.shape.capacity_rows
        for lane in lanes:
            sequence = (self._flag_sent[lane][slot] & 0xFFFFFFFF) + 1
            go[lane] = self._flag_sent[lane][slot] = self._epoch << 32 | sequence
            firsts[lane] = max(self._outgoing[lane].sent, 0)
        put(
            self,
            message.x,
            message.counts,
            slot,
            torch.tensor(go, device=self.device),
            message.layer,
            torch.tensor(firsts, dtype=torch.int32, device=self.device),
            lists=message.lists,
            statuses=message.statuses,
        )
        for lane in lanes:
            out = self._outgoing[lane]
            out.sent = firsts[lane] + capacity
            self._slot_out[lane] = (slot + 1) % self.layout.shape.ring_slots
            if out.sent >= out.total:
                del self._outgoing[lane]

    def _drain(self, lane: int, posted: list[int], complete: list[Batch]) -> bool:
        """Drain the lane's next chunk, if it is there."""
        slot = self._slot_in[lane]
        if posted[slot] <= self._flag_seen[lane][slot]:
            return False
        header = self.header(lane, slot)
        coming = self._incoming.get(lane)
        rows, pairs = header[Header.ROWS], header[Header.PAIRS]
        at = (0, 0) if coming is None else (coming.rows, coming.pairs)
        total = (header[Header.TOTAL_ROWS], header[Header.TOTAL_PAIRS])
        shape = self.layout.shape
        sound = (
            header[Header.FLAG] == posted[slot]
            and (header[Header.FIRST_ROW], header[Header.FIRST_PAIR]) == at
            and 0 <= rows <= shape.capacity_rows
            and 0 <= pairs <= shape.capacity_pairs
            and at[0] + rows <= total[0] <= self.max_rows
            and at[1] + pairs <= total[1] <= total[0] * max(1, self._pairs_a_row())
            and (coming is None or total == _totals(coming.batch))
        )
        if not sound:
            self.close_lane(lane, LaneState.CORRUPT)
            return False
        if coming is None:
            coming = self._incoming[lane] = _Incoming(self._allocate(lane, header), 0, 0)
        drain(self, lane, slot, coming.batch.arrays())
        coming.rows += rows
        coming.pairs += pairs
        self._flag_seen[lane][slot] = posted[slot]
        self._slot_in[lane] = (slot + 1) % shape.ring_slots
        if coming.rows == total[0]:
            complete.append(coming.batch)
            del self._incoming[lane]
        return True

    def _pairs_a_row(self) -> int:
        shape = self.layout.shape
        return shape.capacity_pairs // shape.capacity_rows

    def _allocate(self, lane: int, header: dict[Header, int]) -> Batch:
        shape = self.layout.shape
        rows, pairs = header[Header.TOTAL_ROWS], header[Header.TOTAL_PAIRS]
        has_pairs = shape.capacity_pairs > 0

        def empty(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
            return torch.empty(sizes, dtype=dtype, device=self.device)

        return Batch(
            lane=lane,
            peer=self.peers[lane].name,
            step=header[Header.STEP],
            layer=header[Header.LAYER],
            epoch=header[Header.EPOCH],
            status=header[Header.STATUS],
            rows=empty(_DTYPES[shape.wire], rows, shape.hidden),
            scales=empty(torch.float32, rows, self.layout.scale_row_bytes // 4),
            begins=empty(torch.int32, rows + 1 if has_pairs else 0),
            pair_row=empty(torch.int32, pairs),
            pair_slot=empty(torch.int32, pairs),
            pair_expert=empty(torch.int32, pairs),
            pair_weight=empty(torch.float32, pairs),
        )


def _totals(batch: Batch) -> tuple[int, int]:
    return batch.rows.shape[0], batch.pair_row.shape[0]


class RouterStream(Stream):
    """A router's end: ``exchange`` sends a batch to its expert ranks and adds up their answers."""

    def __init__(
        self,
        shape: ExchangeShape,
        inbox: SymmetricBuffer,
        peers: Sequence[Peer],
        deadline_s: float,
        max_tokens: int,
    ) -> None:
        most = max_tokens * (shape.top_k if shape.exact else 1)
        super().__init__(shape.answers, inbox, peers, shape.requests, deadline_s, most)
        self.shape = shape
        self.max_tokens = max_tokens

    def exchange(
        self, x: torch.Tensor, pairs: Pairs, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``x [tokens, hidden]`` fp32 or bf16, ``pairs [tokens, top_k]`` -> ``out`` and ``missing``
        as ``RouterExchange.combine`` returns them.

        Blocks. A lane on which nothing has moved for ``deadline_s`` is closed, and reported by
        ``lost``. Raises ``KernelArgumentError``.
        """
        check_tensor("x", x, (None, self.shape.hidden), torch.float32, torch.bfloat16)
        if x.shape[0] > self.max_tokens:
            raise KernelArgumentError("x", f"{x.shape[0]} tokens", f"at most {self.max_tokens}")
        pairs.check(x, self.shape.top_k)
        lanes = len(self.peers)
        lists = Lists(lanes, max(1, x.shape[0]), self.shape.top_k, self.device)
        go = torch.zeros(lanes, dtype=torch.int64, device=self.device)
        plan(self, lists, 0, go, pairs, exact=self.shape.exact, claim=False)
        for lane, (rows, _) in enumerate(lists.counts.tolist()):
            if lane not in self._closed:
                self._outgoing[lane] = _Outgoing(x, lists.counts, rows, layer, lists, None)
        answers = self._collect()
        answered = torch.zeros(lanes, dtype=torch.int32)
        sources = torch.zeros(lanes, dtype=torch.int64)
        for lane, batch in answers.items():
            answered[lane] = batch.status
            sources[lane] = batch.rows.data_ptr()
        return combine(
            self,
            0,
            pairs,
            lists,
            go,
            answered.to(self.device),
            sources.to(self.device),
            exact=self.shape.exact,
            streamed=True,
        )

    def _collect(self) -> dict[int, Batch]:
        answers: dict[int, Batch] = {}
        began = time.monotonic()
        last = dict.fromkeys(range(len(self.peers)), began)
        while waiting := set(range(len(self.peers))) - self._closed - answers.keys():
            complete, moved = self.move()
            answers.update((batch.lane, batch) for batch in complete)
            now = time.monotonic()
            last.update(dict.fromkeys(moved, now))
            for lane in waiting - answers.keys():
                if now - last[lane] > self.deadline_s:
                    self.close_lane(lane, LaneState.TIMED_OUT)
            if not moved:
                time.sleep(_PAUSE_S)
        return answers


class ExpertStream(Stream):
    """An expert rank's end: ``poll`` for batches, ``answer`` or ``refuse`` each, ``poll`` on."""

    def __init__(
        self,
        shape: ExchangeShape,
        inbox: SymmetricBuffer,
        peers: Sequence[Peer],
        deadline_s: float,
        max_tokens: int,
    ) -> None:
        super().__init__(shape.requests, inbox, peers, shape.answers, deadline_s, max_tokens)
        self.shape = shape
        self._moved = [time.monotonic()] * len(peers)

    def poll(self) -> list[Batch]:
        """Batches that are complete. Never blocks; also sends what it can of answers.

        A lane is closed when a batch on it, either way, has not moved for ``deadline_s``.
        """
        busy = set(self._incoming) | set(self._outgoing)
        complete, moved = self.move()
        now = time.monotonic()
        for lane in range(len(self.peers)):
            if lane in moved or lane not in busy:
                self._moved[lane] = now
            elif now - self._moved[lane] > self.deadline_s:
                self.close_lane(lane, LaneState.TIMED_OUT)
        return complete

    def answer(self, batch: Batch, y: torch.Tensor, home: torch.Tensor) -> None:
        """Send the experts' output: pair ``p``'s is row ``home[p]`` (int32) of ``y [n, hidden]``
        fp32 or bf16. The lane's next batch comes only after this. Raises ``PlaneError``.
        """
        check_tensor("y", y, (None, self.shape.hidden), torch.float32, torch.bfloat16)
        pairs = batch.pair_row.shape[0]
        check_tensor("home", home, (pairs,), torch.int32, like=y)
        rows = pairs if self.shape.exact else batch.rows.shape[0]
        out = torch.empty(
            (rows, self.shape.hidden), dtype=_DTYPES[self.shape.back], device=self.device
        )
        where = [batch.begins, batch.pair_weight, home, out]
        answer(
            self,
            0,
            y,
            torch.tensor([batch.lane], dtype=torch.int32, device=self.device),
            torch.tensor([[*(array.data_ptr() for array in where), 0]], device=self.device),
            torch.ones(1, dtype=torch.int64, device=self.device),
            torch.tensor(
                [[batch.rows.shape[0], pairs, 0, 0]], dtype=torch.int32, device=self.device
            ),
            rows,
            top_k=self.shape.top_k,
            exact=self.shape.exact,
            post=False,
        )
        self._send(batch, out, AnswerStatus.OK)

    def refuse(self, batch: Batch) -> None:
        """Answer that the batch is stale: no row of it is valid. Raises ``PlaneError``."""
        rows = torch.empty((1, self.shape.hidden), device=self.device)
        self._send(batch, rows[:0], AnswerStatus.STALE)

    def _send(self, batch: Batch, out: torch.Tensor, status: AnswerStatus) -> None:
        if batch.lane in self._closed:
            return  # the router is gone and has given this batch up
        if batch.lane in self._outgoing:
            raise PlaneError(f"a batch of {batch.peer} was answered already")
        counts = torch.zeros((len(self.peers), 2), dtype=torch.int32, device=self.device)
        counts[batch.lane, 0] = out.shape[0]
        statuses = torch.full(
            (len(self.peers),), int(status), dtype=torch.int32, device=self.device
        )
        self._outgoing[batch.lane] = _Outgoing(
            out, counts, out.shape[0], batch.layer, None, statuses
        )
