"""A router's model on several devices: ``group_model`` with the rows on their way between GPUs.

Questions go over the followers' links, as on CPUs, and tell how many rows there are. The rows
themselves are broadcast to the followers' devices, and what all ranks made of them is added up on
the leader's, by ``ep_kernels.ranks``: gloo in the interpreter, NCCL between GPUs. What a rank
computes between two such calls may be a CUDA graph; the calls are outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

import torch
from ep_kernels.ranks import Ranks, RanksLost
from ep_kernels.triton.device import Device, Mark, Stream, open_device

from moe_model.device.model import (
    DeviceCache,
    DeviceParts,
    DeviceWeights,
    load_device_parts,
)
from moe_model.device.plan import DevicePlan
from moe_model.device.shard import DeviceShard
from moe_model.plan import Chunk
from moe_model.shard import Shard
from moe_model.spec import ModelSpec
from router_svc.follower import Assignment
from router_svc.group import device_weights
from router_svc.group_model import LIVE_PLANS, encode_chunks
from router_svc.peers import FollowerLinks, GroupLost, LeaderLink, Op, Question


@dataclass(frozen=True, slots=True)
class DeviceGroupPlan:
    """The leader's plan, which the followers have too, under ``number``."""

    own: DevicePlan
    number: int


class DeviceGroupCache(DeviceCache):
    """The leader's part of the cache; what happens to its blocks happens to the followers'."""

    followers: FollowerLinks

    def clear(self, blocks: Sequence[int]) -> None:
        self.followers.tell(Op.CLEAR, 0, 0, torch.tensor(blocks, dtype=torch.int32))
        super().clear(blocks)


