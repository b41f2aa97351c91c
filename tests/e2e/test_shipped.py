"""The shipped model through the whole mesh gives transformers' tokens and log-probabilities."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer

from tests.e2e.test_oracle import STEPS, check, complete, prompts
from tests.support.meshes import Mesh
from tests.support.oracle import Oracle

DEMO = Path(__file__).parents[2] / "demo" / "model"


def test_shipped_model_equals_transformers_alone_and_batched(demo_mesh: Mesh) -> None:
    oracle = Oracle(DEMO)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    cases = prompts(3000, [1, 2, 15, 16, 17, 63, 250, 517, 900])
    wanted = [oracle.greedy(prompt, STEPS) for prompt in cases]
    alone = [complete(demo_mesh, prompt) for prompt in cases]
    with ThreadPoolExecutor(len(cases)) as pool:
        together = list(pool.map(lambda prompt: complete(demo_mesh, prompt), cases))
    for one, many, want in zip(alone, together, wanted, strict=True):
        check(one, want, tokenizer)
        check(many, want, tokenizer)
