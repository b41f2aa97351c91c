"""A router's model on several processes: the leader's end, as the engine sees it.

The residual stream is the leader's alone. For each attention, dense layer and shared expert it
sends the input to its followers, computes its own part meanwhile, and adds theirs in order of rank.
Nobody but the leader needs the sums, since gate, dispatch and combine are its own; and a sum that
is always added in one order is the same whatever the batch.

A follower that cannot compute its part answers NaN: the sequences concerned then end as those do
whose logits are not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from moe_model.kv_cache import KVCache
from moe_model.model import Parts
from moe_model.plan import Chunk, StepPlan
from moe_model.shard import Shard
from moe_model.shard_model import RouterShard
from router_svc.peers import FollowerLinks, Op

LIVE_PLANS = 4
"""Plans in use at once: one a micro-batch."""

_PLAN_FIELDS = tuple(field.name for field in fields(StepPlan))


@dataclass(frozen=True, slots=True)
class GroupPlan(StepPlan):
    """A plan that the followers have too, under ``number``."""

    number: int


class GroupCache(KVCache):
    """The leader's part of the cache; what happens to its blocks happens to the followers'."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        width: int,
        followers: FollowerLinks,
    ) -> None:
        super().__init__(num_layers, num_blocks, block_size, width)
        self._followers = followers
        followers.tell(Op.CACHE, num_blocks, block_size)

    def clear(self, blocks: Sequence[int]) -> None:
        self._followers.tell(Op.CLEAR, 0, 0, torch.tensor(blocks, dtype=torch.int32))
        super().clear(blocks)


class GroupModel(RouterShard):
    """Rank 0's part, and the sums of all. Methods raise ``GroupLost``."""

    def __init__(self, parts: Parts, followers: FollowerLinks) -> None:
        super().__init__(parts)
        self._followers = followers
        self._others = range(1, self.shard.size)
        self._head_widths = [
            cut.stop - cut.start
            for rank in self._others
            if (cut := Shard(parts.spec, rank, self.shard.size).cut("head")) is not None
        ]
        self._plans = 0

    @property
    def waited_ns(self) -> int:
        return self._followers.waited_ns

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        layers, width = self.spec.num_layers, self._cache_width
        return GroupCache(layers, num_blocks, block_size, width, self._followers)

    def plan(self, chunks: Sequence[Chunk], block_size: int = 16) -> StepPlan:
        number = self._plans = (self._plans + 1) % LIVE_PLANS
        # First, so that they plan while this process does.
        self._followers.tell(Op.PLAN, len(chunks), number, encode_chunks(chunks))
        plan = super().plan(chunks, block_size)
        return GroupPlan(**{name: getattr(plan, name) for name in _PLAN_FIELDS}, number=number)

    def embed(self, plan: StepPlan) -> torch.Tensor:
        return self._sum(
            Op.EMBED, 0, _number(plan), None, plan.num_tokens, self.embed_part, plan.token_ids
        )

    def attend(self, layer: int, h: torch.Tensor, plan: StepPlan, kv: KVCache) -> torch.Tensor:
        number, rows = _number(plan), h.shape[0]
        return self._sum(
            Op.ATTEND, layer, number, h, rows, self.attend_part, layer, h, plan, kv
        ).add_(h)

    def dense(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        return self._sum(Op.DENSE, layer, 0, h, h.shape[0], self.dense_part, layer, h).add_(h)

    def shared(self, layer: int, x: torch.Tensor) -> torch.Tensor | None:
        if self._layers[layer].shared is None:
            return None
        return self._sum(Op.SHARED, layer, 0, x, x.shape[0], self.shared_part, layer, x)

    def logits(self, h_rows: torch.Tensor) -> torch.Tensor:
        rows = h_rows.shape[0]
        shapes = [(rows, width) for width in self._head_widths]
        own, others = self._all(Op.LOGITS, 0, 0, h_rows, shapes, self.logits_part, h_rows)
        return torch.cat([own, *others], 1)

    def _sum(
        self,
        op: Op,
        a: int,
        b: int,
        payload: torch.Tensor | None,
        rows: int,
        part: Callable[..., torch.Tensor],
        *arguments: object,
    ) -> torch.Tensor:
        shapes = [(rows, self.spec.hidden_size) for _ in self._others]
        out, others = self._all(op, a, b, payload, shapes, part, *arguments)
        for other in others:
            out.add_(other)
        return out

    def _all(
        self,
        op: Op,
        a: int,
        b: int,
        payload: torch.Tensor | None,
        shapes: Sequence[tuple[int, int]],
        part: Callable[..., torch.Tensor],
        *arguments: object,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Rank 0's ``part`` and the others'."""
        if payload is not None:
            payload = payload.contiguous()
        self._followers.ask(op, a, b, payload, shapes)
        try:
            own = part(*arguments)
        finally:
            # Whatever becomes of the own part: the next answer must be the next question's.
            answers = self._followers.answers()
        return own, answers


def encode_chunks(chunks: Sequence[Chunk]) -> torch.Tensor:
    """int32: start, tokens and blocks of each chunk, then all token ids, then all block tables."""
    words: list[int] = []
    for chunk in chunks:
        words += (chunk.start, len(chunk.token_ids), len(chunk.block_table))
    for chunk in chunks:
        words += chunk.token_ids
    for chunk in chunks:
        words += chunk.block_table
    return torch.from_numpy(np.array(words, dtype=np.int32))


def decode_chunks(words: Sequence[int], count: int) -> list[Chunk]:
    """The reverse, of ``count`` chunks."""
    at = 3 * count
    heads = [words[3 * i : 3 * i + 3] for i in range(count)]
    tokens = []
    for _start, length, _blocks in heads:
        tokens.append(words[at : at + length])
        at += length
    chunks = []
    for (start, _length, blocks), ids in zip(heads, tokens, strict=True):
        chunks.append(Chunk(ids, start, words[at : at + blocks]))
        at += blocks
    return chunks


def _number(plan: StepPlan) -> int:
    assert isinstance(plan, GroupPlan)
    return plan.number
