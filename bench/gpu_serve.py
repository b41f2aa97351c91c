"""A whole mesh with its routers and experts on the card: its tokens are the CPU's, then its rate.
So with experts in FP8, and with routers of two cards where there are two.

Needs moemesh installed beside torch and Triton (``pip install '.[gpu-cu13]'``). The model is the
one that ships with the repository; ``MOEMESH_BENCH_MODEL`` names another checkpoint.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_harness import Meter

if TYPE_CHECKING:
    from tests.support.meshes import Mesh

ROOT = Path(__file__).parents[1]
# Taken out: the mesh's processes refuse a variable of that kind that names no setting.
MODEL = Path(os.environ.pop("MOEMESH_BENCH_MODEL", ROOT / "demo" / "model"))
TOLERANCE = 0.15
"""Of a log-probability of running text, for rows and cache in bf16. Of tokens that surprise the
model it would have to be several times as much.
"""
FP8_TOLERANCE = 0.3
"""The same for drawn weights, which every token surprises; what bf16 changes may go to another
neighbour in e4m3 besides. Wrong weights put a log-probability off by ten times as much.
"""
TEXTS = (
    "Emma was not at all",
    "And it came to pass that the king said unto the people,",
    "The climate is tropical, with a rainy season from " * 4,
)
STEPS = 24
RATE_CLIENTS, RATE_TOKENS = 32, 64


def mesh(meter: Meter, device: str = "cuda") -> None:
    """Experts in bf16."""
    from moe_model.reference import ReferenceModel  # noqa: PLC0415  (needs the installation)

    path = MODEL
    _serve(meter, "mesh", path, ReferenceModel(path), device)


def mesh_fp8(meter: Meter, device: str = "cuda", sizes: Mapping[str, Any] | None = None) -> None:
    """Experts in FP8, of an FP8 checkpoint with drawn weights."""
    from gpu_fp8 import SIZES, reference_of, write_pair  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        generator = torch.Generator().manual_seed(torch.initial_seed())
        small, twin = write_pair(MODEL, Path(folder), SIZES | (sizes or {}), generator)
        _serve(meter, "mesh FP8", small, reference_of(twin), device, FP8_TOLERANCE)


def mesh_tp(meter: Meter, device: str = "cuda") -> None:
    """A router of two cards."""
    from moe_model.reference import ReferenceModel  # noqa: PLC0415

    if device == "cuda" and torch.cuda.device_count() < 2:
        print("mesh TP: not run, it needs two GPUs", file=sys.stderr)
        return
    path = MODEL
    _serve(meter, "mesh TP", path, ReferenceModel(path), device, router__tp=2)


def _serve(
    meter: Meter,
    section: str,
    path: Path,
    reference: Any,
    device: str,
    tolerance: float = TOLERANCE,
    **settings: Any,
) -> None:
    """Start a mesh, compare its tokens with the reference's, and measure its rate."""
    sys.path.insert(0, str(ROOT))
    from tokenizers import Tokenizer  # noqa: PLC0415

    from tests.support.meshes import Mesh  # noqa: PLC0415

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    prompts = [list(tokenizer.encode(text).ids) for text in TEXTS]
    settings |= {"router__device": device, "expert__device": device}
    with Mesh(path, experts=2, **settings) as running:
        worst = max(_off(running, reference, path.name, one, tolerance) for one in prompts)
        if worst > tolerance:
            raise ValueError(f"log-probabilities are off by {worst:.3f}, allowed {tolerance}")
        check = f"log-probabilities {worst:.0e}"
        alone = _rate(running, path.name, 1)
        meter.row(section, "decode, one stream", alone, "tokens/s", check=check)
        many = _rate(running, path.name, RATE_CLIENTS)
        meter.row(section, f"decode, {RATE_CLIENTS} streams", many, "tokens/s", check=check)


def _ask(running: Mesh, model: str, prompt: list[int], **options: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "temperature": 0, "ignore_eos": True, **options}
    status, answer = running.post("/v1/completions", body)
    if status != 200:
        raise RuntimeError(f"{status}: {answer}")
    return dict(answer["choices"][0])


def _off(running: Mesh, reference: Any, model: str, prompt: list[int], tolerance: float) -> float:
    """How far the mesh's log-probabilities are from the reference's at most: the prompt's own, and
    those of greedy tokens for as long as bf16 cannot have changed which they are.
    """
    options = {"max_tokens": STEPS, "logprobs": 1, "echo": True}
    got = _ask(running, model, prompt, **options)["logprobs"]["token_logprobs"]
    tokens = [*prompt, *reference.generate(prompt, STEPS, ignore_eos=True)]
    rows = reference.logits(tokens).log_softmax(-1)
    worst = 0.0
    for position in range(1, len(tokens)):
        row = rows[position - 1]
        best = row.topk(2).values
        if position >= len(prompt) and float(best[0] - best[1]) < 2 * tolerance:
            break
        worst = max(worst, abs(got[position] - float(row[tokens[position]])))
    return worst


def _rate(running: Mesh, model: str, clients: int) -> float:
    """Tokens a second of all clients together."""
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(
            pool.map(
                lambda i: _ask(running, model, [8 + i, 9, 10], max_tokens=RATE_TOKENS),
                range(clients),
            )
        )
    return clients * RATE_TOKENS / (time.perf_counter() - began)


SECTIONS = {"mesh": mesh, "mesh FP8": mesh_fp8, "mesh TP": mesh_tp}
