from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from mesh.messages import Sampling
from moe_model.sampler import UNDRAWABLE, Sampler, logprob_rows, uniform
from router_svc.sequence import Sequence, stop_ids

VOCAB = 200


def sequence(sampling: Sampling, prompt: tuple[int, ...] = (3,), output: tuple[int, ...] = ()):
    return Sequence(
        request="r",
        owner=b"g",
        trace="t",
        prompt_len=len(prompt),
        tokens=[*prompt, *output],
        sampling=sampling,
        stop_ids=stop_ids(sampling, (1,)),
    )


def draw(logits: torch.Tensor, *samplings: Sampling, **history) -> list[int]:
    rows = logits.repeat(len(samplings), 1)
    return Sampler(logits.shape[-1]).draw(rows, [sequence(s, **history) for s in samplings])[0]


def logits_of(seed: int, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


def plain_choice(logits: torch.Tensor, s: Sampling, position: int) -> int:
    """The same definition, one row and one step at a time, in float64."""
    number = float(uniform(np.array([s.seed], np.uint64), np.array([position], np.uint64))[0])
    probs = torch.softmax(logits / s.temperature, -1).double().tolist()
    if not 0 < s.top_k < len(probs) and s.top_p >= 1.0 and s.min_p == 0.0:
        order = list(range(len(probs)))
    else:
        scores = logits.tolist()
        order = sorted(range(len(probs)), key=lambda i: (-scores[i], i))
        floor = s.min_p * max(probs)
        order = [i for i in order if probs[i] >= floor][: s.top_k or None]
        total = sum(probs[i] for i in order)
        kept, mass = [], 0.0
        for i in order:
            if kept and mass >= s.top_p * total:
                break
            kept.append(i)
            mass += probs[i]
        order = kept
    target = number * sum(probs[i] for i in order)
    for i in order:
        target -= probs[i]
        if target < 0:
            return i
    return order[-1]


FILTERS = [
    {},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 0.0001},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 500},
    {"min_p": 0.05},
    {"min_p": 0.0001},
    {"top_k": 30, "top_p": 0.8},
    {"top_p": 0.8, "min_p": 0.02},
    {"top_k": 10, "top_p": 0.9, "min_p": 0.001},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
def test_draws_follow_the_definition(filters: dict, scale: float) -> None:
    for seed in range(25):
        logits = logits_of(seed, scale=scale)
        sampling = Sampling(temperature=0.7, seed=seed, **filters)
        assert draw(logits, sampling) == [plain_choice(logits, sampling, 1)]


@pytest.mark.parametrize("vocab", [5, 64, 65, 3001])
def test_vocabularies_of_any_size(vocab: int) -> None:
    for seed in range(10):
        logits = logits_of(seed, vocab)
        for filters in ({}, {"top_p": 0.9}, {"top_k": 7}):
            sampling = Sampling(seed=seed, **filters)
            assert draw(logits, sampling) == [plain_choice(logits, sampling, 1)]


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    samplings = [
        Sampling(temperature=t, seed=seed, repetition_penalty=r, logprobs=n, **filters)
        for seed, filters in enumerate(FILTERS)
        for t, r, n in ((0.0, 1.0, -1), (0.9, 1.0, 2), (1.5, 1.2, -1))
    ]
    rows = torch.stack([logits_of(i) for i in range(len(samplings))])
    sequences = [sequence(s, prompt=(3, 4, 5)) for s in samplings]
    together = Sampler(VOCAB).draw(rows.clone(), sequences)
    alone = Sampler(VOCAB)
    for i, one in enumerate(sequences):
        tokens, logprobs = alone.draw(rows[i : i + 1].clone(), [one])
        assert tokens[0] == together[0][i]
        assert logprobs[0] == together[1][i]


def test_the_number_drawn_depends_on_seed_and_position_alone() -> None:
    seeds = np.array([1, 1, 2, 2**64 - 1], dtype=np.uint64)
    positions = np.array([5, 6, 5, 5], dtype=np.uint64)
    numbers = uniform(seeds, positions)
    assert len(set(numbers.tolist())) == 4
    for i in range(4):
        assert uniform(seeds[i : i + 1], positions[i : i + 1])[0] == numbers[i]


