"""Write the trained model as a Hugging Face model directory with its model card.

Run as ``python -m demo.recipe.export --check``.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from .card import CardFacts, model_card
from .data import load_sizes
from .evaluate import evaluate
from .folders import DATA, MODEL, RUN
from .model import Model
from .sample import PROMPTS, TEMPERATURE, TOP_P, generate, load_trained
from .tokenizer import BOS_ID, EOS_ID

# What the config.json of a DeepSeek-V3 says besides the sizes in ModelConfig.
FORMAT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rope_scaling": None,
    "rope_interleave": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_nextn_predict_layers": 0,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "initializer_range": 0.02,
    "use_cache": True,
}
GENERATION = {
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "do_sample": True,
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "max_new_tokens": 200,
}


def checkpoint_tensors(model: Model, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors under their Hugging Face names, the stacked experts split up.

    The routing bias stays float32: its steps are finer than bfloat16 resolves.
    """
    tensors = {}
    for key, value in model.state_dict().items():
        name = key if key.startswith("lm_head") else f"model.{key}"
        stem, _, last = name.rpartition(".")
        if last == "gate_up":  # [E, 2M, D]
            for e, (gate, up) in enumerate(x.chunk(2) for x in value):
                tensors[f"{stem}.experts.{e}.gate_proj.weight"] = gate
                tensors[f"{stem}.experts.{e}.up_proj.weight"] = up
        elif last == "down":  # [E, D, M]
            for e, down in enumerate(value):
                tensors[f"{stem}.experts.{e}.down_proj.weight"] = down
        else:
            tensors[name] = value
    return {
        name: x.to(torch.float32 if "e_score_correction_bias" in name else dtype)
        .clone(memory_format=torch.contiguous_format)
        for name, x in tensors.items()
    }  # fmt: skip


def write_model(model: Model, data: Path, out: Path, dtype: torch.dtype) -> None:
    """Write weights, configuration and tokenizer to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint_tensors(model, dtype), out / "model.safetensors", {"format": "pt"})
    config = {**FORMAT, **asdict(model.config)}
    config["num_key_value_heads"] = model.config.num_attention_heads
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", GENERATION)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(data / name, out / name)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def round_weights(model: Model) -> Model:
    """A copy of the model with the values that bfloat16 weights have, held as float32."""
    rounded = Model(model.config).eval()
    rounded.load_state_dict(
        {
            key: x if "e_score_correction_bias" in key else x.bfloat16().float()
            for key, x in model.state_dict().items()
        }
    )
    return rounded


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Export the trained model.")
    parser.add_argument("--run", type=Path, default=RUN, help="output of train.py")
    parser.add_argument("--data", type=Path, default=DATA, help="output of tokenizer.py")
    parser.add_argument("--out", type=Path, default=MODEL)
    parser.add_argument("--check", action="store_true", help="compare with transformers")
    args = parser.parse_args()

    torch.set_num_threads(1)
    model = load_trained(args.run)
    shipped = round_weights(model)
    write_model(model, args.data, args.out, torch.bfloat16)

    hyper = torch.load(args.run / "checkpoint.pt")["hyper"]
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    sizes = load_sizes(args.data)
    facts = CardFacts(
        parameters=sum(p.numel() for p in model.parameters()),
        hyper=hyper,
        train_tokens=sum(size.train_tokens for size in sizes.values()),
        held_out=evaluate(shipped, args.data, sizes, hyper["length"]),
        samples={
            topic: (prompt, generate(shipped, tokenizer, prompt))
            for topic, prompt in PROMPTS.items()
        },
    )
    card = model_card(facts, args.out)
    (args.out / "README.md").write_text(card, encoding="utf-8")
    for path in sorted(args.out.iterdir()):
        print(f"{path.stat().st_size:>12,} {path.name}")
    if args.check:
        from .check import compare  # noqa: PLC0415  # needs transformers, the rest does not

        compare(model, shipped, args.data, args.out)


if __name__ == "__main__":
    main()
