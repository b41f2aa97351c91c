"""A device draws what the CPU draws, from the same logits, and only tokens come down."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch
from ep_kernels.triton.device import Device, open_device

from mesh.messages import Sampling
from moe_model.device.sampler import DeviceSampler
from moe_model.sampler import UNDRAWABLE, Sampler
from tests.support.draws import Row, drawable, some_logits, some_row

INF = float("inf")


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("interpreter")


def sampler_of(device: Device, vocab: int) -> DeviceSampler:
    return DeviceSampler(vocab, device, device.stream())


@pytest.mark.parametrize(("vocab", "rows"), [(1, 4), (7, 16), (128, 16), (301, 16), (1031, 3)])
def test_a_seed_draws_the_cpus_token_whatever_is_asked_for(
    vocab: int, rows: int, device: Device, rng: torch.Generator
) -> None:
    dice = random.Random(int(torch.randint(1 << 40, (), generator=rng)))
    sequences = [some_row(dice, vocab) for _ in range(rows)]
    logits = torch.stack([some_logits(dice, vocab, rng) for _ in range(rows)])
    sampler = sampler_of(device, vocab)
    tokens, logprobs = sampler.draw(logits.clone(), sequences)
    of_the_cpu, scored = Sampler(vocab).draw(logits.clone(), sequences)
    decided = 0
    for i, sequence in enumerate(sequences):
        allowed = drawable(logits[i], sequence)
        assert {tokens[i], of_the_cpu[i]} <= allowed, (i, sequence.sampling)
        decided += len(allowed) == 1
        ours, theirs = logprobs[i], scored[i]
        assert (ours is None) == (theirs is None) == (sequence.sampling.logprobs < 0)
        if ours is None or theirs is None or tokens[i] == UNDRAWABLE:
            continue
        raw = logits[i].log_softmax(0)
        assert ours.token == tokens[i]
        assert ours.logprob == pytest.approx(float(raw[tokens[i]]), abs=1e-5)
        values = [value for _, value in theirs.top]
        assert [value for _, value in ours.top] == pytest.approx(values, abs=1e-5)
        falling = torch.argsort(logits[i], descending=True, stable=True)[: len(values)]
        assert [token for token, _ in ours.top] == falling.tolist()
        assert all(value == ours.logprob for token, value in ours.top if token == ours.token)
    assert decided >= rows - 2, "nearly all draws are decided"
    # What a row yields is its own, to the last bit.
    for i in range(0, rows, 5):
        alone = sampler.draw(logits[i : i + 1].clone(), sequences[i : i + 1])
        assert alone == ([tokens[i]], [logprobs[i]])


def test_equal_logits_draw_the_same_tokens_exactly(device: Device) -> None:
    """Sums of equal weights have no rounding: not even the last bit may differ."""
    vocab = 256
    sequences = [
        Row([3], 1, Sampling(seed=seed, **filters))
        for seed in range(3)
        for filters in ({}, {"top_k": 100}, {"top_p": 0.25}, {"min_p": 1.0}, {"temperature": 0.0})
    ]
    logits = torch.zeros(len(sequences), vocab)
    logits[:, ::2] = -0.0
    wanted = Sampler(vocab).draw(logits.clone(), sequences)[0]
    assert sampler_of(device, vocab).draw(logits, sequences)[0] == wanted
    assert wanted[4::5] == [0, 0, 0]


def test_what_comes_down_are_tokens_and_the_log_probabilities_that_were_asked_for(
    device: Device,
) -> None:
    vocab = 200
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(1))
    plain = [Row([i], 1, Sampling(seed=i, repetition_penalty=1.0 + i)) for i in range(5)]
    sampler, before = sampler_of(device, vocab), device.copied.down
    sampler.draw(logits.clone(), plain)
    assert device.copied.down - before == 5 * 4
    asked = [msgspec.structs.replace(row.sampling, logprobs=i) for i, row in enumerate(plain[:3])]
    some = [Row(row.tokens, 1, one) for row, one in zip(plain[:3], asked, strict=True)]
    before = device.copied.down
    found = sampler.draw(logits.clone(), [*plain[3:], *some])[1]
    assert [None if one is None else len(one.top) for one in found] == [None, None, 0, 1, 2]
    assert device.copied.down - before == 5 * 4 + 3 * (4 + 2 * 12)


def test_rows_that_cannot_be_drawn_are_told_and_spare_the_others(device: Device) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    sequences = [Row([2], 1, Sampling(seed=i, top_p=0.9, logprobs=1)) for i in range(5)]
    wanted = Sampler(40).draw(logits.clone(), sequences)
    logits[0, 3], logits[2, 5], logits[4] = float("nan"), INF, -INF
    tokens, _ = sampler_of(device, 40).draw(logits, sequences)
    assert tokens == [UNDRAWABLE, wanted[0][1], UNDRAWABLE, wanted[0][3], UNDRAWABLE]


def test_parameters_follow_a_batch_that_changes_and_positions_every_step(device: Device) -> None:
    sampler, logits = sampler_of(device, 90), torch.randn(90).repeat(2, 1)
    greedy, hot = (Row([4], 1, Sampling(temperature=t, seed=3)) for t in (0.0, 9.0))
    first = sampler.draw(logits.clone(), [greedy, hot])[0]
    assert sampler.draw(logits.clone(), [hot, greedy])[0] == first[::-1]
    drawn = set()
    for _ in range(5):
        hot.tokens.append(7)
        drawn.add(sampler.draw(logits[:1].clone(), [hot])[0][0])
    assert len(drawn) > 1


def test_known_tokens_are_scored_as_on_the_cpu(device: Device) -> None:
    logits = torch.randn(70, 60, generator=torch.Generator().manual_seed(3)) * 4
    tokens = [i % 60 for i in range(70)]
    for alternatives in (0, 2):
        found = sampler_of(device, 60).score(logits, tokens, alternatives)
        wanted = Sampler(60).score(logits, tokens, alternatives)
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours.token, len(ours.top)) == (theirs.token, alternatives)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