def test_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    count = 20_000
    ramp = np.arange(count, dtype=np.uint64)
    for numbers in (uniform(np.full_like(ramp, 7), ramp), uniform(ramp, np.full_like(ramp, 7))):
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        histogram = np.histogram(numbers, bins=20, range=(0, 1))[0]
        chi_squared = ((histogram - count / 20) ** 2 / (count / 20)).sum()
        assert chi_squared < 50  # 19 degrees of freedom: less than once in 10,000 runs
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_frequencies_match_probabilities() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    count = 4000
    rows = [sequence(Sampling(seed=seed)) for seed in range(count)]
    tokens, _ = Sampler(5).draw(logits.repeat(count, 1), rows)
    seen = Counter(tokens)
    for token, p in enumerate(torch.softmax(logits, -1).tolist()):
        assert abs(seen[token] / count - p) < 0.035


def test_temperature_zero_takes_the_best_token() -> None:
    logits = logits_of(1)
    assert draw(logits, Sampling(temperature=0.0, top_p=0.1, seed=9)) == [int(logits.argmax())]


def test_negative_and_huge_seeds_are_taken() -> None:
    logits = logits_of(1)
    tokens = draw(logits, Sampling(seed=-1), Sampling(seed=2**64 - 1), Sampling(seed=2**70 + 3))
    assert tokens[0] == tokens[1]
    assert all(0 <= t < VOCAB for t in tokens)


def test_logit_bias_adds_and_accumulates() -> None:
    logits = torch.zeros(VOCAB)
    bias = ((17, 3.0), (17, 3.0), (18, 5.0))
    assert draw(logits, Sampling(temperature=0.0, logit_bias=bias)) == [17]


def test_repetition_penalty_covers_prompt_and_output_once_each() -> None:
    logits = torch.full((VOCAB,), -5.0)
    logits[3], logits[8], logits[9] = 4.0, 3.9, 2.5
    sampling = Sampling(temperature=0.0, repetition_penalty=1.5)
    assert draw(logits, sampling, prompt=(3, 3), output=(8,)) == [3]
    assert draw(logits, sampling, prompt=(3, 8), output=()) == [3]
    logits[9] = 2.7
    assert draw(logits, sampling, prompt=(3,), output=(8, 8)) == [9]
    negative = torch.full((VOCAB,), -5.0)
    negative[3], negative[8] = -1.0, -1.2
    assert draw(negative, sampling, prompt=(3,), output=()) == [8]


def test_presence_and_frequency_penalties_cover_output_only() -> None:
    logits = torch.zeros(VOCAB)
    logits[3], logits[8], logits[9] = 3.0, 2.9, 2.0
    presence = Sampling(temperature=0.0, presence_penalty=0.5)
    assert draw(logits, presence, prompt=(3,), output=()) == [3]
    assert draw(logits, presence, prompt=(9,), output=(3,)) == [8]
    assert draw(logits, presence, prompt=(9,), output=(3, 3, 3, 8)) == [3]
    frequency = Sampling(temperature=0.0, frequency_penalty=0.5)
    assert draw(logits, frequency, prompt=(9,), output=(3, 3, 3, 8)) == [8]


def test_stop_tokens_are_banned_before_min_tokens() -> None:
    logits = torch.zeros(VOCAB)
    logits[1], logits[5], logits[6] = 9.0, 8.0, 7.0
    sampling = Sampling(temperature=0.0, min_tokens=2, stop_token_ids=(5,))
    assert draw(logits, sampling, output=(4,)) == [6]
    assert draw(logits, sampling, output=(4, 4)) == [1]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = logits_of(4)
    sampling = Sampling(temperature=0.3, top_k=3, logprobs=2, logit_bias=((9, 50.0),), seed=1)
    tokens, logprobs = Sampler(VOCAB).draw(logits.clone().unsqueeze(0), [sequence(sampling)])
    expected = torch.log_softmax(logits, -1)
    found = logprobs[0]
    assert found is not None
    assert tokens == [9]
    assert found.token == 9
    assert found.logprob == pytest.approx(float(expected[9]), abs=1e-5)
    assert [t for t, _ in found.top] == expected.topk(2).indices.tolist()


