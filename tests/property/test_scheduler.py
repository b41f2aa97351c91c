"""The scheduler against a model of the KV cache: budget, sharing, leaks, starvation."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mesh.messages import Sampling
from router_svc.blocks import BlockManager
from router_svc.scheduler import InadmissibleError, Scheduler
from router_svc.sequence import Sequence

SIZE, BLOCKS, BUDGET, RUNNING, WAITING, CONTEXT = 4, 14, 9, 4, 6, 80


class Cache:
    """Block memory as the model would see it: position -> token, written chunk by chunk."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def clear(self, blocks: list[int]) -> None:
        for block in blocks:
            for row in range(SIZE):
                self.slots.pop((block, row), None)

    def run(self, sequence: Sequence, start: int, count: int) -> None:
        for position in range(start, start + count):
            key = (sequence.block_table[position // SIZE], position % SIZE)
            self.slots[key] = tuple(sequence.tokens[: position + 1])
        for position in range(start + count):  # attention reads all that came before
            key = (sequence.block_table[position // SIZE], position % SIZE)
            assert self.slots.get(key) == tuple(sequence.tokens[: position + 1]), (
                f"{sequence.request} reads a foreign or unwritten token at {position}"
            )
        last = start + count - 1
        for row in range(last % SIZE + 1, SIZE):  # read behind a mask
            key = (sequence.block_table[last // SIZE], row)
            assert key not in self.slots, f"{sequence.request} reads what another one left"


def next_token(sequence: Sequence) -> int:
    return (sum(sequence.tokens) + len(sequence.tokens)) % 3


def sequence(name: str, prompt: list[int], max_tokens: int, priority: int = 0) -> Sequence:
    return Sequence(
        request=name,
        owner=b"g",
        trace=name,
        prompt_len=len(prompt),
        tokens=list(prompt),
        sampling=Sampling(max_tokens=max_tokens),
        stop_ids=frozenset(),
        priority=priority,
    )


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    alone = sequence("alone", prompt, max_tokens)
    for _ in range(max_tokens):
        alone.tokens.append(next_token(alone))
    return alone.tokens[len(prompt) :]


class Engine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(
            BlockManager(BLOCKS, SIZE),
            max_step_tokens=BUDGET,
            max_running=RUNNING,
            max_waiting=WAITING,
            max_context=CONTEXT,
        )
        self.cache = Cache()
        self.live: dict[str, tuple[list[int], int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=40),
        max_tokens=st.integers(0, 20),
        priority=st.integers(0, 2),
    )
    def submit(self, prompt: list[int], max_tokens: int, priority: int) -> None:
        name = f"r{self.count}"
        self.count += 1
        cached = max(len(prompt), len(prompt) + max_tokens - 1)
        fits = -(-cached // SIZE) <= BLOCKS and len(prompt) + max_tokens <= CONTEXT
        room = self.scheduler.num_waiting < WAITING
        if not (fits and room):
            with pytest.raises(InadmissibleError) as caught:
                self.scheduler.add(sequence(name, prompt, max_tokens, priority))
            assert caught.value.retry == fits
            return
        self.scheduler.add(sequence(name, prompt, max_tokens, priority))
        self.live[name] = (prompt, max_tokens)
        self.outputs[name] = []

    @rule(pick=st.integers(0, 100))
    @precondition(lambda self: self.live)
    def cancel(self, pick: int) -> None:
        name = sorted(self.live)[pick % len(self.live)]
        del self.live[name]
        dropped = self.scheduler.drop(name)
        assert dropped is not None
        assert not dropped.block_table

    @rule(fail=st.integers(0, 30), leaver=st.integers(0, 30))
    def step(self, fail: int, leaver: int = 1000) -> None:
        work = self.scheduler.schedule()
        self.cache.clear(work.tails)
        if not work.chunks:
            assert not self.live, "work is left and nothing runs"
            return
        assert sum(chunk.count for chunk in work.chunks) <= BUDGET, "budget exceeded"
        assert all(chunk.count > 0 for chunk in work.chunks)
        assert len({chunk.sequence.request for chunk in work.chunks}) == len(work.chunks)
        drawn = {}
        for chunk in work.chunks:
            self.cache.run(chunk.sequence, chunk.start, chunk.count)
            if chunk.draws:
                drawn[chunk.sequence.request] = next_token(chunk.sequence)
        if fail < len(work.chunks):  # its micro-batch failed: nothing of the chunk counts
            name = work.chunks[fail].sequence.request
            self.scheduler.drop(name, distrust=True)
            del self.live[name]
        if leaver < len(self.live):  # cancelled while the step runs
            name = sorted(self.live)[leaver]
            self.scheduler.drop(name)
            del self.live[name]
        for outcome in self.scheduler.finish_step(work, drawn):
            name = outcome.sequence.request
            if outcome.token is not None:
                self.outputs[name].append(outcome.token)
            if outcome.finish is not None:
                prompt, max_tokens = self.live.pop(name)
                assert self.outputs[name] == expected_output(prompt, max_tokens)

    @invariant()
    def consistent(self) -> None:
        self.scheduler.check()
        assert {s.request for s in self.scheduler} == set(self.live)

    def teardown(self) -> None:
        for _ in range(4000):
            if not self.live:
                break
            self.step(fail=1000)
        assert not self.live, "a sequence starves"
        self.scheduler.check()
        blocks = self.scheduler.blocks
        assert blocks.num_free == blocks.num_blocks, "blocks leaked"


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    budget=st.integers(1, 12),
)
@settings(deadline=None, max_examples=60)
def test_equal_priorities_finish_their_prompts_in_order_of_arrival(
    lengths: list[int], budget: int
) -> None:
    scheduler = Scheduler(
        BlockManager(40, SIZE), max_step_tokens=budget, max_running=5, max_waiting=5, max_context=64
    )
    for index, length in enumerate(lengths):
        scheduler.add(sequence(str(index), [index] * length, 1))
    finished = []
    while len(scheduler):
        work = scheduler.schedule()
        drawn = {c.sequence.request: 0 for c in work.chunks if c.draws}
        finished += [int(o.sequence.request) for o in scheduler.finish_step(work, drawn)]
    assert finished == sorted(finished)
