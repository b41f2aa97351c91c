"""A small DeepSeek-V3 in plain PyTorch, quick enough to train on one CPU core.

The arithmetic and the tensor names are those of the Hugging Face checkpoint format, with one
difference: the experts of a layer are stacked into two tensors (gate+up, and down), so that the
optimizer can treat them as one batch of matrices. ``export.py`` splits them again.

Shapes in the docstrings: B sequences, T new positions, S positions with the cached ones,
N = B * T tokens, D hidden width, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .experts import routed_experts
from .gate import Gate
from .head import head_loss


@dataclass(frozen=True)
class ModelConfig:
    """The architecture, under the names of the Hugging Face ``config.json``."""

    vocab_size: int = 3072
    hidden_size: int = 192
    intermediate_size: int = 512
    moe_intermediate_size: int = 48
    num_hidden_layers: int = 5
    first_k_dense_replace: int = 1
    num_attention_heads: int = 4
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    n_routed_experts: int = 32
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 1024


@dataclass
class LatentCache:
    """What one layer keeps of earlier positions while it decodes."""

    latent: Tensor | None = None  # normalised kv latent, float [B, S, kv_lora_rank]
    rope_key: Tensor | None = None  # rotated key shared by the heads, float [B, S, 1, rope dim]


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of interleaved pairs: x [B, T, H, R], cos and sin [T, 1, R / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


class Attention(nn.Module):
    """Multi-head latent attention."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads, self.nope, self.rope = (
            c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim,
        )  # fmt: skip
        self.value, self.latent = c.v_head_dim, c.kv_lora_rank
        self.q_a_proj = _linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, 1e-6)
        self.q_b_proj = _linear(c.q_lora_rank, self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = _linear(c.hidden_size, self.latent + self.rope)
        self.kv_a_layernorm = RMSNorm(self.latent, 1e-6)
        self.kv_b_proj = _linear(self.latent, self.heads * (self.nope + self.value))
        self.o_proj = _linear(self.heads * self.value, c.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LatentCache | None) -> Tensor:
        """Attend causally: x [B, T, D] to [B, T, D].

        With a filled cache T must be 1: a lone new position may see everything before it.
        """
        batch, new, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(batch, new, self.heads, self.nope + self.rope)
        q_rope = rotate(q[..., self.nope :], cos, sin)
        q = torch.cat([q[..., : self.nope], q_rope], -1).transpose(1, 2)

        latent, rope_key = self.kv_a_proj_with_mqa(x).split([self.latent, self.rope], -1)
        latent = self.kv_a_layernorm(latent)
        rope_key = rotate(rope_key.unsqueeze(2), cos, sin)
        if cache is not None:
            if cache.latent is not None and cache.rope_key is not None:
                latent = torch.cat([cache.latent, latent], 1)
                rope_key = torch.cat([cache.rope_key, rope_key], 1)
            cache.latent, cache.rope_key = latent, rope_key

        seen = latent.shape[1]
        kv = self.kv_b_proj(latent).view(batch, seen, self.heads, self.nope + self.value)
        shared = rope_key.expand(batch, seen, self.heads, self.rope)
        k = torch.cat([kv[..., : self.nope], shared], -1).transpose(1, 2)
        # The CPU's fast attention wants values as wide as the keys; the padding is cut off again.
        v = functional.pad(kv[..., self.nope :], (0, self.nope + self.rope - self.value)).transpose(
            1, 2
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=new == seen)[
            ..., : self.value
        ]
        y: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, new, self.heads * self.value))
        return y


class MLP(nn.Module):
    """A dense SwiGLU block; also the shared expert."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = _linear(width, inner)
        self.up_proj = _linear(width, inner)
        self.down_proj = _linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class MoE(nn.Module):
    """Routed experts plus the shared one; remembers the load of its last forward pass."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        experts, inner = c.n_routed_experts, c.moe_intermediate_size
        self.gate = Gate(
            c.hidden_size, experts, c.n_group, c.topk_group,
            c.num_experts_per_tok, c.routed_scaling_factor,
        )  # fmt: skip
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, c.hidden_size))
        self.down = nn.Parameter(torch.empty(experts, c.hidden_size, inner))
        self.shared_experts = MLP(c.hidden_size, inner * c.n_shared_experts)
        self.load = torch.zeros(experts, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights = self.gate(tokens)
        y, self.load = routed_experts(tokens, chosen, weights, self.gate_up, self.down)
        shared: Tensor = self.shared_experts(x)
        return y.view_as(x) + shared


class Block(nn.Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        dense = layer < c.first_k_dense_replace
        self.mlp = MLP(c.hidden_size, c.intermediate_size) if dense else MoE(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LatentCache | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Model(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = _linear(config.hidden_size, config.vocab_size)

        pairs = torch.arange(0, config.qk_rope_head_dim, 2).float() / config.qk_rope_head_dim
        positions = torch.arange(config.max_position_embeddings).float()
        angles = torch.outer(positions, 1.0 / config.rope_theta**pairs)[:, None, :]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        """Draw the matrices; those that write to the residual stream start five times smaller."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue
            if name == "embed_tokens.weight":
                std = 0.3
            elif name == "lm_head.weight":
                std = 0.002
            elif name.endswith("gate.weight"):
                std = 0.02
            else:
                std = 0.5 / math.sqrt(p.shape[-1])
            if name.endswith(("o_proj.weight", "down_proj.weight", ".down")):
                std *= 0.2
            p.data.normal_(0, std, generator=generator)

    @property
    def moe_layers(self) -> list[MoE]:
        """The layers with routed experts, first to last."""
        blocks = [layer for layer in self.layers if isinstance(layer, Block)]
        return [block.mlp for block in blocks if isinstance(block.mlp, MoE)]

    def new_cache(self) -> list[LatentCache]:
        """An empty decoding cache, one entry a layer."""
        return [LatentCache() for _ in self.layers]

    def hidden(self, ids: Tensor, cache: list[LatentCache] | None = None, start: int = 0) -> Tensor:
        """Final hidden states [B, T, D] of token ids int64 [B, T], the first at ``start``."""
        x: Tensor = self.embed_tokens(ids)
        stop = start + ids.shape[1]
        cos, sin = self.cos[start:stop], self.sin[start:stop]
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, None if cache is None else cache[i])
        y: Tensor = self.norm(x)
        return y

    def forward(
        self, ids: Tensor, cache: list[LatentCache] | None = None, start: int = 0
    ) -> Tensor:
        """Logits [B, T, V] of token ids int64 [B, T], the first of them at position ``start``."""
        logits: Tensor = self.lm_head(self.hidden(ids, cache, start))
        return logits

    def loss(self, ids: Tensor, target: Tensor) -> Tensor:
        """Mean loss in nats a token, for ids and their successors, both int64 [B, T]."""
        return head_loss(self.hidden(ids).flatten(0, 1), self.lm_head.weight, target.reshape(-1))