def test_the_chosen_token_has_the_same_bits_as_its_alternative() -> None:
    rows = torch.stack([logits_of(i) for i in range(20)])
    sequences = [sequence(Sampling(temperature=0.0, logprobs=3)) for _ in range(20)]
    tokens, logprobs = Sampler(VOCAB).draw(rows, sequences)
    for token, found in zip(tokens, logprobs, strict=True):
        assert found is not None
        assert found.top[0] == (token, found.logprob)
        assert found.logprob == max(value for _, value in found.top)


def test_each_row_gets_as_many_alternatives_as_it_wants() -> None:
    logprobs = torch.log_softmax(torch.stack([logits_of(i) for i in range(3)]), -1)
    none, chosen, more = logprob_rows(logprobs, [4, 5, 6], [-1, 0, 7])
    assert none is None
    assert chosen is not None
    assert chosen.top == ()
    assert more is not None
    assert len(more.top) == 7


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_row_is_reported_and_spares_the_others(broken: float) -> None:
    rows = torch.stack([logits_of(1), logits_of(2), logits_of(3)])
    expected = Sampler(VOCAB).draw(rows.clone(), [sequence(Sampling(top_p=0.9))] * 3)[0]
    rows[1, 5] = broken
    tokens, _ = Sampler(VOCAB).draw(rows, [sequence(Sampling(top_p=0.9))] * 3)
    assert tokens == [expected[0], UNDRAWABLE, expected[2]]


def test_a_row_that_bans_everything_is_undrawable() -> None:
    rows = torch.full((1, 3), -float("inf"))
    assert Sampler(3).draw(rows, [sequence(Sampling())])[0] == [UNDRAWABLE]


def test_parameters_follow_a_batch_that_changes() -> None:
    sampler = Sampler(VOCAB)
    logits = logits_of(1)
    greedy, hot = sequence(Sampling(temperature=0.0)), sequence(Sampling(temperature=9.0, seed=3))
    first = sampler.draw(torch.stack([logits, logits]), [greedy, hot])[0]
    swapped = sampler.draw(torch.stack([logits, logits]), [hot, greedy])[0]
    assert swapped == first[::-1]
    hot.tokens.append(7)  # another position: another number
    moved = [sampler.draw(logits.unsqueeze(0), [hot])[0][0] for _ in range(2)]
    assert moved[0] == moved[1] == plain_choice(logits, hot.sampling, 2)


def test_order_is_that_of_logits_where_probabilities_are_equal() -> None:
    logits = torch.tensor([1.0, 1.0000001, 0.0])
    assert torch.softmax(logits / 100, 0)[:2].unique().numel() == 1
    assert draw(logits, Sampling(temperature=100.0, top_k=1)) == [1]
    zeros = torch.tensor([-1.0, -0.0, 0.0, -0.0])
    assert draw(zeros, *[Sampling(top_k=1, seed=seed) for seed in range(3)]) == [1, 1, 1]


def test_the_lowest_of_equal_tokens_is_the_greedy_one() -> None:
    logits = logits_of(5, 3001)
    logits[[77, 900, 2999]] = 50.0
    assert draw(logits, Sampling(temperature=0.0)) == [77]


def test_a_stop_token_beyond_the_vocabulary_bans_nothing() -> None:
    logits = torch.zeros(VOCAB)
    logits[1], logits[6] = 9.0, 7.0
    banned = Sampling(temperature=0.0, min_tokens=2, stop_token_ids=(VOCAB + 4,))
    assert draw(logits, banned) == [6]


def test_known_tokens_are_scored() -> None:
    logits = torch.stack([logits_of(i) for i in range(2)])
    wanted = torch.log_softmax(logits, -1)
    found = Sampler(VOCAB).score(logits, [4, 5], 1)
    assert [one.token for one in found] == [4, 5]
    assert [one.logprob for one in found] == [float(wanted[0, 4]), float(wanted[1, 5])]
    assert [len(one.top) for one in found] == [1, 1]
