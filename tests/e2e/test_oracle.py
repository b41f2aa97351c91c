"""Tokens and log-probabilities through the whole mesh equal transformers'."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.checkpoints import variant
from tests.support.meshes import Mesh
from tests.support.oracle import Continuation, Oracle

STEPS = 64
TOLERANCE = 1e-4
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "deepseek": (1, {"router__micro_batches": "1"}),
    "deepseek-no-q-lora-one-group-unnormalised": (
        2, {"router__micro_batches": "3", "router__capacity_tokens": 16},
    ),
    "deepseek-yarn-no-shared-two-dense-tied": (1, {}),
    "mixtral": (2, {"router__micro_batches": "2", "router__capacity_tokens": 16}),
    "mixtral-window-tied": (3, {}),
}  # fmt: skip
"""Of each variant: how many expert workers serve it, and with which settings."""


def prompts(vocab: int, lengths: list[int]) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(8, vocab) for _ in range(length)] for length in lengths]


def complete(mesh: Mesh, prompt: list[int], steps: int = STEPS) -> dict[str, Any]:
    status, body = mesh.post(
        "/v1/completions",
        {
            "model": mesh_model(mesh), "prompt": prompt, "max_tokens": steps, "temperature": 0,
            "logprobs": 5, "ignore_eos": True,
        },
    )  # fmt: skip
    assert status == 200, body
    return dict(body["choices"][0])


def mesh_model(mesh: Mesh) -> str:
    import json

    return str(json.loads(mesh.get("/v1/models")[1])["data"][0]["id"])


def check(choice: dict[str, Any], want: Continuation, tokenizer: Tokenizer) -> None:
    got = choice["logprobs"]
    assert len(got["token_logprobs"]) == len(want.tokens)
    assert choice["text"] == tokenizer.decode(want.tokens, skip_special_tokens=True)
    for step, token in enumerate(want.tokens):
        row = want.logprobs[step]
        assert abs(got["token_logprobs"][step] - float(row[token])) <= TOLERANCE, step
        top = sorted(got["top_logprobs"][step].values(), reverse=True)[:5]
        expected = row.topk(5).values.tolist()
        # Two tokens that decode to the same text share a key: compare as many as there are.
        if len(top) == 5:
            assert max(abs(a - b) for a, b in zip(top, expected, strict=True)) <= TOLERANCE


@pytest.mark.parametrize("name", MESHES)
def test_every_switch_equals_transformers(name: str, checkpoints: Path) -> None:
    """Micro-batches and small lanes, which split messages, are switches as well.

    A variant has several switches of its family; ``tests/unit/moe_model/test_model.py`` compares
    each alone, without a mesh.
    """
    experts, settings = MESHES[name]
    path = variant(name, checkpoints)
    oracle = Oracle(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    # Micro-batches of several sequences each need more of them.
    cases = prompts(380, [1, 20, 130, 300, *([5, 40, 90] if settings else [])])
    wanted = [oracle.greedy(prompt, STEPS) for prompt in cases]
    # A small token budget forces chunked prefill between other sequences' decode steps.
    with Mesh(path, experts=experts, router__max_step_tokens=96, **settings) as mesh:
        with ThreadPoolExecutor(len(cases)) as pool:
            together = list(pool.map(lambda prompt: complete(mesh, prompt), cases))
        for choice, want in zip(together, wanted, strict=True):
            check(choice, want, tokenizer)


def test_exact_mode_on_three_workers_gives_the_same_bits_alone_batched_and_on_one(
    tiny_deepseek: Path,
) -> None:
    oracle = Oracle(tiny_deepseek)
    tokenizer = Tokenizer.from_file(str(tiny_deepseek / "tokenizer.json"))
    cases = prompts(380, [3, 30, 61, 120])
    # Every answer is computed from its first token on: nothing is taken from an earlier one.
    anew = {"router__prefix_cache": "false", "router__max_step_tokens": 64}
    with Mesh(tiny_deepseek, experts=3, model__exact="true", **anew) as mesh:
        alone = [complete(mesh, prompt) for prompt in cases]
        with ThreadPoolExecutor(len(cases)) as pool:
            together = list(pool.map(lambda prompt: complete(mesh, prompt), cases))
        mesh.run("scale", "experts=1", timeout_s=300.0)
        assert [worker["state"] for worker in mesh.members("expert")].count("ready") == 1
        elsewhere = [complete(mesh, prompt) for prompt in cases]
    for prompt, one, many, other in zip(cases, alone, together, elsewhere, strict=True):
        check(one, oracle.greedy(prompt, STEPS), tokenizer)
        assert one["logprobs"] == many["logprobs"] == other["logprobs"]
