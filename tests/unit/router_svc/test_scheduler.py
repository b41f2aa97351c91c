from __future__ import annotations

import zlib

import pytest

from mesh.messages import Sampling
from router_svc.blocks import BlockManager
from router_svc.scheduler import InadmissibleError, Outcome, Scheduler, StepWork
from router_svc.sequence import Sequence


def scheduler(
    *,
    blocks: int = 32,
    size: int = 4,
    budget: int = 16,
    running: int = 8,
    waiting: int = 8,
    context: int = 256,
) -> Scheduler:
    return Scheduler(
        BlockManager(blocks, size),
        max_step_tokens=budget,
        max_running=running,
        max_waiting=waiting,
        max_context=context,
    )


def sequence(name: str, prompt: int | list[int], max_tokens: int = 8, **more: int) -> Sequence:
    """``prompt`` as a length makes tokens that no other name shares."""
    first = 100 * (1 + zlib.crc32(name.encode()) % 1000)
    tokens = [first + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    priority = more.pop("priority", 0)
    return Sequence(
        request=name,
        owner=b"g",
        trace=name,
        prompt_len=len(tokens),
        tokens=list(tokens),
        sampling=Sampling(max_tokens=max_tokens, **more),
        stop_ids=frozenset({99}),
        priority=priority,
    )


def planned(work: StepWork) -> list[tuple[str, int, int]]:
    return [(c.sequence.request, c.start, c.count) for c in work.chunks]


def step(s: Scheduler, token: int = 7) -> tuple[StepWork, list[Outcome]]:
    work = s.schedule()
    drawn = {c.sequence.request: token for c in work.chunks if c.draws}
    outcomes = s.finish_step(work, drawn)
    s.check()
    return work, outcomes


def test_a_prompt_is_computed_in_chunks_of_the_budget_and_then_decodes() -> None:
    s = scheduler(budget=5)
    s.add(sequence("a", 12))
    assert planned(step(s)[0]) == [("a", 0, 5)]
    assert planned(step(s)[0]) == [("a", 5, 5)]
    work, outcomes = step(s)
    assert planned(work) == [("a", 10, 2)]
    assert [o.token for o in outcomes] == [7]
    assert planned(step(s)[0]) == [("a", 12, 1)]


def test_decodes_come_first_and_prompts_take_what_is_left() -> None:
    s = scheduler(budget=6)
    s.add(sequence("long", 20, priority=1))
    s.add(sequence("short", 2))
    step(s)
    step(s)
    work, _ = step(s)  # the long prompt, then the short one, got the budget in their order
    assert planned(work) == [("long", 12, 6)]
    step(s)  # the rest of the long one, and all of the short one
    s.add(sequence("new", 9))
    assert planned(step(s)[0]) == [("long", 20, 1), ("short", 2, 1), ("new", 0, 4)]


def test_the_queue_is_served_by_priority_then_arrival() -> None:
    s = scheduler(running=1)
    for name, priority in (("low", 0), ("first", 5), ("second", 5)):
        s.add(sequence(name, 2, max_tokens=1, priority=priority))
    order = []
    while len(s):
        order += [o.sequence.request for o in step(s)[1] if o.finish]
    assert order == ["first", "second", "low"]


def test_a_prompt_that_does_not_fit_yet_holds_back_those_behind_it() -> None:
    s = scheduler(blocks=6, size=4, budget=64)
    s.add(sequence("a", 15, max_tokens=2))
    s.add(sequence("big", 16, max_tokens=2))
    s.add(sequence("small", 1, max_tokens=1))
    steps = [[name for name, _, _ in planned(step(s)[0])] for _ in range(3)]
    assert steps == [["a"], ["a"], ["big", "small"]]


def test_when_blocks_run_out_the_newest_of_the_lowest_priority_goes() -> None:
    s = scheduler(blocks=6, size=2, budget=64)
    s.add(sequence("low", 2, max_tokens=7))
    s.add(sequence("old", 2, max_tokens=7, priority=1))
    s.add(sequence("new", 2, max_tokens=7, priority=1))
    preempted = []
    while len(s):
        preempted += [v.request for v in step(s)[0].preempted]
    assert preempted[:2] == ["low", "new"]
    assert "old" not in preempted
    assert s.blocks.num_free == s.blocks.num_blocks


def test_a_preempted_sequence_goes_on_from_its_tokens() -> None:
    s = scheduler(blocks=4, size=2, budget=64)
    s.add(sequence("a", 3, max_tokens=5))
    s.add(sequence("b", 3, max_tokens=5))
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    token = 10
    while len(s):
        _, outcomes = step(s, token)
        for outcome in outcomes:
            if outcome.token is not None:
                tokens[outcome.sequence.request].append(outcome.token)
        token += 1
    assert s.num_preemptions > 0
    assert len(tokens["a"]) == len(tokens["b"]) == 5
    assert all(ts == sorted(set(ts)) for ts in tokens.values()), "a token came twice"


def test_a_victim_that_was_to_run_in_this_step_does_not() -> None:
    s = scheduler(blocks=6, size=2, budget=4)
    s.add(sequence("low", 2, max_tokens=8))
    step(s)
    s.add(sequence("high", 8, max_tokens=1, priority=1))
    work, _ = step(s)
    assert planned(work) == [("low", 2, 1), ("high", 0, 3)]
    step(s)
    work, _ = step(s)  # the decode of "low" took the last block that "high" needs
    assert [v.request for v in work.preempted] == ["low"]
    assert planned(work) == [("high", 6, 2)]


def test_what_can_never_fit_is_refused_up_front() -> None:
    s = scheduler(blocks=4, size=4, context=64)
    with pytest.raises(InadmissibleError, match="17 tokens need 5 KV blocks") as caught:
        s.add(sequence("a", 10, max_tokens=8))
    assert not caught.value.retry
    s.add(sequence("fits", 10, max_tokens=7))
    with pytest.raises(InadmissibleError, match="exceed the context of 64"):
        s.add(sequence("b", 60, max_tokens=5))
    with pytest.raises(InadmissibleError, match="no token"):
        s.add(sequence("c", [], max_tokens=5))
    with pytest.raises(InadmissibleError, match="already here"):
        s.add(sequence("fits", 2))


def test_a_full_queue_asks_to_try_again() -> None:
    s = scheduler(waiting=1)
    s.add(sequence("a", 2))
    with pytest.raises(InadmissibleError) as caught:
        s.add(sequence("b", 2))
    assert caught.value.retry
    step(s)
    s.add(sequence("b", 2))


def test_dropping_frees_blocks_wherever_the_sequence_is() -> None:
    s = scheduler(running=1)
    s.add(sequence("runs", 9))
    s.add(sequence("waits", 9))
    step(s)
    assert s.blocks.num_free < s.blocks.num_blocks
    assert s.drop("runs") is not None
    assert s.drop("waits") is not None
    assert s.drop("runs") is None
    assert s.blocks.num_free == s.blocks.num_blocks
    assert step(s)[0].chunks == []


def test_a_failed_chunk_counts_for_nothing_and_spares_the_others() -> None:
    s = scheduler()
    s.add(sequence("bad", 9))
    s.add(sequence("good", 3))
    work = s.schedule()
    s.drop("bad")
    outcomes = s.finish_step(work, {"good": 7})
    s.check()
    assert [o.sequence.request for o in outcomes] == ["good"]
    again = sequence("again", 9)
    again.tokens = list(work.chunks[0].sequence.tokens)
    s.add(again)
    assert ("again", 0, 9) in planned(s.schedule())


def test_a_common_prefix_is_computed_once() -> None:
    s = scheduler()
    shared = list(range(100, 110))
    s.add(sequence("a", [*shared, 1]))
    step(s)
    s.add(sequence("b", [*shared, 2, 3]))
    work, _ = step(s)
    assert ("b", 8, 4) in planned(work)
    b = next(c.sequence for c in work.chunks if c.sequence.request == "b")
    a = next(c.sequence for c in work.chunks if c.sequence.request == "a")
    assert b.block_table[:2] == a.block_table[:2]
    assert b.cached_tokens == 8
    assert (s.prefix_queries, s.prefix_hits) == (11 + 12, 8)


def test_at_least_the_last_token_of_a_known_prompt_is_computed() -> None:
    s = scheduler()
    prompt = list(range(100, 108))
    for name in ("a", "b"):
        s.add(sequence(name, prompt, max_tokens=1))
        work, outcomes = step(s)
        assert outcomes[0].token == 7
    assert planned(work) == [("b", 4, 4)]


def test_output_blocks_are_found_by_a_follow_up_prompt() -> None:
    s = scheduler()
    s.add(sequence("a", [100, 101, 102], max_tokens=6))
    while len(s):
        _, outcomes = step(s)
    s.add(sequence("b", [*outcomes[0].sequence.tokens, 5]))
    assert planned(s.schedule())[0][1] == 8


def test_prompt_logprobs_are_never_taken_from_the_cache() -> None:
    s = scheduler()
    prompt = list(range(100, 109))
    s.add(sequence("a", prompt, max_tokens=1))
    step(s)
    s.add(sequence("b", prompt, max_tokens=1, prompt_logprobs=1))
    assert planned(s.schedule()) == [("b", 0, 9)]


def test_no_tokens_asked_for_means_the_prompt_only() -> None:
    s = scheduler()
    s.add(sequence("a", 6, max_tokens=0))
    work, outcomes = step(s)
    assert not work.chunks[0].draws
    assert [(o.token, o.finish) for o in outcomes] == [(None, "length")]
    assert s.blocks.num_free == s.blocks.num_blocks


def test_output_of_another_router_counts() -> None:
    s = scheduler()
    moved = sequence("a", 4, max_tokens=3)
    moved.tokens += [50, 51]
    s.add(moved)
    work, outcomes = step(s)
    assert planned(work) == [("a", 0, 6)]
    assert [(o.token, o.finish) for o in outcomes] == [(7, "length")]


def test_a_stop_token_ends_a_sequence_and_is_not_reported_as_output() -> None:
    s = scheduler()
    s.add(sequence("a", 4))
    _, outcomes = step(s, token=99)
    assert [(o.token, o.finish, o.stop_token) for o in outcomes] == [(None, "stop", 99)]
    assert len(s) == 0


def test_the_last_block_of_whoever_gets_new_ones_is_to_be_cleared() -> None:
    s = scheduler(size=4, budget=10)
    first, second = sequence("a", 9, max_tokens=6), sequence("b", 3)
    s.add(first)
    s.add(second)
    work, _ = step(s)
    assert work.tails == [first.block_table[-1], second.block_table[-1]]
    tails = []
    while len(s) == 2:
        before = list(first.block_table)
        work, _ = step(s)
        grown = first.block_table[len(before) :]
        assert not grown or grown[-1] in work.tails
        tails += work.tails
    assert tails, "nobody grew"


def test_blocks_of_a_distrusted_sequence_are_not_found_again() -> None:
    prompt = list(range(12))
    s = scheduler(size=4, budget=64)
    s.add(sequence("bad", prompt))
    s.add(sequence("other", prompt))
    step(s)
    s.drop("bad", distrust=True)
    s.check()
    s.drop("other")
    s.check()
    s.add(sequence("next", prompt))
    assert planned(s.schedule()) == [("next", 0, 12)]


def test_sequences_may_come_and_go_while_a_step_runs() -> None:
    s = scheduler()
    s.add(sequence("a", 5))
    s.add(sequence("b", 5))
    work = s.schedule()
    gone = s.drop("a")
    s.add(sequence("a", 3))  # another one by the same name
    s.add(sequence("c", 3))
    assert gone is not None
    assert not s.holds(gone)
    outcomes = s.finish_step(work, {"a": 7, "b": 7})
    assert [o.sequence.request for o in outcomes] == ["b"]
    s.check()
    assert ("a", 0, 3) in planned(step(s)[0])