class DeviceGroupModel(DeviceShard):
    """Rank 0's part, and the sums of all. Methods raise ``GroupLost``."""

    def __init__(self, parts: DeviceParts, followers: FollowerLinks, ranks: Ranks) -> None:
        super().__init__(parts)
        self._followers = followers
        self._ranks = ranks
        self._widths = _head_widths(parts.spec, self.shard.size)
        self._plans = 0
        self.stream = Watched(self.stream, followers.watch(owing=False))

    @property
    def waited_ns(self) -> int:
        return self._ranks.waited_ns

    def new_kv_cache(self, num_blocks: int, block_size: int) -> DeviceCache:
        self._followers.tell(Op.CACHE, num_blocks, block_size)
        cache = super().new_kv_cache(num_blocks, block_size)
        # They have compiled their kernels by then: nothing is waited for that long later.
        self._followers.until_loaded(lambda: self._progress(1.0))
        return cache

    def _empty_cache(self, num_blocks: int, block_size: int) -> DeviceCache:
        cache = DeviceGroupCache(
            self.spec.num_layers,
            num_blocks,
            block_size,
            self._attention.cache_width,
            dtype=self._dtype,
            device=self._device,
        )
        cache.followers = self._followers
        return cache

    def plan(self, chunks: Sequence[Chunk], block_size: int = 16) -> DeviceGroupPlan:  # type: ignore[override]
        number = self._plans = (self._plans + 1) % LIVE_PLANS
        # First, so that they plan while this process does.
        self._followers.tell(Op.PLAN, len(chunks), number, encode_chunks(chunks))
        return DeviceGroupPlan(super().plan(chunks, block_size), number)

    def embed(self, plan: DeviceGroupPlan) -> torch.Tensor:  # type: ignore[override]
        own = plan.own
        token_ids = own.token_ids[: own.num_tokens]
        return self._sum(Op.EMBED, 0, plan.number, None, own.num_tokens,
                         lambda: self.embed_part(token_ids))  # fmt: skip

    def attend(  # type: ignore[override]
        self, layer: int, h: torch.Tensor, plan: DeviceGroupPlan, kv: DeviceCache
    ) -> torch.Tensor:
        return h + self._sum(Op.ATTEND, layer, plan.number, h, h.shape[0],
                             lambda: self.attend_part(layer, h, plan.own, kv))  # fmt: skip

    def dense(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        return h + self._sum(Op.DENSE, layer, 0, h, h.shape[0],
                             lambda: self.dense_part(layer, h))  # fmt: skip

    def shared(self, layer: int, x: torch.Tensor) -> torch.Tensor | None:
        if self._layers[layer].shared is None:
            return None
        return self._sum(Op.SHARED, layer, 0, x, x.shape[0], lambda: self.shared_part(layer, x))

    def logits(self, h_rows: torch.Tensor) -> torch.Tensor:
        rows = h_rows.shape[0]
        self._ask(Op.LOGITS, 0, 0, h_rows)
        own = h_rows.new_zeros(rows, self.vocabulary_size)
        try:
            own = self.logits_part(h_rows)
        finally:
            with _group_lost():
                whole = self._ranks.side_by_side(own, self._widths)
        return whole

    def _sum(
        self,
        op: Op,
        a: int,
        b: int,
        payload: torch.Tensor | None,
        rows: int,
        part: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Rank 0's ``part`` plus the others', ``[rows, hidden]``."""
        self._ask(op, a, b, payload)
        out = torch.zeros(rows, self.spec.hidden_size, device=self._device.place)
        try:
            out = part()
        finally:
            # Whatever becomes of the own part: the others wait with theirs.
            with _group_lost():
                self._ranks.reduce(out)
        return out

    def _ask(self, op: Op, a: int, b: int, rows: torch.Tensor | None) -> None:
        if rows is None:
            self._followers.tell(op, a, b)
            return
        self._followers.tell(op, a, b, torch.tensor([rows.shape[0]], dtype=torch.int32))
        with _group_lost():
            self._ranks.broadcast(rows.contiguous())


class ByRanks:
    """``follower.Exchange`` between devices."""

    def __init__(self, model: DeviceShard, device: Device, store: int, leader: LeaderLink) -> None:
        self.place = device.place
        self._store = store
        self._shard = model.shard
        self._spec = model.spec
        self._widths = _head_widths(model.spec, model.shard.size)
        self._leader = leader
        self._ranks: Ranks | None = None

    def meet(self) -> None:
        with _group_lost():
            self._ranks = Ranks(self.place, self._store, self._shard.rank, self._shard.size)

    def rows(self, question: Question) -> torch.Tensor:
        count = int(question.payload[0]) if question.payload.numel() else 0
        rows = torch.empty(count, self._spec.hidden_size, device=self.place)
        if count:
            with _group_lost():
                self._met.broadcast(rows)
        return rows

    def answer(self, question: Question, part: torch.Tensor) -> None:
        with _group_lost():
            if question.op is Op.LOGITS:
                self._met.side_by_side(part, self._widths)
            else:
                self._met.reduce(part.contiguous())

    def cached(self) -> None:
        self._leader.say_loaded()

    @property
    def _met(self) -> Ranks:
        assert self._ranks is not None, "asked before the ranks have met"
        return self._ranks


class Watched:
    """A stream of the leader's: whoever waits for a mark in it learns of a follower's end, after
    which the device may never get there.
    """

    def __init__(self, stream: Stream, look: Callable[[float], None]) -> None:
        self._stream = stream
        self._look = look

    def __enter__(self) -> Self:
        self._stream.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.__exit__(kind, error, trace)

    def mark(self) -> Mark:
        return _WatchedMark(self._stream.mark(), self._look)

    def follow(self, mark: Mark) -> None:
        self._stream.follow(mark)


class _WatchedMark:
    def __init__(self, mark: Mark, look: Callable[[float], None]) -> None:
        self._mark = mark
        self._look = look
        self._began = monotonic()

    @property
    def done(self) -> bool:
        if self._mark.done:
            return True
        self._look(monotonic() - self._began)
        return False


def load_device_group(
    path: Path,
    device: Device,
    size: int,
    store: int,
    followers: FollowerLinks,
    *,
    weights: DeviceWeights,
    progress: Callable[[float], None],
) -> DeviceGroupModel:
    """The leader's model, once every rank has its part and all have met. Raises ``CheckpointError``
    and ``GroupLost``; see ``load_device_model``.
    """
    parts = load_device_parts(path, device, 0, size, weights=weights, progress=progress)
    followers.until_loaded(lambda: progress(0.9))
    followers.tell(Op.MEET, 0, 0)
    with _group_lost():
        ranks = Ranks(device.place, store, 0, size, look=followers.watch(owing=True))
    return DeviceGroupModel(parts, followers, ranks)


def open_device_shard(task: Assignment, leader: LeaderLink) -> tuple[DeviceShard, ByRanks]:
    """A follower's part and exchange. Raises ``CheckpointError``, ``DeviceUnavailable``."""
    device = open_device(task.device)
    parts = load_device_parts(
        Path(task.model),
        device,
        task.rank,
        task.size,
        weights=device_weights(task.weights),
        progress=lambda _share: leader.say_loading(),
    )
    model = DeviceShard(parts)
    return model, ByRanks(model, device, task.store_fd, leader)


def _head_widths(spec: ModelSpec, size: int) -> list[int]:
    """Tokens of the vocabulary that each rank has."""
    cuts = [Shard(spec, rank, size).cut("head") for rank in range(size)]
    return [cut.stop - cut.start for cut in cuts if cut is not None]


@contextmanager
def _group_lost() -> Iterator[None]:
    try:
        yield
    except RanksLost as error:
        raise GroupLost(f"a rank of the router's group is gone: {error}") from error
