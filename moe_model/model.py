"""A router's share of a model: everything but the routed experts.

``RouterModel`` offers a layer's steps one by one; ``moe_model.forward`` strings them together.
All calls run under ``torch.inference_mode`` on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from ep_kernels.ahead import StepLayer
from ep_kernels.few import FEW_TOKENS, FewGate
from ep_kernels.latent import DecodeCall
from ep_kernels.packed import PackedLinear, pack_linear
from ep_kernels.rows import RmsNorm
from torch.nn.functional import embedding

from moe_model.architecture import GqaSpec, MlaSpec, ModelSpec
from moe_model.attention.gqa import GroupedQueryAttention, gqa_turns
from moe_model.attention.mla import LatentAttention, expand_rule, mla_turns
from moe_model.checkpoint import Checkpoint
from moe_model.forward import Computed, MakeClient
from moe_model.fp8 import refuse_on_cpu
from moe_model.gate import Gate
from moe_model.kv_cache import KVCache
from moe_model.kv_size import row_stride
from moe_model.layers import SwiGlu
from moe_model.plan import CacheShape, Chunk, StepPlan, Turns, plan_step, tabled
from moe_model.rope import Rope
from moe_model.sampler import Sampler, TokenSampler
from moe_model.shard import Shard
from moe_model.spec import load_spec
from moe_model.tensors import TensorTable

Weights = Literal["auto", "fp32", "fp16"]
Attention = LatentAttention | GroupedQueryAttention


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer without its routed experts. ``dense`` or ``gate`` is set, not both; of a
    group's ranks only the first has gates.
    """

    attention_norm: RmsNorm
    attention: Attention
    decode: DecodeCall | None
    """Norm and attention for single tokens of sequences, if there is such a way."""
    ffn_norm: RmsNorm
    dense: SwiGlu | None
    gate: Gate | None
    few_gate: FewGate | None
    """Norm and gate for a few tokens, if there is such a way."""
    shared: SwiGlu | None


@dataclass(frozen=True, slots=True)
class Parts:
    """What one process holds of a model: all but the routed experts, or a ``Shard`` of that."""

    spec: ModelSpec
    shard: Shard
    layers: tuple[Layer, ...]
    table: torch.Tensor
    """Embeddings ``[tokens of the vocabulary, hidden]``."""
    final_norm: RmsNorm
    head: PackedLinear
    turns: Turns
    exact: bool


