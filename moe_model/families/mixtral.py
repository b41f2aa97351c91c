"""Mixtral (arXiv 2401.04088): grouped-query attention, softmax gate, no shared expert."""

from __future__ import annotations

from moe_model.architecture import GateSpec, GqaSpec, ModelSpec
from moe_model.config_json import JsonReader
from moe_model.families.base import CommonFields, Family, read_rope

_LAYER = "model.layers.{layer}."
_ATTENTION = _LAYER + "self_attn."
_MOE = _LAYER + "block_sparse_moe."


def _parse(config: JsonReader, common: CommonFields) -> ModelSpec:
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.bad("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    head_dim = config.integer("head_dim", config.integer("hidden_size") // heads)
    if head_dim % 2:
        raise config.bad("head_dim", "an even number")
    # Only DeepSeek's attention puts YaRN's temperature on the softmax.
    rope, _ = read_rope(config, head_dim, interleaved=False, default_theta=1_000_000.0)
    num_experts = config.integer("num_local_experts")
    top_k = config.integer("num_experts_per_tok", 2)
    if top_k > num_experts:
        raise config.bad("num_experts_per_tok", f"at most num_local_experts = {num_experts}")
    return ModelSpec(
        moe_layers=tuple(range(config.integer("num_hidden_layers"))),
        num_experts=num_experts,
        expert_intermediate=config.integer("intermediate_size"),
        shared_intermediate=0,
        dense_intermediate=0,
        attention=GqaSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            softmax_scale=head_dim**-0.5,
            sliding_window=config.optional_integer("sliding_window", at_least=1),
        ),
        rope=rope,
        gate=GateSpec(scoring="softmax"),
        experts_per_token=top_k,
        norm_eps=config.number("rms_norm_eps", 1e-5),
        **common.values,
    )


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    parse=_parse,
    names={
        "embedding": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "final_norm": "model.norm.weight",
        "attention_norm": _LAYER + "input_layernorm.weight",
        "ffn_norm": _LAYER + "post_attention_layernorm.weight",
        "q": _ATTENTION + "q_proj.weight",
        "k": _ATTENTION + "k_proj.weight",
        "v": _ATTENTION + "v_proj.weight",
        "o": _ATTENTION + "o_proj.weight",
        "router": _MOE + "gate.weight",
        "expert_gate": _MOE + "experts.{expert}.w1.weight",
        "expert_up": _MOE + "experts.{expert}.w3.weight",
        "expert_down": _MOE + "experts.{expert}.w2.weight",
    },
)
