from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from moe_model.errors import BadConfig, CorruptFile, MissingFile, UnknownArchitecture, UnsafeFormat
from moe_model.spec import GqaSpec, MlaSpec, load_spec, model_digest, serving_digest

from .conftest import DEMO

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "sliding_window": 128,
}


def write(path: Path, config: dict, generation: dict | None = None) -> Path:
    (path / "config.json").write_bytes(msgspec.json.encode(config))
    if generation is not None:
        (path / "generation_config.json").write_bytes(msgspec.json.encode(generation))
    return path


def test_deepseek_fields(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, DEEPSEEK))
    assert (spec.family, spec.num_layers, spec.moe_layers) == ("deepseek_v3", 4, (1, 2, 3))
    assert spec.shared_intermediate == 64
    assert spec.dtype == "bfloat16"
    assert isinstance(spec.attention, MlaSpec)
    assert spec.attention.cache_width == 40
    assert spec.attention.softmax_scale == pytest.approx(24**-0.5)
    assert (spec.gate.num_groups, spec.gate.topk_groups) == (2, 1)


def test_mixtral_fields(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, MIXTRAL))
    assert isinstance(spec.attention, GqaSpec)
    assert (spec.attention.head_dim, spec.attention.sliding_window) == (8, 128)
    assert spec.attention.cache_width == 32
    assert spec.moe_layers == (0, 1)
    assert spec.shared_intermediate == 0
    assert spec.rope.theta == 1_000_000.0


def test_generation_config_adds_stop_tokens_and_sampling(tmp_path: Path) -> None:
    generation = {"eos_token_id": [7, 2], "temperature": 0.7, "top_k": 40, "do_sample": True}
    spec = load_spec(write(tmp_path, DEEPSEEK, generation))
    assert spec.eos_token_ids == (2, 7)
    assert (spec.sampling.temperature, spec.sampling.top_k) == (0.7, 40)
    assert spec.sampling.top_p is None


YARN = {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}


def test_flat_and_nested_rope_spellings_agree(tmp_path: Path) -> None:
    flat = {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **YARN}}
    nested = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, **YARN}}
    specs = [load_spec(write(tmp_path, DEEPSEEK | extra)) for extra in (flat, nested)]
    assert specs[0] == specs[1]
    assert specs[0].rope.theta == 5e4
    assert specs[0].rope.yarn is not None
    assert specs[0].rope.yarn.attention_factor == 1.0
    # DeepSeek-V3: mscale = 0.1 ln 40 + 1, squared on the softmax scale
    assert specs[0].attention.softmax_scale == pytest.approx(24**-0.5 * 1.3688879454**2)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 8}, "n_group"),
        ({"topk_group": 3}, "topk_group"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"kv_lora_rank": 33}, "kv_lora_rank"),
        ({"rope_scaling": {"type": "longrope"}}, "type"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"eos_token_id": ["x"]}, "eos_token_id"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
        ({"architectures": []}, "architectures"),
    ],
)
def test_bad_value_is_named(tmp_path: Path, change: dict, key: str) -> None:
    with pytest.raises(BadConfig) as caught:
        load_spec(write(tmp_path, DEEPSEEK | change))
    assert caught.value.key == key
    assert key in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitecture, match=r"LlamaForCausalLM.*MixtralForCausalLM"):
        load_spec(write(tmp_path, DEEPSEEK | {"architectures": ["LlamaForCausalLM"]}))


def test_missing_and_broken_config(tmp_path: Path) -> None:
    with pytest.raises(MissingFile):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CorruptFile):
        load_spec(tmp_path)


def copy_model(target: Path) -> Path:
    target.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (target / name).write_bytes((DEMO / name).read_bytes())
    return target


def test_digest_follows_content_not_place(tmp_path: Path) -> None:
    same = copy_model(tmp_path / "elsewhere")
    assert model_digest(same) == model_digest(DEMO)
    for name in ("config.json", "tokenizer.json"):
        other = copy_model(tmp_path / name)
        (other / name).write_bytes((other / name).read_bytes() + b" ")
        assert model_digest(other) != model_digest(DEMO)
    retrained = copy_model(tmp_path / "retrained")
    data = bytearray((retrained / "model.safetensors").read_bytes())
    half = len(data) // 2
    data[half:] = bytes(byte ^ 1 for byte in data[half:])
    (retrained / "model.safetensors").write_bytes(data)
    assert model_digest(retrained) != model_digest(DEMO)


def test_digest_refuses_pickled_weights(tmp_path: Path) -> None:
    path = copy_model(tmp_path / "pickled")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(UnsafeFormat):
        model_digest(path)


def test_spec_imports_no_torch() -> None:
    code = "import sys, moe_model.spec, moe_model.tensors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_serving_digest_shows_what_differs() -> None:
    digest = model_digest(DEMO)
    assert serving_digest(DEMO, "auto", False, 1) == f"{digest} weights=auto exact=false"
    assert serving_digest(DEMO, "auto", False, 2) == f"{digest} weights=auto exact=false"
    assert serving_digest(DEMO, "fp16", True, 1) == f"{digest} weights=fp16 exact=true"
    assert serving_digest(DEMO, "fp16", True, 2) == f"{digest} weights=fp16 exact=true tp=2"
