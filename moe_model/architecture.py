"""What a model is, as values: no code, no weights, no torch.

A family turns ``config.json`` into a ``ModelSpec``; everything else reads only the spec.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mesh.messages import Sampling


class _Spec(msgspec.Struct, frozen=True, kw_only=True):
    pass


class YarnSpec(_Spec, frozen=True, kw_only=True):
    """YaRN's stretch of rotary embeddings (arXiv 2309.00071)."""

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    """Multiplies cos and sin of queries and keys."""
    truncate: bool


class RopeSpec(_Spec, frozen=True, kw_only=True):
    """Rotary position embedding over the ``dim`` rotary values of a head."""

    dim: int
    theta: float
    interleaved: bool
    """True: values (0, 1), (2, 3), ... turn together; False: (0, dim/2), (1, dim/2 + 1), ..."""
    yarn: YarnSpec | None = None


class MlaSpec(_Spec, frozen=True, kw_only=True, tag="mla"):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one latent of
    ``kv_lora_rank`` values and one rotary key of ``qk_rope_head_dim`` values a token.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    latent_norm_eps: float
    bias: bool = False

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """fp32 values that one token of one layer occupies in the KV cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class GqaSpec(_Spec, frozen=True, kw_only=True, tag="gqa"):
    """Grouped-query attention; ``num_heads / num_kv_heads`` query heads share a key head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    sliding_window: int | None = None
    """A token sees itself and the ``sliding_window - 1`` tokens before it; None: all."""

    @property
    def cache_width(self) -> int:
        """fp32 values that one token of one layer occupies in the KV cache."""
        return 2 * self.num_kv_heads * self.head_dim


AttentionSpec = MlaSpec | GqaSpec


class GateSpec(_Spec, frozen=True, kw_only=True):
    """How a token's experts are chosen and weighted."""

    scoring: Literal["sigmoid", "softmax"]
    num_groups: int = 1
    """Experts form this many groups of equal size; the best ``topk_groups`` are eligible."""
    topk_groups: int = 1
    selection_bias: bool = False
    """A learnt bias takes part in the choice, never in the weight."""
    normalise: bool = True
    """Divide the chosen weights by their sum (plus ``norm_epsilon``)."""
    norm_epsilon: float = 0.0
    scaling_factor: float = 1.0


class SamplingDefaults(_Spec, frozen=True, kw_only=True):
    """``generation_config.json``'s sampling; None where the file is silent."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def filled(self) -> Sampling:
        """How a request that says nothing is sampled: neutral where the file is silent, greedy
        where it only says not to sample.
        """
        neutral = Sampling()
        greedy = self.do_sample is False and self.temperature is None
        return Sampling(
            temperature=0.0 if greedy else _given(self.temperature, neutral.temperature),
            top_p=_given(self.top_p, neutral.top_p),
            top_k=max(0, self.top_k or 0),
            min_p=_given(self.min_p, neutral.min_p),
            repetition_penalty=_given(self.repetition_penalty, neutral.repetition_penalty),
        )


def _given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


class ModelSpec(_Spec, frozen=True, kw_only=True):
    """A model without its weights."""

    name: str
    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    """Routed experts in each MoE layer."""
    experts_per_token: int
    expert_intermediate: int
    shared_intermediate: int
    """Width of the shared expert; 0 when there is none."""
    dense_intermediate: int
    """Width of the FFN of layers that are not MoE layers."""
    norm_eps: float
    attention: AttentionSpec
    rope: RopeSpec
    gate: GateSpec
    max_context: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults
    dtype: str
    """Type of the weights on disk: float32, float16 or bfloat16; with ``fp8`` of those that are
    not."""
    fp8: bool = False
    """Matrices may be e4m3 with a scale for each block of 128 x 128 (see ``moe_model.fp8``)."""
    tie_word_embeddings: bool
