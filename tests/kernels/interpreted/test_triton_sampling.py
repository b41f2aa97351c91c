from __future__ import annotations

import numpy as np
import pytest
import torch
from ep_kernels.triton.arguments import KernelArgumentError
from ep_kernels.triton.sampling import (
    UNDRAWABLE,
    Draws,
    kept,
    log_sum,
    most_likely,
    reference_kept,
    sample,
    sample_and_cuts,
)

RULES = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (1.0, 0, 1.0, 0.0),
    "top_k": (0.7, 5, 1.0, 0.0),
    "top_k of all": (1.3, 150, 1.0, 0.0),
    "top_p": (1.0, 0, 0.6, 0.0),
    "min_p": (1.0, 0, 1.0, 0.2),
    "all at once": (1.5, 20, 0.8, 0.05),
    "one": (1.0, 1, 1.0, 0.0),
    "a top_p of nearly nothing": (1.0, 0, 1e-6, 0.0),
}


def draws_of(rules: list[tuple[float, int, float, float]], seed: int, position: int) -> Draws:
    rows = len(rules)
    return Draws.of(*zip(*rules, strict=True), [seed] * rows, [position] * rows)


def uniform(seed: int, position: int) -> float:
    """splitmix64 of both in Python's integers."""
    mask, mixed = (1 << 64) - 1, seed & ((1 << 64) - 1)
    for value in (position, 0):
        mixed = ((mixed + 0x9E3779B97F4A7C15) & mask) ^ value
        mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & mask
        mixed ^= mixed >> 31
    return (mixed >> 11) * 2.0**-53


def test_what_is_kept_and_what_is_drawn(rng: torch.Generator) -> None:
    """Every rule on one batch, and each row's token at its quantile of the sorted kept ones."""
    vocab, rules = 150, list(RULES.values())
    logits = torch.randn(len(rules), vocab, generator=rng) * 3
    seed, position = int(torch.randint(1 << 62, (), generator=rng)) - (1 << 61), 41
    draws = draws_of(rules, seed, position)
    tokens, cuts = sample_and_cuts(logits, draws)
    could = kept(logits, cuts)
    for row, rule in enumerate(rules):
        wanted = reference_kept(logits[row], *rule)
        assert could[row].nonzero().flatten().tolist() == sorted(wanted.tolist()), rule
        if wanted.numel() == vocab:  # cut by nothing: in the order of ids
            wanted = wanted.sort().values
        weights = torch.exp((logits[row].double() - logits[row].max()) / max(rule[0], 1e-5))[wanted]
        share = weights.cumsum(0) / weights.sum()
        at = int(torch.searchsorted(share, uniform(seed, position), right=True))
        near = wanted[max(0, at - 1) : at + 2].tolist()  # fp32 sums may fall on the other side
        assert int(tokens[row]) in near, rule


def test_the_numbers_are_the_routers() -> None:
    from moe_model.sampler import uniform as of_the_cpu

    seeds = [0, 1, (1 << 64) - 1, 1 << 63, 0x123456789ABCDEF]
    wanted = of_the_cpu(np.array(seeds, dtype=np.uint64), np.full(5, 7, dtype=np.uint64))
    assert [uniform(seed, 7) for seed in seeds] == wanted.tolist()
    # A flat row shows the kernel's number itself.
    flat = torch.zeros(5, 250)
    signed = torch.tensor([seed - (1 << 64) if seed >> 63 else seed for seed in seeds])
    draws = draws_of([RULES["plain"]] * 5, 0, 7)
    draws.seed.copy_(signed)
    assert sample(flat, draws).tolist() == (wanted * 250).astype(int).tolist()


def test_equal_logits_are_kept_by_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 2.0, -1.0]] * 3)
    draws = draws_of([(1.0, 3, 1.0, 0.0), (1.0, 0, 0.3, 0.0), (1.0, 5, 1.0, 0.0)], 3, 1)
    could = kept(logits, sample_and_cuts(logits, draws)[1])
    assert [row.nonzero().flatten().tolist() for row in could] == [
        [1, 2, 4],
        [1, 2],
        [0, 1, 2, 4, 5],
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_of_16_bits(dtype: torch.dtype, rng: torch.Generator) -> None:
    logits = torch.randn(2, 40, generator=rng).to(dtype)
    draws = draws_of([RULES["top_k"], RULES["greedy"]], 5, 2)
    tokens, cuts = sample_and_cuts(logits, draws)
    could = kept(logits, cuts)
    assert (
        sorted(reference_kept(logits[0], *RULES["top_k"]).tolist())
        == could[0].nonzero().flatten().tolist()
    )
    assert could[0, int(tokens[0])]
    assert int(tokens[1]) == int(logits[1].float().argmax())


def test_a_row_depends_on_itself_alone(rng: torch.Generator) -> None:
    logits = torch.randn(3, 70, generator=rng)
    rules = [RULES["all at once"], RULES["plain"], RULES["top_p"]]
    together = sample(logits, draws_of(rules, 9, 4)).tolist()
    alone = [
        sample(logits[i : i + 1].contiguous(), draws_of([rule], 9, 4)).item()
        for i, rule in enumerate(rules)
    ]
    assert together == alone


def test_rows_that_cannot_be_drawn_and_extremes() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [
            [0.0, nan, 1.0],
            [-inf, -inf, -inf],
            [0.0, inf, 1.0],
            [-inf, 5.0, -inf],
            [-3e38, 3e38, 0.0],
            [0.0, -0.0, -1e-45],
        ]
    )
    rules = [RULES["plain"], *[RULES["all at once"]] * 4, RULES["greedy"]]
    assert sample(logits, draws_of(rules, 1, 1)).tolist() == [UNDRAWABLE] * 3 + [1, 1, 0]


def test_sums_and_most_likely_tokens_are_torchs(rng: torch.Generator) -> None:
    logits = torch.randn(3, 300, generator=rng) * 30
    logits[1, 7] = -float("inf")
    logits[2] = logits[2].round()  # most are equal to others
    torch.testing.assert_close(log_sum(logits), logits.double().logsumexp(1), rtol=0, atol=1e-6)
    wanted = torch.argsort(logits, dim=1, descending=True, stable=True)[:, :40]
    assert torch.equal(most_likely(logits, 40), wanted)


def test_no_rows_and_a_vocabulary_of_one() -> None:
    one = draws_of([RULES["plain"]], 1, 1)
    nobody = Draws(*(getattr(one, name)[:0] for name in Draws.__dataclass_fields__))
    assert sample(torch.zeros(0, 5), nobody).shape == (0,)
    assert log_sum(torch.zeros(0, 5)).shape == (0,)
    assert sample(torch.zeros(1, 1), draws_of([RULES["top_p"]], 1, 1)).tolist() == [0]


def test_what_the_kernel_cannot_run_is_refused_and_named() -> None:
    draws = draws_of([RULES["plain"]], 1, 1)
    with pytest.raises(KernelArgumentError, match=r"logits is of shape \[1, 0\]"):
        sample(torch.zeros(1, 0), draws)
    with pytest.raises(
        KernelArgumentError, match=r"inverse_temperature is of shape \[1\], expected \[2\]"
    ):
        sample(torch.zeros(2, 3), draws)
    with pytest.raises(KernelArgumentError, match=r"logits is torch\.float64"):
        sample(torch.zeros(1, 3, dtype=torch.float64), draws)
