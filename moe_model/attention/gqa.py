"""Grouped-query attention (arXiv 2305.13245), with an optional sliding window."""

from __future__ import annotations

import torch
from ep_kernels.packed import Kind, pack_linear

from moe_model.architecture import GqaSpec, RopeSpec
from moe_model.attention.core import (
    RowLayout,
    attend_group,
    attend_rows_alone,
    attend_span,
    over_parts,
    span_rows,
)
from moe_model.kv_cache import KVCache
from moe_model.plan import Group, Part, StepPlan, Turns
from moe_model.rope import Rope, pair_order


def gqa_turns(spec: GqaSpec, rope: Rope) -> Turns:
    """Rotations ``[n, 1, head_dim / 2]`` of queries (times the softmax scale) and of keys."""

    def turns(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turn = rope.at(positions).unsqueeze(1)
        return turn * spec.softmax_scale, turn

    return turns


def paired_projections(
    spec: GqaSpec, rope: RopeSpec, weights: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Projections of queries and keys, rows in the order that ``moe_model.rope`` turns."""
    q, k = weights["q"], weights["k"]
    if not rope.interleaved:
        order = pair_order(spec.head_dim)
        q = q.view(spec.num_heads, spec.head_dim, -1)[:, order].flatten(0, 1)
        k = k.view(spec.num_kv_heads, spec.head_dim, -1)[:, order].flatten(0, 1)
    return q, k


class GroupedQueryAttention:
    """One layer. ``weights`` maps the roles q, k, v, o to ``[out, in]`` matrices."""

    def __init__(
        self,
        spec: GqaSpec,
        rope: RopeSpec,
        weights: dict[str, torch.Tensor],
        *,
        kind: Kind,
        exact: bool,
    ) -> None:
        self.spec = spec
        self._exact = exact
        self._shared = spec.num_heads // spec.num_kv_heads
        dim = spec.head_dim
        self._layout = RowLayout(
            heads=spec.num_kv_heads,
            key_dim=dim,
            value_dim=dim,
            value_offset=spec.num_kv_heads * dim,
        )
        q, k = paired_projections(spec, rope, weights)
        self._qkv = pack_linear(torch.cat([q, k, weights["v"]]), kind, exact=exact)
        self._o = pack_linear(weights["o"], kind, exact=exact)

    def __call__(self, x: torch.Tensor, plan: StepPlan, cache: KVCache, layer: int) -> torch.Tensor:
        """``x [n, hidden]`` (normed) -> ``[n, hidden]``; writes the step's rows to the cache."""
        spec, n = self.spec, plan.num_tokens
        queries = spec.num_heads * spec.head_dim
        turned = queries + spec.num_kv_heads * spec.head_dim
        qkv = self._qkv(x)
        q = qkv[:, :queries].view(n, spec.num_heads, spec.head_dim)
        k = qkv[:, queries:turned].view(n, spec.num_kv_heads, spec.head_dim)
        q.view(torch.complex64).mul_(plan.query_turn)
        k.view(torch.complex64).mul_(plan.key_turn)
        cache.layers[layer].index_copy_(0, plan.cache_rows, qkv[:, queries:])

        def run(part_q: torch.Tensor, part: Part) -> torch.Tensor:
            grouped = part_q.view(-1, spec.num_kv_heads, self._shared, spec.head_dim)
            if isinstance(part, Group):
                out = attend_group(grouped, cache, layer, part, self._layout)
                return out.view(-1, queries)
            rows = span_rows(cache, layer, part)
            if self._exact:
                out = attend_rows_alone(grouped, rows, part, spec.sliding_window, self._layout)
            else:
                keys, values = self._layout.split(rows)
                out = attend_span(grouped, keys, values, part.mask)
            return out.view(part.count, queries)

        return self._o(over_parts(q, plan.parts, (queries,), run))
