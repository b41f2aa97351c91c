"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434; DeepSeek-V3, arXiv 2412.19437).

The cache holds a latent and one rotary key a token, and attention runs on them as they are (see
``absorb``). Only many queries over few keys expand them to keys and values by head, because there
that is less work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from ep_kernels.few import FewLatent
from ep_kernels.latent import DecodeCall, LatentDecode
from ep_kernels.packed import Kind, PackedLinear, Storage, pack_linear
from ep_kernels.rows import LatentRows, RmsNorm

from moe_model.architecture import MlaSpec, RopeSpec
from moe_model.attention.absorb import (
    Absorption,
    Folded,
    Half,
    LatentMatrices,
    PerHead,
    by_heads,
    fold_output,
    fold_query,
    folds,
    read_matrices,
)
from moe_model.attention.core import (
    RowLayout,
    attend_group,
    attend_rows_alone,
    attend_span,
    over_parts,
    span_rows,
)
from moe_model.kv_cache import KVCache
from moe_model.plan import ExpandRule, Group, Part, Span, StepPlan, Turns
from moe_model.rope import Rope

_EXPANDED_BYTES = 128 * 1024 * 1024
"""Most memory that one span's expanded keys and values may take for a moment."""


def mla_turns(spec: MlaSpec, rope: Rope, hidden: int) -> Turns:
    """Multipliers of queries ``[n, 1, query head / 2]`` and rotary keys ``[n, rotary / 2]``.

    A query's front part is only scaled, its rotary end scaled and turned: one product for both.
    """
    front = spec.kv_lora_rank if folds(spec, hidden) else spec.qk_nope_head_dim
    scale = torch.full((1, front // 2), spec.softmax_scale, dtype=torch.complex64)

    def turns(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turn = rope.at(positions)
        scaled = torch.cat((scale.expand(turn.shape[0], -1), turn * spec.softmax_scale), 1)
        return scaled.unsqueeze(1), turn

    return turns


def expand_rule(spec: MlaSpec, hidden: int, *, exact: bool) -> ExpandRule | None:
    """When to expand a span's latents rather than to attend on them.

    Compares multiplications a key and head: expanding it once, against wider scores and values for
    every query. None where only latents are used.
    """
    if exact or folds(spec, hidden):
        return None
    once = spec.kv_lora_rank * (spec.qk_nope_head_dim + spec.v_head_dim)
    wider = spec.cache_width + spec.kv_lora_rank - spec.qk_head_dim - spec.v_head_dim
    if wider <= 0:
        return None
    # ``kv_b``'s output and the keys, which repeat half of it
    key_bytes = 4 * spec.num_heads * (2 * spec.qk_head_dim + spec.v_head_dim)
    return ExpandRule(min_queries=once // wider + 1, max_keys=_EXPANDED_BYTES // key_bytes)


class LatentAttention:
    """One layer. ``weights`` maps the roles of ``moe_model.tensors`` to tensors."""

    def __init__(
        self,
        spec: MlaSpec,
        rope: RopeSpec,
        hidden: int,
        weights: dict[str, torch.Tensor],
        *,
        kind: Kind,
        exact: bool,
    ) -> None:
        self.spec = spec
        self._exact = exact
        self._heads = spec.num_heads
        self._layout = RowLayout(
            heads=1, key_dim=spec.cache_width, value_dim=spec.kv_lora_rank, value_offset=0
        )
        matrices = read_matrices(spec, rope, weights)
        folded = folds(spec, hidden)
        q, out = matrices.q.flatten(0, 1), weights["o"]
        self._kv_up: PackedLinear | None = None
        self._absorption: Absorption
        if folded:
            q, out = fold_query(matrices), fold_output(matrices)
            self._absorption = Folded()
        elif exact:
            self._absorption = PerHead(matrices, kind)
        else:
            self._absorption = by_heads(matrices, kind)
            self._kv_up = pack_linear(weights["kv_b"], kind)
        self._out_width = out.shape[1]
        self._o = _linear(out, weights.get("o_bias"), kind, exact)
        if spec.q_lora_rank is None:
            self._q_b: PackedLinear | None = None
            first = q
        else:
            self._q_b = pack_linear(q, kind, exact=exact)
            first = weights["q_a"]
        self._a = _first_linear(first, weights.get("q_a_bias"), matrices, kind, exact)
        self._source_norm, self._latent_norm = weights.get("q_a_norm"), weights["kv_a_norm"]
        self._rows = LatentRows(
            self._source_norm,
            self._latent_norm,
            spec.latent_norm_eps,
            query=first.shape[0],
            heads=self._heads,
            rotary=spec.qk_rope_head_dim,
        )

    def decode(self, norm: RmsNorm, weight: torch.Tensor) -> DecodeCall | None:
        """The same for single tokens of sequences, with the ``norm`` before it, which has ``weight
        [hidden]``; shares the matrices. None where these are large and not in 16 bits, or have
        biases.
        """
        return self._few(weight, norm.epsilon) or self._half(norm)

    def _few(self, norm: torch.Tensor, epsilon: float) -> FewLatent | None:
        """For matrices so small that calls cost the time."""
        linears = (self._a, self._o, *(() if self._q_b is None else (self._q_b,)))
        if self._exact or not isinstance(self._absorption, Folded):
            return None
        if not all(isinstance(i, PackedLinear) and i.storage is Storage.PLAIN for i in linears):
            return None
        first, out, *query = (i.matrix().values for i in linears if isinstance(i, PackedLinear))
        return FewLatent(
            norm=norm,
            first=first,
            source_norm=self._source_norm,
            query=query[0] if query else None,
            latent_norm=self._latent_norm,
            out=out,
            epsilon=epsilon,
            latent_epsilon=self.spec.latent_norm_eps,
            heads=self._heads,
        )

    def _half(self, norm: RmsNorm) -> LatentDecode | None:
        """For matrices in 16 bits."""
        linears = (self._a, self._o, *(() if self._q_b is None else (self._q_b,)))
        halves = [i.half for i in linears if isinstance(i, PackedLinear) and i.half is not None]
        absorption = self._absorption
        if len(halves) < len(linears) or not isinstance(absorption, Half):
            return None
        first, out, *query = halves
        return LatentDecode(
            norm=norm,
            first=first,
            rows=self._rows,
            query=query[0] if query else None,
            key_up=absorption.key_up,
            value_up=absorption.value_up,
            out=out,
        )

    def __call__(self, x: torch.Tensor, plan: StepPlan, cache: KVCache, layer: int) -> torch.Tensor:
        """``x [n, hidden]`` (normed) -> ``[n, hidden]``; writes the step's rows to the cache."""
        query_turn = plan.query_turn
        q = self._rows(self._a(x), query_turn, plan.key_turn, cache.layers[layer], plan.cache_rows)
        if self._q_b is not None:
            q = self._q_b(q)
            self._rows.turn(q, query_turn)
        q = q.view(plan.num_tokens, self._heads, -1)  # [n, heads, query head]

        if plan.kept_rows is None:
            return self._o(self._attend(q, plan.parts, cache, layer))
        out = q.new_empty(plan.num_tokens, self._out_width)
        kept = []
        for part in plan.parts:
            if isinstance(part, Span) and part.expands:
                rows = slice(part.first, part.first + part.count)
                keys, values = self._expanded(span_rows(cache, layer, part))
                out[rows] = attend_span(q[rows].unsqueeze(2), keys, values, part.mask).flatten(1)
            else:
                kept.append(part)
        if kept:
            out[plan.kept_rows] = self._attend(q, tuple(kept), cache, layer, plan.kept_rows)
        return self._o(out)

    def _attend(
        self,
        q: torch.Tensor,
        parts: tuple[Part, ...],
        cache: KVCache,
        layer: int,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention on latents: ``q [n, heads, query head]``, of which ``parts`` cover the rows
        ``kept`` (None: all) -> ``[kept rows, what the output projection reads]``.

        Both ends of the absorption take all rows at once: they read large matrices.
        """
        layout = self._layout

        def run(absorbed: torch.Tensor, part: Part) -> torch.Tensor:
            if isinstance(part, Group):
                return attend_group(absorbed.unsqueeze(1), cache, layer, part, layout).squeeze(1)
            rows = span_rows(cache, layer, part)
            if self._exact:
                return attend_rows_alone(absorbed.unsqueeze(1), rows, part, None, layout).squeeze(1)
            split = layout.split(rows)
            return attend_span(absorbed.unsqueeze(1), *split, part.mask).squeeze(1)

        latent_shape = (self._heads, self.spec.kv_lora_rank)
        if kept is None:
            absorbed = self._absorption.absorb(q)
            return self._absorption.expand(over_parts(absorbed, parts, latent_shape, run))
        absorbed = q.new_empty(q.shape[0], self._heads, self.spec.cache_width)
        absorbed[kept] = self._absorption.absorb(q[kept])
        latents = over_parts(absorbed, parts, latent_shape, run)
        return self._absorption.expand(latents[kept])

    def _expanded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache rows ``[T, width]`` -> keys ``[heads, T, nope + rotary]`` and values."""
        spec, nope = self.spec, self.spec.qk_nope_head_dim
        assert self._kv_up is not None  # no span expands without it
        up = self._kv_up(rows[:, : spec.kv_lora_rank].contiguous())
        up = up.view(rows.shape[0], self._heads, -1).transpose(0, 1)  # [heads, T, nope + value]
        keys = up.new_empty(self._heads, rows.shape[0], spec.qk_head_dim)
        keys[..., :nope] = up[..., :nope]
        keys[..., nope:] = rows[:, spec.kv_lora_rank :]
        return keys, up[..., nope:]


_Linear = Callable[[torch.Tensor], torch.Tensor]


def _first_linear(
    first: torch.Tensor,
    first_bias: torch.Tensor | None,
    matrices: LatentMatrices,
    kind: Kind,
    exact: bool,
) -> _Linear:
    """One matrix for all that comes straight from the hidden state: queries (or their latent),
    latent, rotary key.
    """
    weight = torch.cat([first.float(), matrices.kv_a.float()])
    bias = matrices.kv_a_bias
    if bias is not None:
        front = bias.new_zeros(first.shape[0]) if first_bias is None else first_bias
        bias = torch.cat([front, bias])
    return _linear(weight, bias, kind, exact)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None, kind: Kind, exact: bool) -> _Linear:
    packed = pack_linear(weight, kind, exact=exact)
    return packed if bias is None else _Biased(packed, bias)


class _Biased:
    """A packed linear with a bias."""

    __slots__ = ("_bias", "_linear")

    def __init__(self, linear: PackedLinear, bias: torch.Tensor) -> None:
        self._linear = linear
        self._bias = bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x).add_(self._bias)
