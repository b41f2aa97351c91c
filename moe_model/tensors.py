"""Which tensors a model consists of: role -> name on disk and shape. Torch-free.

Roles name what a tensor does (``q_a``, ``router_bias``, ``expert_down``); a family maps them to
names, the spec gives the shapes. A router needs every role but the ``expert_`` ones, an expert
worker only those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_model.architecture import MlaSpec, ModelSpec
from moe_model.families import family_named
from moe_model.fp8 import BLOCK, SCALES_SUFFIX

_EXPERT_ROLES = ("expert_gate", "expert_up", "expert_down")


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that must exist under ``name`` with ``shape`` (``[out, in]`` for matrices)."""

    name: str
    shape: tuple[int, ...]
    scales: TensorRef | None = None
    """If it may be FP8: what must exist beside it then."""


class TensorTable:
    """All tensors of one model, by role, layer and expert."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._names = family_named(spec.family).names
        self._shapes = _shapes(spec)
        self._moe_layers = frozenset(spec.moe_layers)
        self.attention_roles = _attention_roles(spec)

    def ref(self, role: str, layer: int = -1, expert: int = -1) -> TensorRef:
        """The tensor that plays ``role`` in ``layer`` (and ``expert``, for expert roles)."""
        name = self._names[role].format(layer=layer, expert=expert)
        shape = self._shapes[role]
        scales = None
        if self.spec.fp8 and len(shape) == 2:
            blocks = tuple(-(-size // BLOCK) for size in shape)
            scales = TensorRef(name=name + SCALES_SUFFIX, shape=blocks)
        return TensorRef(name=name, shape=shape, scales=scales)

    def expert(self, layer: int, expert: int) -> tuple[TensorRef, TensorRef, TensorRef]:
        """Gate, up and down of one routed expert."""
        gate, up, down = (self.ref(role, layer, expert) for role in _EXPERT_ROLES)
        return gate, up, down

    def experts(self) -> Iterator[TensorRef]:
        """Every routed expert's tensors."""
        for layer in self.spec.moe_layers:
            for expert in range(self.spec.num_experts):
                yield from self.expert(layer, expert)

    def router(self) -> Iterator[TensorRef]:
        """Everything a router reads: all but the routed experts."""
        yield self.ref("embedding")
        yield self.ref("final_norm")
        if not self.spec.tie_word_embeddings:
            yield self.ref("head")
        for layer in range(self.spec.num_layers):
            for role in self.layer_roles(layer):
                yield self.ref(role, layer)

    def layer_roles(self, layer: int) -> tuple[str, ...]:
        """Roles of one layer that a router reads."""
        roles = ["attention_norm", "ffn_norm", *self.attention_roles]
        if layer not in self._moe_layers:
            roles += ["dense_gate", "dense_up", "dense_down"]
            return tuple(roles)
        roles.append("router")
        if self.spec.gate.selection_bias:
            roles.append("router_bias")
        if self.spec.shared_intermediate:
            roles += ["shared_gate", "shared_up", "shared_down"]
        return tuple(roles)


def _attention_roles(spec: ModelSpec) -> tuple[str, ...]:
    attention = spec.attention
    if not isinstance(attention, MlaSpec):
        return ("q", "k", "v", "o")
    queries = ("q",) if attention.q_lora_rank is None else ("q_a", "q_a_norm", "q_b")
    roles = (*queries, "kv_a", "kv_a_norm", "kv_b", "o")
    if not attention.bias:
        return roles
    query_bias = () if attention.q_lora_rank is None else ("q_a_bias",)
    return (*roles, *query_bias, "kv_a_bias", "o_bias")


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (spec.vocab_size, hidden),
        "head": (spec.vocab_size, hidden),
        "final_norm": (hidden,),
        "attention_norm": (hidden,),
        "ffn_norm": (hidden,),
        "router": (spec.num_experts, hidden),
        "router_bias": (spec.num_experts,),
    }
    for kind, width in (
        ("dense", spec.dense_intermediate),
        ("shared", spec.shared_intermediate),
        ("expert", spec.expert_intermediate),
    ):
        shapes[f"{kind}_gate"] = (width, hidden)
        shapes[f"{kind}_up"] = (width, hidden)
        shapes[f"{kind}_down"] = (hidden, width)
    attention = spec.attention
    if isinstance(attention, MlaSpec):
        latent = attention.cache_width
        queries = attention.num_heads * attention.qk_head_dim
        expanded = attention.num_heads * (attention.qk_nope_head_dim + attention.v_head_dim)
        rank = attention.q_lora_rank or 0
        shapes |= {
            "q": (queries, hidden),
            "q_a": (rank, hidden),
            "q_a_bias": (rank,),
            "q_a_norm": (rank,),
            "q_b": (queries, rank),
            "kv_a": (latent, hidden),
            "kv_a_bias": (latent,),
            "kv_a_norm": (attention.kv_lora_rank,),
            "kv_b": (expanded, attention.kv_lora_rank),
            "o": (hidden, attention.num_heads * attention.v_head_dim),
            "o_bias": (hidden,),
        }
    else:
        keys = attention.num_kv_heads * attention.head_dim
        queries = attention.num_heads * attention.head_dim
        shapes |= {
            "q": (queries, hidden),
            "k": (keys, hidden),
            "v": (keys, hidden),
            "o": (hidden, queries),
        }
    return shapes
