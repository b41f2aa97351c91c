from __future__ import annotations

import pytest

from mesh.messages import Sampling
from router_svc.microbatch import AffineFit, MicroBatchRule, split_chunks
from router_svc.scheduler import Chunk
from router_svc.sequence import Sequence


def chunks(*counts: int) -> list[Chunk]:
    return [
        Chunk(
            Sequence(
                request=str(i),
                owner=b"",
                trace="",
                prompt_len=count,
                tokens=[0] * count,
                sampling=Sampling(),
                stop_ids=frozenset(),
            ),
            0,
            count,
            True,
        )
        for i, count in enumerate(counts)
    ]


def test_sequences_are_divided_evenly_and_keep_their_order() -> None:
    parts = split_chunks(chunks(1, 1, 1, 1, 1), 2)
    assert [[c.sequence.request for c in part] for part in parts] == [["0", "2", "4"], ["1", "3"]]


def test_a_long_chunk_is_balanced_by_many_short_ones() -> None:
    parts = split_chunks(chunks(1, 1, 9, 1, 1, 4), 2)
    assert sorted(sum(c.count for c in part) for part in parts) == [8, 9]


@pytest.mark.parametrize(("count", "parts"), [(1, 4), (3, 4), (5, 1)])
def test_no_micro_batch_is_empty_and_none_is_lost(count: int, parts: int) -> None:
    given = chunks(*[2] * count)
    split = split_chunks(given, parts)
    assert len(split) == min(count, parts)
    assert all(split)
    assert sorted(c.sequence.request for part in split for c in part) == [
        c.sequence.request for c in given
    ]


def test_the_fit_finds_fixed_and_proportional_time() -> None:
    fit = AffineFit()
    for tokens in (4, 8, 16, 32) * 5:
        fit.add(tokens, 1000 + 50 * tokens)
    assert fit.at(64) == pytest.approx(1000 + 50 * 64, rel=1e-3)
    assert fit.at(2) == pytest.approx(1100, rel=1e-3)


def test_samples_of_one_size_are_taken_as_fixed_cost() -> None:
    fit = AffineFit()
    for _ in range(5):
        fit.add(16, 700)
    assert fit.at(8) == pytest.approx(700)


def run(rule: MicroBatchRule, tokens: int, attention: int, experts: int, steps: int) -> list[int]:
    """Steps on a machine where a token costs so much on either side, beside a fixed 10 us; a step
    of two micro-batches takes as long as the slower side."""
    chosen = []
    for _ in range(steps):
        parts = rule.choose(tokens, tokens)
        attention_ns = parts * 10_000 + tokens * attention
        experts_ns = parts * 10_000 + tokens * experts
        step_ns = attention_ns + experts_ns if parts == 1 else max(attention_ns, experts_ns)
        rule.observe(parts, tokens, attention_ns, experts_ns, step_ns)
        chosen.append(parts)
    return chosen


def teach(rule: MicroBatchRule, attention: int, experts: int) -> None:
    for tokens in (2, 4, 8):
        run(rule, tokens, attention, experts, 12)


def test_two_micro_batches_when_both_sides_take_as_long() -> None:
    rule = MicroBatchRule()
    teach(rule, 1000, 1000)
    assert set(run(rule, 64, 1000, 1000, 30)) == {2}


def test_one_when_one_side_dominates() -> None:
    rule = MicroBatchRule()
    teach(rule, 20, 3000)
    assert run(rule, 64, 20, 3000, 30).count(1) == 30


def test_one_when_fixed_costs_dominate() -> None:
    rule = MicroBatchRule()
    teach(rule, 10, 10)
    assert set(run(rule, 16, 10, 10, 30)) == {1}


def test_what_was_measured_overrules_what_was_predicted() -> None:
    rule = MicroBatchRule()
    teach(rule, 1000, 1000)
    for _ in range(40):  # the cores are shared: two micro-batches take longer than one
        parts = rule.choose(64, 64)
        step_ns = 128_000 if parts == 1 else 150_000
        rule.observe(parts, 64, 64_000, 64_000, step_ns)
    rule.observe(1, 64, 64_000, 64_000, 128_000)
    assert rule.choose(64, 64) == 1


def test_the_way_not_taken_is_tried_again_now_and_then() -> None:
    rule = MicroBatchRule()
    teach(rule, 1000, 1000)
    chosen = run(rule, 64, 1000, 1000, 200)
    assert 1 in chosen
    assert chosen.count(2) > 180


def test_a_single_sequence_is_never_split() -> None:
    rule = MicroBatchRule()
    teach(rule, 1000, 1000)
    assert rule.choose(512, 1) == 1
