"""Equality with transformers, and independence of chunking, batching and block numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from moe_model.errors import MissingTensor
from moe_model.forward import forward, run_to_end
from moe_model.model import load_router_model
from moe_model.plan import Chunk
from moe_model.reference import ReferenceModel

from .conftest import DEMO, SWITCHES, Oracle

Get = Callable[[str], Oracle]
BLOCK = 16


def step(model: ReferenceModel, kv, chunks: Sequence[Chunk]) -> torch.Tensor:
    """Logits of all rows of one step."""
    with torch.inference_mode():
        plan = model.model.plan(chunks, kv.block_size)
        hidden = run_to_end(forward(model.model, plan, kv, model.experts))
        return model.model.logits(hidden)


def chunked(
    model: ReferenceModel, prompt: list[int], sizes: Sequence[int], table: Sequence[int]
) -> torch.Tensor:
    """Logits of a prompt fed in chunks of the given sizes, the last repeated."""
    kv = model.model.new_kv_cache(max(table) + 1, BLOCK)
    outs, start = [], 0
    sizes = list(sizes)
    while start < len(prompt):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        outs.append(step(model, kv, [Chunk(prompt[start : start + size], start, table)]))
        start += size
    return torch.cat(outs)


def greedy_together(
    model: ReferenceModel, prompts: list[list[int]], count: int, tables: list[list[int]]
) -> list[list[int]]:
    """Greedy tokens of several sequences: prompts in one step, then one decode step a token."""
    kv = model.model.new_kv_cache(max(map(max, tables)) + 1, BLOCK)
    chunks = [Chunk(p, 0, t) for p, t in zip(prompts, tables, strict=True)]
    ends = torch.tensor([len(p) for p in prompts]).cumsum(0) - 1
    out = step(model, kv, chunks)[ends].argmax(-1).tolist()
    tokens = [[token] for token in out]
    for i in range(count - 1):
        chunks = [
            Chunk([mine[-1]], len(p) + i, t)
            for mine, p, t in zip(tokens, prompts, tables, strict=True)
        ]
        for mine, token in zip(tokens, step(model, kv, chunks).argmax(-1).tolist(), strict=True):
            mine.append(token)
    return tokens


def scattered(count: int, length: int, seed: int = 3) -> list[list[int]]:
    """Block tables for ``count`` sequences of ``length`` tokens with no two blocks in a row."""
    blocks = -(-length // BLOCK)
    order = torch.randperm(count * blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[i * blocks : (i + 1) * blocks] for i in range(count)]


@pytest.mark.parametrize("switch", sorted(SWITCHES))
def test_logits_equal_transformers(oracle: Get, switch: str) -> None:
    pair = oracle(switch)
    for length in (1, 2, 17, 150):
        prompt = pair.prompt(length)
        ours = pair.ours.logits(prompt)
        assert (ours - pair.their_logits(prompt)).abs().max() <= 1e-4, length


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 129, 512, 513, 900])
def test_shipped_model_equals_transformers_at_any_prompt_length(oracle: Get, length: int) -> None:
    pair = oracle("demo")
    prompt = pair.prompt(length)
    assert (pair.ours.logits(prompt) - pair.their_logits(prompt)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "switch", ["demo", "deepseek", "no_q_lora", "yarn", "wide", "mixtral", "window"]
)
def test_greedy_tokens_equal_transformers_over_64_steps(oracle: Get, switch: str) -> None:
    pair = oracle(switch)
    prompt = pair.prompt(40)
    ours = list(pair.ours.generate(prompt, 64, ignore_eos=True))
    assert len(ours) == 64
    theirs = pair.their_tokens(prompt, 64)
    # transformers suppresses end-of-sequence tokens to reach the length, ours may draw them
    until = next((i for i, token in enumerate(ours) if token in (1, 2)), 64)
    assert ours[:until] == theirs[:until]
    assert until > 8


@pytest.mark.parametrize("switch", ["demo", "no_q_lora", "wide", "mixtral", "window"])
def test_chunks_do_not_change_logits(oracle: Get, switch: str) -> None:
    pair = oracle(switch)
    prompt = pair.prompt(300)
    whole = pair.ours.logits(prompt)
    contiguous, mixed = list(range(20)), scattered(1, 320)[0]
    for sizes in ([1, 2, 3, 50, 7], [100], [16], [299, 1]):
        for table in (contiguous, mixed):
            got = chunked(pair.ours, prompt, sizes, table)
            assert (got - whole).abs().max() <= 1e-4, (sizes, table)


@pytest.mark.parametrize("switch", ["demo", "wide", "mixtral", "window", "one_kv_head"])
def test_batched_tokens_equal_those_alone(oracle: Get, switch: str) -> None:
    pair = oracle(switch)
    prompts = [pair.prompt(length, seed=7) for length in (1, 5, 16, 33, 90, 200)]
    alone = [list(pair.ours.generate(p, 24, ignore_eos=True)) for p in prompts]
    for tables in (scattered(6, 240), [list(range(i * 15, i * 15 + 15)) for i in range(6)]):
        assert greedy_together(pair.ours, prompts, 24, tables) == alone


def test_decode_and_prefill_share_a_step(oracle: Get) -> None:
    pair = oracle("wide")
    kv = pair.ours.model.new_kv_cache(60, BLOCK)
    tables = scattered(3, 320)
    prompts = [pair.prompt(length, seed=9) for length in (40, 300, 70)]
    step(
        pair.ours, kv, [Chunk(prompts[0][:-1], 0, tables[0]), Chunk(prompts[2][:-1], 0, tables[2])]
    )
    got = step(
        pair.ours,
        kv,
        [
            Chunk(prompts[0][-1:], 39, tables[0]),
            Chunk(prompts[1], 0, tables[1]),
            Chunk(prompts[2][-1:], 69, tables[2]),
        ],
    )
    assert got.shape[0] == 302
    assert (got[0] - pair.their_logits(prompts[0])[-1]).abs().max() <= 1e-4
    assert (got[1:301] - pair.their_logits(prompts[1])).abs().max() <= 1e-4
    assert (got[301] - pair.their_logits(prompts[2])[-1]).abs().max() <= 1e-4


@pytest.mark.parametrize("switch", ["demo", "wide", "no_q_lora", "one_group", "mixtral", "window"])
def test_exact_rows_are_the_same_bits_in_any_chunks_and_company(oracle: Get, switch: str) -> None:
    pair = oracle(switch)
    prompt = pair.prompt(70)
    whole = chunked(pair.exact, prompt, [70], list(range(5)))
    assert (whole - pair.their_logits(prompt)).abs().max() <= 1e-4
    for sizes in ([1], [33, 5], [7]):
        assert torch.equal(chunked(pair.exact, prompt, sizes, [4, 9, 2, 7, 0]), whole)
    tables = scattered(3, 96)
    kv = pair.exact.model.new_kv_cache(18, BLOCK)
    others = [pair.prompt(length, seed=5) for length in (90, 11)]
    together = step(
        pair.exact,
        kv,
        [
            Chunk(others[0], 0, tables[0]),
            Chunk(prompt, 0, tables[1]),
            Chunk(others[1], 0, tables[2]),
        ],
    )
    assert torch.equal(together[90:160], whole)


def test_only_long_spans_of_wide_models_expand(oracle: Get) -> None:
    table = list(range(64))

    def expands(switch: str, count: int, start: int = 0) -> bool:
        plan = oracle(switch).ours.model.plan([Chunk([5] * count, start, table)], 16)
        return plan.kept_rows is not None

    assert expands("wide", 200)
    assert not expands("wide", 4, 196)
    assert not expands("wide", 1, 196)
    assert not expands("deepseek", 200)


def test_fp16_packs_of_a_bf16_checkpoint_change_nothing(oracle: Get) -> None:
    pair = oracle("demo")
    half = ReferenceModel(DEMO, weights="fp16")
    prompt = pair.prompt(60)
    assert (half.logits(prompt) - pair.their_logits(prompt)).abs().max() <= 1e-4


def test_router_reads_no_routed_expert(oracle: Get, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    pair = oracle("deepseek")
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((pair.path / name).read_bytes())
    tensors = load_file(pair.path / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if ".experts." not in name}
    save_file(kept, tmp_path / "model.safetensors")
    seen: list[float] = []
    load_router_model(tmp_path, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    with pytest.raises(MissingTensor, match=r"experts\.0\.gate_proj"):
        ReferenceModel(tmp_path)


def test_kv_cache_stores_latents_only() -> None:
    model = load_router_model(DEMO)
    attention = model.spec.attention
    assert model.kv_bytes_per_block(16) == 16 * model.spec.num_layers * 4 * attention.cache_width
    kv = model.new_kv_cache(3, 16)
    assert kv.nbytes == 3 * model.kv_bytes_per_block(16)


def test_plan_for_another_block_size_is_refused() -> None:
    model = load_router_model(DEMO)
    kv = model.new_kv_cache(4, 8)
    with torch.inference_mode():
        plan = model.plan([Chunk([5], 0, [0])], 16)
        with pytest.raises(ValueError, match="blocks of 16 tokens"):
            model.attend(0, model.embed(plan), plan, kv)
