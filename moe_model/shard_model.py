"""One rank's part of a router's model: what it adds to each sum of its group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import embedding

from moe_model.kv_cache import KVCache
from moe_model.model import Parts, RouterModel, Weights, load_parts
from moe_model.plan import StepPlan
from moe_model.shard import Cut, Shard
from moe_model.spec import load_spec


class RouterShard(RouterModel):
    """A ``RouterModel`` over the tensors of one ``Shard``. The ``_part`` methods need nothing of
    the other ranks; what they return is added up over the ranks (or, for logits, put side by side)
    to what the method of the same name of a whole model computes, the residual aside.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.shard = parts.shard
        self._vocabulary = parts.shard.cut("embedding") or Cut(0, 0, parts.spec.vocab_size)
        self.vocabulary_size = self._vocabulary.stop - self._vocabulary.start
        """Tokens of the vocabulary that are this rank's."""

    def embed_part(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[n]`` -> ``[n, hidden]``; zeros for tokens of other ranks."""
        return own_embeddings(self._table, self._vocabulary, token_ids)

    def attend_part(self, layer: int, h: torch.Tensor, plan: StepPlan, kv: KVCache) -> torch.Tensor:
        """Over the rank's own heads. Writes its rows of ``layer`` to ``kv``."""
        parts = self._layers[layer]
        out = self._decode(parts.decode, layer, h, plan, kv, add=False)
        if out is not None:
            return out
        return parts.attention(parts.attention_norm(h), plan, kv, layer)

    def dense_part(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        parts = self._layers[layer]
        assert parts.dense is not None
        return parts.dense(parts.ffn_norm(h))

    def shared_part(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """For ``gate``'s ``x`` of a layer with a shared expert."""
        shared = self._layers[layer].shared
        assert shared is not None
        return shared(x)

    def logits_part(self, h_rows: torch.Tensor) -> torch.Tensor:
        """``[rows, vocabulary_size]``."""
        return RouterModel.logits(self, h_rows)


def load_shard(
    path: Path,
    rank: int,
    size: int,
    *,
    weights: Weights = "auto",
    exact: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Parts:
    """Read the part of rank ``rank`` in a group of ``size``, for which ``shard_fault`` must be
    empty; otherwise as ``load_router_model``.
    """
    spec = load_spec(path)
    shard = Shard(spec, rank, size)
    return load_parts(path, spec, shard, weights=weights, exact=exact, progress=progress)


def own_embeddings(table: torch.Tensor, ours: Cut, token_ids: torch.Tensor) -> torch.Tensor:
    """``token_ids [n]`` -> ``[n, hidden]`` fp32 from ``table [tokens of ours, hidden]``; zeros for
    tokens of other ranks.
    """
    others = (token_ids < ours.start) | (token_ids >= ours.stop)
    local = token_ids.clamp(ours.start, ours.stop - 1) - ours.start
    return embedding(local, table).float().masked_fill_(others.unsqueeze(1), 0.0)
