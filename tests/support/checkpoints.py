"""Random-weight, well-formed Hugging Face MoE checkpoints, made deterministically and offline.

Tests compare the mesh with transformers on the tiny ones; benchmarks serve the large ones. Needs
the ``test`` extra (transformers writes the files, so that the format is theirs, not ours).

Rows of ``lm_head`` that belong to special tokens or to tokens that are not whole UTF-8 are zero:
greedy decoding never ends early and every token is text at once, so that rates can be compared.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

TINY_DEEPSEEK: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 24, "max_position_embeddings": 1024,
}  # fmt: skip
TINY_MIXTRAL: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 5,
    "num_experts_per_tok": 2, "max_position_embeddings": 1024, "sliding_window": None,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10_000.0,
}  # fmt: skip

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("deepseek_v3", TINY_DEEPSEEK),
    "deepseek-no-q-lora": ("deepseek_v3", TINY_DEEPSEEK | {"q_lora_rank": None}),
    "deepseek-yarn": ("deepseek_v3", TINY_DEEPSEEK | {"rope_parameters": YARN}),
    "deepseek-no-q-lora-one-group-unnormalised": (
        "deepseek_v3",
        TINY_DEEPSEEK
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "deepseek-yarn-no-shared-two-dense-tied": (
        "deepseek_v3",
        TINY_DEEPSEEK
        | {
            "rope_parameters": YARN, "n_shared_experts": 0, "first_k_dense_replace": 2,
            "num_hidden_layers": 4, "tie_word_embeddings": True,
        },
    ),
    # Matrices that are worth keeping in 16 bits.
    "deepseek-16-bit": (
        "deepseek_v3",
        TINY_DEEPSEEK
        | {
            "hidden_size": 512, "intermediate_size": 192, "moe_intermediate_size": 160,
            "q_lora_rank": 192, "kv_lora_rank": 128, "num_attention_heads": 8,
            "num_key_value_heads": 8, "qk_nope_head_dim": 96, "qk_rope_head_dim": 32,
            "v_head_dim": 96,
        },
    ),
    "mixtral": ("mixtral", TINY_MIXTRAL),
    "mixtral-window": ("mixtral", TINY_MIXTRAL | {"sliding_window": 24}),
    "mixtral-window-tied": (
        "mixtral", TINY_MIXTRAL | {"sliding_window": 24, "tie_word_embeddings": True},
    ),
    "bench-deepseek": (
        "deepseek_v3",
        {
            "vocab_size": 16_384, "hidden_size": 1024, "intermediate_size": 2816,
            "moe_intermediate_size": 512, "num_hidden_layers": 10, "num_attention_heads": 8,
            "num_key_value_heads": 8, "n_shared_experts": 1, "n_routed_experts": 64,
            "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 1,
            "norm_topk_prob": True, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
            "q_lora_rank": 384, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "max_position_embeddings": 4096,
        },
    ),
}  # fmt: skip


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE over a few files of the Python standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(root.glob("*.py")) if vocab_size > 1024 else [root / "argparse.py"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train([str(name) for name in names], trainer)
    return tokenizer


def _fill(model: torch.nn.Module, whole_tokens: list[int], seed: int) -> None:
    """Normal weights scaled by fan-in, wide gates, a live selection bias."""
    generator = torch.Generator().manual_seed(seed)
    state = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if "inv_freq" not in name
    }
    for name in sorted(state):
        value = state[name]
        if not value.is_floating_point() or not value.numel():
            continue
        if "e_score_correction_bias" in name:
            std, mean = 0.1, 0.0
        elif value.dim() == 1:
            std, mean = 0.05, 1.0
        elif "gate.weight" in name:
            std, mean = 1.5 / value.shape[-1] ** 0.5, 0.0
        elif "embed_tokens" in name:
            std, mean = 0.5, 0.0
        else:
            std, mean = 1.0 / value.shape[-1] ** 0.5, 0.0
        drawn = torch.empty(value.shape).normal_(mean, std, generator=generator)
        value.data.copy_(drawn)
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    mask = torch.zeros(head.shape[0], 1)
    mask[torch.tensor(whole_tokens)] = 1
    head.data.mul_(mask)


def write(
    path: Path,
    family: str,
    config: dict[str, Any],
    *,
    seed: int = 7,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
) -> Path:
    """Write one checkpoint directory; returns ``path``. A finished one is left as it is."""
    import transformers

    if (path / "tokenizer.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    classes = {
        "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    }
    config_class, model_class = classes[family]
    tokenizer = train_tokenizer(config["vocab_size"])
    whole = [
        token
        for token in range(len(SPECIALS), tokenizer.get_vocab_size())
        if "\ufffd" not in tokenizer.decode([token])
    ]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = model_class(config_class(**config, **IDS))
    finally:
        torch.set_default_dtype(before)
    _fill(model, whole, seed)
    model.generation_config = transformers.GenerationConfig(**IDS, do_sample=False)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    text = (path / "config.json").read_text()
    published = json.loads(text) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (path / "config.json").write_text(json.dumps(published, indent=1, sort_keys=True) + "\n")
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|bos|>",
                "eos_token": "<|eos|>",
                "pad_token": "<|pad|>",
                "model_max_length": config["max_position_embeddings"],
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=1,
        )
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def variant(name: str, root: Path) -> Path:
    """Write the named variant below ``root`` (in 16 bits the large ones, in fp32 the tiny)."""
    family, config = VARIANTS[name]
    dtype = torch.bfloat16 if name.startswith("bench") else torch.float32
    if name.endswith("16-bit"):
        dtype = torch.float16
    return write(root / name, family, config, dtype=dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("checkpoints"))
    arguments = parser.parse_args()
    print(variant(arguments.name, arguments.out))


if __name__ == "__main__":
    main()
