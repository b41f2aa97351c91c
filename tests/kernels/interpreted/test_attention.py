from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ep_kernels.triton.arguments import KernelArgumentError
from ep_kernels.triton.attention import (
    CacheRows,
    Queries,
    attend,
    reference_attend,
    splits_for,
)

LATENT = CacheRows(heads=1, key_dim=40, value_dim=32, value_offset=0, block_size=4)
GROUPED = CacheRows(heads=2, key_dim=24, value_dim=24, value_offset=48, block_size=4)
ODD_LATENT = CacheRows(heads=1, key_dim=28, value_dim=20, value_offset=0, block_size=8)
NARROW_VALUES = CacheRows(heads=3, key_dim=16, value_dim=8, value_offset=48, block_size=16)
WINDOWED = replace(GROUPED, window=7)

LAYOUTS = {
    "latent": (LATENT, 8),
    "latent, no power of two": (ODD_LATENT, 3),
    "grouped": (GROUPED, 4),
    "values narrower than keys": (NARROW_VALUES, 3),
    "window": (WINDOWED, 4),
}
BATCHES = {
    "one token, nothing before it": ([1], [1]),
    "decode, uneven contexts": ([1, 1, 1], [1, 37, 16]),
    "prefill from the start": ([5], [5]),
    "a chunk, a decode, nobody, a whole block": ([9, 1, 0, 4], [30, 17, 8, 4]),
}


def batch(
    counts: list[int],
    contexts: list[int],
    rows: CacheRows,
    heads: int,
    rng: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, Queries]:
    """Queries, a cache whose blocks are in no order and in which NaN lies wherever no key does."""
    blocks_of = [-(-context // rows.block_size) for context in contexts]
    numbers = torch.randperm(sum(blocks_of) + 3, generator=rng).int()
    table = torch.full((len(counts), max(blocks_of) + 1), -1, dtype=torch.int32)
    width = max(rows.heads * rows.key_dim, rows.value_offset + rows.heads * rows.value_dim)
    cache = torch.full((numbers.numel() * rows.block_size, width + 5), float("nan"))
    at = 0
    for sequence, (count, context) in enumerate(zip(blocks_of, contexts, strict=True)):
        table[sequence, :count] = numbers[at : at + count]
        at += count
        positions = torch.arange(context)
        slots = table[sequence, positions // rows.block_size] * rows.block_size
        slots = (slots + positions % rows.block_size).long()
        cache[slots, :width] = torch.randn(context, width, generator=rng)
    begins = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    q = torch.randn(sum(counts), heads, rows.key_dim, generator=rng) * 0.3
    queries = Queries(
        begins,
        torch.tensor(contexts, dtype=torch.int32),
        table,
        most_queries=max(counts),
        most_context=max(contexts),
    )
    return q.to(dtype), cache.to(dtype), queries


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("sizes", BATCHES.values(), ids=BATCHES)
def test_attention_as_the_reference_computes_it(
    name: str, sizes: tuple[list[int], list[int]], rng: torch.Generator
) -> None:
    rows, heads = LAYOUTS[name]
    heads = heads if rows.heads == 1 else rows.heads * (heads // 2 or 1)
    q, cache, queries = batch(*sizes, rows, heads, rng)
    out = attend(q, cache, queries, rows, splits=1 + int(sizes[0] == [1, 1, 1]))
    torch.testing.assert_close(out, reference_attend(q, cache, queries, rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [LATENT, WINDOWED], ids=["latent", "window"])
def test_the_number_of_splits_does_not_matter(rows: CacheRows, rng: torch.Generator) -> None:
    """Also where there are more splits than tiles, so that some hold no key."""
    q, cache, queries = batch([1, 3], [50, 4], rows, 4, rng)
    wanted = reference_attend(q, cache, queries, rows)
    for splits in (2, 5):
        got = attend(q, cache, queries, rows, splits=splits)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_caches_of_16_bits(dtype: torch.dtype, rng: torch.Generator) -> None:
    q, cache, queries = batch([1, 2], [20, 9], LATENT, 2, rng, dtype)
    out = attend(q, cache, queries, LATENT)
    wanted = reference_attend(q, cache, queries, LATENT)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)


def test_scores_of_any_size_make_no_nan(rng: torch.Generator) -> None:
    q, cache, queries = batch([1, 2], [20, 9], LATENT, 2, rng)
    q[0] *= 1e4
    q[1] *= 0
    out = attend(q, cache, queries, LATENT, splits=2)
    torch.testing.assert_close(
        out, reference_attend(q, cache, queries, LATENT), rtol=1e-4, atol=1e-5
    )


def test_no_token_needs_no_launch() -> None:
    nobody = Queries(
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(0, 1, dtype=torch.int32),
        most_queries=1,
        most_context=1,
    )
    out = attend(torch.zeros(0, 2, 40), torch.zeros(4, 40), nobody, LATENT)
    assert out.shape == (0, 2, 32)


def test_few_programs_and_long_contexts_are_split() -> None:
    assert splits_for(programs=1, most_context=100_000, block_n=64) == 32
    assert splits_for(programs=128, most_context=100_000, block_n=64) == 2
    assert splits_for(programs=1, most_context=200, block_n=64) == 1
    assert splits_for(programs=1000, most_context=100_000, block_n=64) == 1


def test_what_the_kernel_cannot_run_is_refused_and_named(rng: torch.Generator) -> None:
    q, cache, queries = batch([1], [5], GROUPED, 4, rng)
    with pytest.raises(KernelArgumentError, match="q is 3 heads, expected a multiple of 2"):
        attend(q[:, :3].contiguous(), cache, queries, GROUPED)
    with pytest.raises(KernelArgumentError, match=r"cache is of shape .* expected \[slots, 96\]"):
        attend(q, cache[:, :90], queries, GROUPED)
    with pytest.raises(KernelArgumentError, match=r"cache is torch\.float16"):
        attend(q, cache.half(), queries, GROUPED)
    with pytest.raises(KernelArgumentError, match=r"begins is of shape \[3\]"):
        attend(q, cache, replace(queries, begins=torch.zeros(3, dtype=torch.int32)), GROUPED)
    with pytest.raises(KernelArgumentError, match=r"contexts is torch\.int64"):
        attend(q, cache, replace(queries, contexts=queries.contexts.long()), GROUPED)
    with pytest.raises(KernelArgumentError, match="most_queries is 0"):
        attend(q, cache, replace(queries, most_queries=0), GROUPED)
    with pytest.raises(KernelArgumentError, match="splits is 0"):
        attend(q, cache, queries, GROUPED, splits=0)
    with pytest.raises(KernelArgumentError, match="values behind the keys, or one head"):
        CacheRows(2, 16, 16, 0, 4)
