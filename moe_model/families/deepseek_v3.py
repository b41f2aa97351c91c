"""DeepSeek-V3 (arXiv 2412.19437): latent attention, shared experts, group-limited sigmoid gate."""

from __future__ import annotations

from moe_model.architecture import GateSpec, MlaSpec, ModelSpec
from moe_model.config_json import JsonReader
from moe_model.families.base import CommonFields, Family, read_rope, require_even

_LAYER = "model.layers.{layer}."
_ATTENTION = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."


def _parse(config: JsonReader, common: CommonFields) -> ModelSpec:
    require_even(
        config, "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    )
    nope = config.integer("qk_nope_head_dim")
    rotary = config.integer("qk_rope_head_dim")
    rope, softmax_factor = read_rope(
        config, rotary, interleaved=config.flag("rope_interleave", True), default_theta=10_000.0
    )
    # The latents' norms keep the class default whatever rms_norm_eps says, as in DeepSeek's code.
    attention = MlaSpec(
        num_heads=config.integer("num_attention_heads"),
        q_lora_rank=config.optional_integer("q_lora_rank", at_least=1),
        kv_lora_rank=config.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotary,
        v_head_dim=config.integer("v_head_dim"),
        softmax_scale=(nope + rotary) ** -0.5 * softmax_factor,
        latent_norm_eps=1e-6,
        bias=config.flag("attention_bias", False),
    )
    num_layers = config.integer("num_hidden_layers")
    first_moe = config.integer("first_k_dense_replace", 3, at_least=0)
    every = config.integer("moe_layer_freq", 1)
    if every != 1:
        raise config.bad("moe_layer_freq", "1")
    num_experts = config.integer("n_routed_experts")
    expert_width = config.integer("moe_intermediate_size")
    return ModelSpec(
        moe_layers=tuple(range(first_moe, num_layers)),
        num_experts=num_experts,
        expert_intermediate=expert_width,
        shared_intermediate=expert_width * config.integer("n_shared_experts", 0, at_least=0),
        dense_intermediate=config.integer("intermediate_size"),
        attention=attention,
        rope=rope,
        gate=_parse_gate(config, num_experts),
        experts_per_token=config.integer("num_experts_per_tok"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        **common.values,
    )


def _parse_gate(config: JsonReader, num_experts: int) -> GateSpec:
    config.choice("scoring_func", "sigmoid", ("sigmoid",))
    config.choice("topk_method", "noaux_tc", ("noaux_tc",))
    groups = config.integer("n_group", 1)
    eligible = config.integer("topk_group", 1)
    top_k = config.integer("num_experts_per_tok")
    if num_experts % groups:
        raise config.bad("n_group", f"a divisor of n_routed_experts = {num_experts}")
    if num_experts // groups < 2:
        raise config.bad("n_group", "groups of at least two experts")
    if eligible > groups:
        raise config.bad("topk_group", f"at most n_group = {groups}")
    if top_k > eligible * (num_experts // groups):
        raise config.bad("num_experts_per_tok", "at most the experts of topk_group groups")
    return GateSpec(
        scoring="sigmoid",
        num_groups=groups,
        topk_groups=eligible,
        selection_bias=True,
        normalise=config.flag("norm_topk_prob", True),
        norm_epsilon=1e-20,
        scaling_factor=config.number("routed_scaling_factor", 1.0),
    )


FAMILY = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    parse=_parse,
    names={
        "embedding": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "final_norm": "model.norm.weight",
        "attention_norm": _LAYER + "input_layernorm.weight",
        "ffn_norm": _LAYER + "post_attention_layernorm.weight",
        "q": _ATTENTION + "q_proj.weight",
        "q_a": _ATTENTION + "q_a_proj.weight",
        "q_a_bias": _ATTENTION + "q_a_proj.bias",
        "q_a_norm": _ATTENTION + "q_a_layernorm.weight",
        "q_b": _ATTENTION + "q_b_proj.weight",
        "kv_a": _ATTENTION + "kv_a_proj_with_mqa.weight",
        "kv_a_bias": _ATTENTION + "kv_a_proj_with_mqa.bias",
        "kv_a_norm": _ATTENTION + "kv_a_layernorm.weight",
        "kv_b": _ATTENTION + "kv_b_proj.weight",
        "o": _ATTENTION + "o_proj.weight",
        "o_bias": _ATTENTION + "o_proj.bias",
        "dense_gate": _MLP + "gate_proj.weight",
        "dense_up": _MLP + "up_proj.weight",
        "dense_down": _MLP + "down_proj.weight",
        "router": _MLP + "gate.weight",
        "router_bias": _MLP + "gate.e_score_correction_bias",
        "shared_gate": _MLP + "shared_experts.gate_proj.weight",
        "shared_up": _MLP + "shared_experts.up_proj.weight",
        "shared_down": _MLP + "shared_experts.down_proj.weight",
        "expert_gate": _MLP + "experts.{expert}.gate_proj.weight",
        "expert_up": _MLP + "experts.{expert}.up_proj.weight",
        "expert_down": _MLP + "experts.{expert}.down_proj.weight",
    },
)