class RouterModel:
    """Attention, gates, shared experts, dense layers, embedding and head of one model.

    ``h`` is the residual stream, ``[tokens, hidden]`` fp32. Methods that return a new ``h``
    never change the one they were given. Made by ``load_router_model``.
    """

    def __init__(self, parts: Parts) -> None:
        spec, exact = parts.spec, parts.exact
        self.spec = spec
        self.exact = exact
        self._layers = parts.layers
        self._table = parts.table
        self._final_norm = parts.final_norm
        self._head = parts.head
        self._turns = parts.turns
        attention = parts.shard.attention
        self._cache_width = attention.cache_width
        self._stride = row_stride(attention.cache_width)
        self._window = attention.sliding_window if isinstance(attention, GqaSpec) else None
        self._expand = (
            expand_rule(attention, spec.hidden_size, exact=exact)
            if isinstance(attention, MlaSpec)
            else None
        )

    @property
    def waited_ns(self) -> int:
        """Time spent waiting for other processes that compute with this one, since start."""
        return 0

    def clients(self, make: MakeClient, computed: Computed) -> MakeClient:
        """What makes the clients that this model's rows can be given to: ``make``, whose clients
        take and give rows on the CPU. ``computed(layer, began_ns, ended_ns)`` is told of time that
        passed between a layer's calls here and its rows; here none does.
        """
        del computed
        return make

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes that one KV block of ``block_size`` tokens takes over all layers."""
        return 4 * self.spec.num_layers * block_size * self._stride

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """An empty cache of ``num_blocks * kv_bytes_per_block(block_size)`` bytes."""
        return KVCache(self.spec.num_layers, num_blocks, block_size, self._cache_width)

    def plan(self, chunks: Sequence[Chunk], block_size: int = 16) -> StepPlan:
        """Everything about a step that its layers share, for a cache of ``block_size``.

        Raises ``ValueError`` for chunks that do not fit the context or their block table.
        """
        shape = CacheShape(block_size, self._window, self.exact, self._expand)
        return plan_step(chunks, shape, self.spec.max_context, self._turns)

    def embed(self, plan: StepPlan) -> torch.Tensor:
        """Token embeddings, the first ``h``."""
        return embedding(plan.token_ids, self._table).float()

    def attend(self, layer: int, h: torch.Tensor, plan: StepPlan, kv: KVCache) -> torch.Tensor:
        """``h`` plus attention. Writes the step's rows of ``layer`` to ``kv``.

        Raises ``ValueError`` when ``plan`` was made for another block size.
        """
        if plan.block_size != kv.block_size:
            raise ValueError(
                f"the step was planned for blocks of {plan.block_size} tokens, "
                f"the cache has blocks of {kv.block_size}"
            )
        parts = self._layers[layer]
        out = self._decode(parts.decode, layer, h, plan, kv, add=True)
        if out is not None:
            return out
        return parts.attention(parts.attention_norm(h), plan, kv, layer).add_(h)

    def _decode(
        self,
        decode: DecodeCall | None,
        layer: int,
        h: torch.Tensor,
        plan: StepPlan,
        kv: KVCache,
        *,
        add: bool,
    ) -> torch.Tensor | None:
        """None where the step, or the layer, is of another kind."""
        group = plan.decodes
        if decode is None or group is None or h.shape[0] > decode.most_rows:
            return None
        return decode(
            h,
            plan.query_turn,
            plan.key_turn,
            kv.layers[layer],
            plan.cache_rows,
            kv.block_size,
            group.visible,
            add=add,
        )

    def step_layers(self) -> tuple[StepLayer, ...] | None:
        """The layers as C goes through them, all at once, for single tokens of sequences (a few of
        them, where matrices are small); None where it cannot: large weights in other than 16 bits,
        biases, grouped-query attention.
        """
        found = []
        for number, parts in enumerate(self._layers):
            attention = parts.decode
            ffn = parts.shared if parts.dense is None else parts.dense
            if attention is None:
                return None
            is_small = attention.most_rows <= FEW_TOKENS
            run = None if ffn is None else (ffn.few if is_small else None) or ffn.half
            if ffn is not None and run is None:
                return None
            if parts.dense is None and parts.few_gate is None:
                return None
            norm = None if parts.dense is None else parts.ffn_norm
            found.append(StepLayer(number, attention, parts.few_gate, norm, run))
        return tuple(found)

    def dense(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        """``h`` plus the FFN of a layer that is no MoE layer."""
        parts = self._layers[layer]
        assert parts.dense is not None
        return parts.dense(parts.ffn_norm(h)).add_(h)

    def gate(self, layer: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of a MoE layer: normed ``h``, which gate, shared and routed experts read; logical experts
        ``[tokens, k]`` int32, in the gate's order; and their weights ``[tokens, k]`` fp32.
        """
        parts = self._layers[layer]
        if parts.few_gate is not None and h.shape[0] <= FEW_TOKENS:
            return parts.few_gate(h)
        assert parts.gate is not None
        x = parts.ffn_norm(h)
        return x, *parts.gate(x)

    def shared(self, layer: int, x: torch.Tensor) -> torch.Tensor | None:
        """The shared expert's output for ``gate``'s ``x``; None when there is none."""
        shared = self._layers[layer].shared
        return None if shared is None else shared(x)

    def logits(self, h_rows: torch.Tensor) -> torch.Tensor:
        """Final hidden states ``[rows, hidden]`` -> ``[rows, vocab]`` fp32."""
        return self._head(self._final_norm(h_rows))

    def sampler(self) -> TokenSampler:
        """A new one, which draws from what ``logits`` returns, where that lies."""
        return Sampler(self.spec.vocab_size)


def load_router_model(
    path: Path,
    *,
    weights: Weights = "auto",
    exact: bool = False,
    progress: Callable[[float], None] | None = None,
) -> RouterModel:
    """Read everything but the routed experts from the checkpoint at ``path``.

    ``weights`` says how matrices are kept (see ``ep_kernels.packed``). With ``exact`` no row's
    arithmetic depends on the batch, on chunking or on padding; that is slower. ``progress`` is
    called with the share done, 0 to 1. Raises ``CheckpointError`` before any tensor is converted
    if one that this process needs is missing or wrong.
    """
    spec = load_spec(path)
    return RouterModel(
        load_parts(path, spec, Shard(spec), weights=weights, exact=exact, progress=progress)
    )


