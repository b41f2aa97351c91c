"""Compare an exported model with transformers' own DeepSeek-V3."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from .export import write_model
from .model import Model

TEXTS = (
    "In the beginning God created the heaven and the earth.",
    "static int sqlite3VdbeExec(\n  Vdbe *p\n){\n  int rc = SQLITE_OK;\n",
    "Iceland: Geography\n\nLocation: Northern Europe, island between the Greenland Sea",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
)
TOLERANCE = 1e-3  # of a logit, in float32; the sums are made in another order


@torch.no_grad()
def compare(model: Model, shipped: Model, data: Path, out: Path) -> None:
    """Print the largest differences between logits; fail if one is out of tolerance.

    Args:
        model: the trained model, float32.
        shipped: the same with weights rounded to bfloat16.
        data: folder of the tokenizer files.
        out: the exported model.
    """
    encode = AutoTokenizer.from_pretrained(out)
    texts: list[Tensor] = [encode(text, return_tensors="pt").input_ids for text in TEXTS]
    with tempfile.TemporaryDirectory() as folder:
        exact = Path(folder)
        write_model(model, data, exact, torch.float32)
        for label, mine, path, attention in (
            ("float32 weights, eager", model, exact, "eager"),
            ("float32 weights, sdpa", model, exact, "sdpa"),
            ("bfloat16 weights, eager", shipped, out, "eager"),
        ):
            theirs = _load(path, torch.float32, attention)
            worst = max(float((theirs(ids).logits - mine(ids)).abs().max()) for ids in texts)
            _report(label, worst)

    _report("decoding with the cache", max(_cache_error(shipped, ids) for ids in texts))
    theirs = _load(out, torch.bfloat16, "eager")
    same = torch.cat(
        [theirs(ids).logits.argmax(-1).flatten() == model(ids).argmax(-1).flatten()
         for ids in texts]
    )  # fmt: skip
    print(f"bfloat16 arithmetic: the likeliest token agrees at {same.float().mean():.1%}")


def _load(path: Path, dtype: torch.dtype, attention: str) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attention
    )
    return model.eval()


def _cache_error(model: Model, ids: Tensor) -> float:
    """Largest logit difference between decoding token by token and one pass over all of them."""
    cache = model.new_cache()
    steps = [model(ids[:, i : i + 1], cache, i) for i in range(ids.shape[1])]
    return float((torch.cat(steps, 1) - model(ids)).abs().max())


def _report(label: str, error: float) -> None:
    print(f"{label}: largest logit difference {error:.1e}")
    if error > TOLERANCE:
        raise SystemExit(f"{label}: more than {TOLERANCE}")
