"""Both ends of the low-latency exchange: fixed capacity, nothing read back, capturable.

A router ``dispatch``es a batch into a ring slot of every expert rank and later ``combine``s the
answers; an expert rank ``receive``s on some lanes and ``answer``s. No call waits for the device or
reads a count, so that a step can be captured in a CUDA graph; what changes from replay to replay
(step, epoch) lies in device memory (``stamp``). Ring slots are independent: with two, one
micro-batch is with the experts while another is sent. A slot is dispatched into again only after
its ``combine``, in the same stream, which waits for every lane; so no sender laps the ring.

Whoever waits gives up after ``deadline_s`` and goes on without that lane. ``lost`` tells: it is the
only call that synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep_kernels.plane import PlaneError
from ep_kernels.triton.all_to_all.answer import answer
from ep_kernels.triton.all_to_all.arrive import Arrived, arrive
from ep_kernels.triton.all_to_all.combine import combine
from ep_kernels.triton.all_to_all.end import End, ExchangeShape, Peer
from ep_kernels.triton.all_to_all.plan import Lists, Pairs, plan
from ep_kernels.triton.all_to_all.put import put
from ep_kernels.triton.all_to_all.symmetric import SymmetricBuffer
from ep_kernels.triton.arguments import KernelArgumentError, check_tensor


class RouterExchange(End):
    """A router's end. ``inbox`` is laid out as ``shape.answers``; peers are the expert ranks, in
    the order of ``Pairs.rank``.
    """

    def __init__(
        self,
        shape: ExchangeShape,
        inbox: SymmetricBuffer,
        peers: Sequence[Peer],
        deadline_s: float,
    ) -> None:
        super().__init__(shape.answers, inbox, peers, shape.requests, deadline_s)
        self.shape = shape
        slots, lanes = shape.ring_slots, shape.experts
        self._lists = [
            Lists(lanes, shape.capacity_tokens, shape.top_k, self.device) for _ in range(slots)
        ]
        self._go = torch.zeros((slots, lanes), dtype=torch.int64, device=self.device)
        self._pairs: list[Pairs | None] = [None] * slots
        self.answered = torch.zeros((slots, lanes), dtype=torch.int32, device=self.device)
        """Status of each lane's last answer, ``AnswerStatus`` or 0 for none, by ring slot."""

    def dispatch(self, slot: int, x: torch.Tensor, pairs: Pairs, layer: int) -> None:
        """Send ``x [tokens, hidden]`` fp32 or bf16 to the ranks that hold its pairs' experts.

        Every open lane gets a message, if need be without rows. ``pairs`` must stay as they are
        until ``combine``. Raises ``PlaneError`` when the slot's last batch was not combined,
        ``KernelArgumentError`` for tensors that do not fit.
        """
        self.check_slot(slot)
        check_tensor("x", x, (None, self.shape.hidden), torch.float32, torch.bfloat16)
        if x.shape[0] > self.shape.capacity_tokens:
            raise KernelArgumentError(
                "x", f"{x.shape[0]} tokens", f"at most {self.shape.capacity_tokens}"
            )
        pairs.check(x, self.shape.top_k)
        if self._pairs[slot] is not None:
            raise PlaneError(f"ring slot {slot} has a batch that was not combined")
        lists, go = self._lists[slot], self._go[slot]
        plan(self, lists, slot, go, pairs, exact=self.shape.exact, claim=True)
        put(self, x, lists.counts, slot, go, layer, self.firsts, lists=lists)
        self._pairs[slot] = pairs

    def combine(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for every lane's answer: ``out [tokens, hidden]`` fp32 and ``missing [tokens]``
        int32, 1 where a lane was lost or answered stale and ``out`` lacks its part.
        """
        self.check_slot(slot)
        pairs = self._pairs[slot]
        if pairs is None:
            raise PlaneError(f"ring slot {slot} has no batch to combine")
        self._pairs[slot] = None
        lists = self._lists[slot]
        return combine(
            self,
            slot,
            pairs,
            lists,
            self._go[slot],
            self.answered[slot],
            self.addresses,
            exact=self.shape.exact,
            streamed=False,
        )


class ExpertExchange(End):
    """An expert rank's end. ``inbox`` is laid out as ``shape.requests``; peers are the routers."""

    def __init__(
        self,
        shape: ExchangeShape,
        inbox: SymmetricBuffer,
        peers: Sequence[Peer],
        deadline_s: float,
    ) -> None:
        super().__init__(shape.requests, inbox, peers, shape.answers, deadline_s)
        self.shape = shape
        self._kept: dict[tuple[int, int, tuple[int, ...]], Arrived] = {}

    @property
    def rows(self) -> torch.Tensor:
        """``[routers * ring_slots * capacity_tokens, hidden]`` in the wire's format (FP8 as
        float8_e4m3fn): what ``Arrived.index`` numbers.
        """
        shape = self.layout.shape
        dtype = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)[shape.wire]
        count = shape.peers * shape.ring_slots * shape.capacity_rows
        return self.inbox.view(self.layout.rows, dtype, count, shape.hidden)

    @property
    def scales(self) -> torch.Tensor:
        """``[rows, hidden / 128]`` fp32 on an FP8 wire."""
        shape = self.layout.shape
        count = shape.peers * shape.ring_slots * shape.capacity_rows
        return self.inbox.view(
            self.layout.scales, torch.float32, count, self.layout.scale_row_bytes // 4
        )

    def receive(self, slot: int, lanes: Sequence[int], held: torch.Tensor) -> Arrived:
        """Wait for a message on each of ``lanes``. ``held [experts]`` int32 is the logical expert
        of each of this rank's slots (-1: none).

        The result's tensors are the same for the same slot and lanes, for a captured graph.
        """
        self.check_slot(slot)
        check_tensor("held", held, (None,), torch.int32)
        arrived = self._arrived(slot, tuple(lanes), held.shape[0])
        arrive(self, slot, held, arrived)
        return arrived

    def answer(self, arrived: Arrived, y: torch.Tensor) -> None:
        """Send ``y`` (fp32 or bf16, as ``Arrived`` numbers it) back, and free the messages."""
        count = arrived.index.numel()
        check_tensor(
            "y", y, (count, self.shape.hidden), torch.float32, torch.bfloat16, like=arrived.lanes
        )
        answer(
            self,
            arrived.slot,
            y,
            arrived.lanes,
            arrived.where,
            arrived.got,
            arrived.info,
            self.peer_layout.shape.capacity_rows,
            top_k=self.shape.top_k,
            exact=self.shape.exact,
            post=True,
        )

    def _arrived(self, slot: int, lanes: tuple[int, ...], experts: int) -> Arrived:
        key = (slot, experts, lanes)
        if key not in self._kept:
            self._kept[key] = self._new_arrived(slot, lanes, experts)
        return self._kept[key]

    def _new_arrived(self, slot: int, lanes: tuple[int, ...], experts: int) -> Arrived:
        layout, back = self.layout, self.peer_layout
        capacity, pairs = layout.shape.capacity_rows, layout.shape.capacity_pairs
        device = self.device

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        home = ints(len(lanes), pairs)
        where = []
        for which, lane in enumerate(lanes):
            message = layout.message(lane, slot)
            peer = self.peers[lane]
            answer_rows = back.message(peer.me, slot) * back.shape.capacity_rows
            where.append(
                (
                    self.inbox.address + layout.begins + message * layout.begin_stride,
                    self.inbox.address + layout.pairs + (4 * message + 3) * layout.pair_stride,
                    home[which].data_ptr(),
                    peer.inbox.address + back.rows,
                    answer_rows,
                )
            )
        return Arrived(
            slot=slot,
            lanes=torch.tensor(lanes, dtype=torch.int32, device=device),
            index=ints(experts, len(lanes), capacity),
            count=ints(experts, len(lanes)),
            home=home,
            info=ints(len(lanes), 4),
            got=torch.zeros(len(lanes), dtype=torch.int64, device=device),
            where=torch.tensor(where, dtype=torch.int64, device=device).view(len(lanes), 5),
        )