def load_parts(
    path: Path,
    spec: ModelSpec,
    shard: Shard,
    *,
    weights: Weights,
    exact: bool,
    progress: Callable[[float], None] | None,
) -> Parts:
    """Read what ``shard`` holds; see ``load_router_model``."""
    refuse_on_cpu(spec, path, "router.device")
    table = TensorTable(spec)
    report = progress or (lambda _share: None)
    with Checkpoint(path) as checkpoint, torch.inference_mode():
        checkpoint.check(table.router())
        reader = Reader(checkpoint, table, shard)
        rope = Rope(spec.rope, spec.max_context)
        embeddings = reader.owned("embedding")
        final_norm = RmsNorm(reader.owned("final_norm"), spec.norm_eps)
        head = embeddings if spec.tie_word_embeddings else reader.tensor("head")
        packed_head = pack_linear(head, weights, exact=exact)
        layers = []
        for layer in range(spec.num_layers):
            report(layer / spec.num_layers)
            layers.append(_load_layer(spec, reader, layer, weights, exact))
    report(1.0)
    return Parts(
        spec=spec,
        shard=shard,
        layers=tuple(layers),
        table=embeddings,
        final_norm=final_norm,
        head=packed_head,
        turns=_turns(spec, shard, rope),
        exact=exact,
    )


class Reader:
    """Tensors by role, as far as the shard holds them."""

    def __init__(self, checkpoint: Checkpoint, table: TensorTable, shard: Shard) -> None:
        self.table = table
        self.shard = shard
        self._checkpoint = checkpoint

    def tensor(self, role: str, layer: int = -1) -> torch.Tensor:
        """Backed by the file: for matrices, which packing copies."""
        return self._checkpoint.read(self.table.ref(role, layer), self.shard.cut(role))

    def owned(self, role: str, layer: int = -1) -> torch.Tensor:
        """A copy, for tensors that are kept as they are."""
        return self.tensor(role, layer).clone(memory_format=torch.contiguous_format)

    def role_map(self, roles: Sequence[str], layer: int) -> dict[str, torch.Tensor]:
        return {role: self.owned(role, layer) for role in roles if self.shard.holds(role)}


def _load_layer(spec: ModelSpec, reader: Reader, layer: int, kind: Weights, exact: bool) -> Layer:
    roles = [role for role in reader.table.layer_roles(layer) if reader.shard.holds(role)]

    def ffn(prefix: str) -> SwiGlu | None:
        if f"{prefix}_gate" not in roles:
            return None
        gate, up, down = (reader.tensor(f"{prefix}_{part}", layer) for part in FFN_PARTS)
        return SwiGlu(gate, up, down, kind=kind, exact=exact)

    gate = None
    if "router" in roles:
        bias = reader.owned("router_bias", layer) if "router_bias" in roles else None
        router = reader.tensor("router", layer)
        gate = Gate(spec.gate, spec.experts_per_token, router, bias, exact=exact)
    norm = reader.owned("attention_norm", layer)
    attention_norm = RmsNorm(norm, spec.norm_eps)
    attention = _load_attention(spec, reader, layer, kind, exact)
    latent = attention if isinstance(attention, LatentAttention) else None
    ffn_norm = reader.owned("ffn_norm", layer)
    return Layer(
        attention_norm=attention_norm,
        attention=attention,
        decode=None if latent is None else latent.decode(attention_norm, norm),
        ffn_norm=RmsNorm(ffn_norm, spec.norm_eps),
        dense=ffn("dense"),
        gate=gate,
        few_gate=None if gate is None else gate.few(ffn_norm, spec.norm_eps),
        shared=ffn("shared"),
    )


FFN_PARTS = ("gate", "up", "down")


def _load_attention(
    spec: ModelSpec, reader: Reader, layer: int, kind: Weights, exact: bool
) -> Attention:
    weights = reader.role_map(reader.table.attention_roles, layer)
    attention = reader.shard.attention
    if isinstance(attention, MlaSpec):
        return LatentAttention(
            attention, spec.rope, spec.hidden_size, weights, kind=kind, exact=exact
        )
    return GroupedQueryAttention(attention, spec.rope, weights, kind=kind, exact=exact)


def _turns(spec: ModelSpec, shard: Shard, rope: Rope) -> Turns:
    attention = shard.attention
    if isinstance(attention, MlaSpec):
        return tabled(mla_turns(attention, rope, spec.hidden_size), spec.max_context)
    return tabled(gqa_turns(attention, rope), spec.max_context)
