"""Continuous batching: which tokens of which sequences run in the next step.

Pure: no clock, no tensors. One step is ``schedule()`` followed by ``finish_step()``; between the
two halves ``add`` and ``drop`` may be called. Each step takes, within its token budget,

1. one token of every sequence that is decoding,
2. the next chunk of every sequence whose prompt is partly computed,
3. prompts from the queue, as long as all their blocks fit beside what the others hold,

each in order of priority (larger first), then arrival. When blocks run out, the last sequence in
that order loses its blocks and goes back to the queue, to be computed again from its tokens; so
the first one always gets what it needs, and everybody becomes first in the end.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mesh.messages import FinishReason
from router_svc.blocks import BlockManager
from router_svc.sequence import Sequence


class InadmissibleError(Exception):
    """The router cannot take a sequence. ``retry`` says whether trying later can help; the
    sequence has not been queued.
    """

    def __init__(self, reason: str, *, retry: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry = retry


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, start + count)`` of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    count: int
    reaches_end: bool
    """The chunk ends with the sequence's last token, so its last row predicts a new one."""

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def decodes(self) -> bool:
        """It is one token that the model made, and no part of a prompt."""
        return self.count == 1 and self.start >= self.sequence.prompt_len

    @property
    def draws(self) -> bool:
        """A token is to be drawn from the chunk's last row."""
        return self.reaches_end and self.sequence.num_output < self.sequence.sampling.max_tokens


@dataclass(slots=True)
class StepWork:
    """What one step computes. ``preempted`` sequences lost their blocks to make room.

    ``tails`` are the last blocks of sequences that were given new ones: clear them before the
    step, because rows that it does not write are read behind a mask.
    """

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    tails: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did for one sequence whose last token was computed."""

    sequence: Sequence
    token: int | None
    """The new token, or None when nothing was drawn or a stop token was."""
    finish: FinishReason | None
    stop_token: int = -1


def _order(sequence: Sequence) -> tuple[int, int]:
    return -sequence.priority, sequence.arrival


class Scheduler:
    """The queue, the running batch and their blocks."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_step_tokens: int,
        max_running: int,
        max_waiting: int,
        max_context: int,
    ) -> None:
        self.blocks = blocks
        self.max_step_tokens = max_step_tokens
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.max_context = max_context
        self._running: list[Sequence] = []  # both kept in ``_order``
        self._waiting: list[Sequence] = []
        self._by_request: dict[str, Sequence] = {}
        self._arrivals = 0
        self._tails: list[int] = []  # of the step that is being planned
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        """Prompt tokens looked up in, and found in, the prefix cache."""

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_request.values())

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; raises ``InadmissibleError`` if it is a duplicate, could never fit, or
        the queue is full.
        """
        length = max(len(sequence.tokens), sequence.prompt_len + sequence.sampling.max_tokens)
        needed = self.blocks.blocks_for(sequence.final_cached_len)
        if sequence.request in self._by_request:
            raise InadmissibleError(f"request {sequence.request} is already here", retry=False)
        if not sequence.tokens:
            raise InadmissibleError("the prompt has no token", retry=False)
        if length > self.max_context:
            raise InadmissibleError(
                f"prompt of {sequence.prompt_len} + max_tokens {sequence.sampling.max_tokens}"
                f" = {length} tokens exceed the context of {self.max_context}",
                retry=False,
            )
        if needed > self.blocks.num_blocks:
            raise InadmissibleError(
                f"{sequence.final_cached_len} tokens need {needed} KV blocks of "
                f"{self.blocks.block_size}; this router has {self.blocks.num_blocks}",
                retry=False,
            )
        if len(self._waiting) >= self.max_waiting:
            raise InadmissibleError(f"{self.max_waiting} sequences wait already", retry=True)
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._by_request[sequence.request] = sequence
        insort(self._waiting, sequence, key=_order)

    def holds(self, sequence: Sequence) -> bool:
        """Whether it has been added and neither dropped nor finished."""
        return self._by_request.get(sequence.request) is sequence

    def drop(self, request: str, *, distrust: bool = False) -> Sequence | None:
        """Forget a sequence and free its blocks at once; None if it is not (or no longer) here.

        ``distrust``: no later prompt may find any of its blocks, shared ones included.
        """
        sequence = self._by_request.pop(request, None)
        if sequence is None:
            return None
        if distrust:
            self.blocks.forget(sequence.block_table)
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._free(sequence)
        return sequence

    def schedule(self) -> StepWork:
        """Choose the next step's chunks and give them their blocks."""
        planned: dict[Sequence, int] = {}
        preempted: list[Sequence] = []
        self._tails = []
        budget = self.max_step_tokens
        decoding = [s for s in self._running if len(s.tokens) - s.num_computed == 1]
        prefilling = [s for s in self._running if len(s.tokens) - s.num_computed > 1]
        for sequence in (*decoding, *prefilling):
            if budget == 0:
                break
            if not sequence.admitted:
                continue  # preempted a moment ago
            wanted = min(len(sequence.tokens) - sequence.num_computed, budget)
            if sequence.num_computed + wanted > len(sequence.block_table) * self.blocks.block_size:
                count, refund = self._make_room(sequence, wanted, planned, preempted)
                budget += refund
            else:
                count = wanted
            if count:
                planned[sequence] = count
                budget -= count
        if not preempted:
            self._admit(budget, planned)
        chunks = [
            Chunk(s, s.num_computed, count, s.num_computed + count == len(s.tokens))
            for s, count in planned.items()
        ]
        return StepWork(chunks, preempted, self._tails)

    def finish_step(self, work: StepWork, drawn: Mapping[str, int]) -> list[Outcome]:
        """Record that ``work`` was computed. ``drawn`` holds the new token of every sequence whose
        chunk ``draws``. Sequences dropped since ``schedule`` are passed over; finished ones leave
        and free their blocks.
        """
        outcomes = []
        for chunk in work.chunks:
            sequence = chunk.sequence
            if not self.holds(sequence):
                continue
            draws = chunk.draws
            sequence.num_computed = chunk.end
            self._publish(sequence, chunk.start)
            if not chunk.reaches_end:
                continue
            token: int | None = None
            finish: FinishReason | None = "length"
            stop_token = -1
            if draws:
                token = drawn[sequence.request]
                finish, stop_token = sequence.append(token)
                if stop_token >= 0:
                    token = None
            if finish is not None:
                self.drop(sequence.request)
            outcomes.append(Outcome(sequence, token, finish, stop_token))
        return outcomes

    def check(self) -> None:
        """Assert the invariants. For tests, between steps."""
        self.blocks.check([s.block_table for s in self])
        assert len(self._running) <= self.max_running, "more sequences run than allowed"
        assert {*self._running, *self._waiting} == set(self), "a sequence is in no list"
        assert len(self._running) + len(self._waiting) == len(self), "a sequence is in two lists"
        for queue in (self._running, self._waiting):
            assert queue == sorted(queue, key=_order), "a list is out of order"
        for sequence in self._waiting:
            assert not sequence.block_table, "a waiting sequence holds blocks"
            assert not sequence.admitted
        for sequence in self._running:
            assert sequence.admitted
            assert sequence.num_computed < len(sequence.tokens), "nothing is left to compute"
            assert sequence.num_computed <= len(sequence.block_table) * self.blocks.block_size

    def _make_room(
        self,
        sequence: Sequence,
        wanted: int,
        planned: dict[Sequence, int],
        preempted: list[Sequence],
    ) -> tuple[int, int]:
        """Blocks for the next ``wanted`` tokens, or for as many as there are; for at least one
        whoever comes last is preempted, perhaps the sequence itself. Returns the tokens that now
        have room and the tokens planned for others that will not run after all.
        """
        blocks, table = self.blocks, sequence.block_table
        refund = 0
        while True:
            missing = blocks.blocks_for(sequence.num_computed + wanted) - len(table)
            fresh = blocks.allocate(min(missing, blocks.num_free))
            if fresh:
                table += fresh
                self._tails.append(fresh[-1])
            room = len(table) * blocks.block_size - sequence.num_computed
            if room > 0:
                return min(room, wanted), refund
            victim = self._running.pop()
            refund += planned.pop(victim, 0)
            preempted.append(victim)
            self.num_preemptions += 1
            self._free(victim)
            insort(self._waiting, victim, key=_order)
            if victim is sequence:
                return 0, refund

    def _admit(self, budget: int, planned: dict[Sequence, int]) -> None:
        """Start queued sequences in order. The first that does not fit holds back the rest, so
        that a long prompt is not overtaken for ever.
        """
        blocks = self.blocks
        while budget and self._waiting and len(self._running) < self.max_running:
            sequence = self._waiting[0]
            matched: list[int] = []
            if len(sequence.prompt_logprobs) == sequence.num_prompt_logprobs:
                # The last token is always computed: its row predicts the next one.
                keys = sequence.full_block_keys(blocks.block_size, len(sequence.tokens) - 1)
                matched = blocks.match(keys)
            whole = blocks.blocks_for(min(len(sequence.tokens) + 1, sequence.final_cached_len))
            if whole - len(matched) > blocks.num_free_besides(matched):
                return
            del self._waiting[0]
            insort(self._running, sequence, key=_order)
            blocks.share(matched)
            sequence.block_table = matched
            sequence.num_computed = len(matched) * blocks.block_size
            sequence.admitted = True
            if not sequence.started:
                sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_len)
            self.prefix_queries += len(sequence.tokens)
            self.prefix_hits += sequence.num_computed
            count = min(len(sequence.tokens) - sequence.num_computed, budget)
            missing = blocks.blocks_for(sequence.num_computed + count) - len(matched)
            fresh = blocks.allocate(missing)
            assert fresh is not None, "admission checked that the whole prompt fits"
            sequence.block_table += fresh
            self._tails += fresh[-1:]
            planned[sequence] = count
            budget -= count

    def _publish(self, sequence: Sequence, start: int) -> None:
        """Make the blocks that the chunk from ``start`` completed findable by later prompts."""
        size = self.blocks.block_size
        first, end = start // size, sequence.num_computed // size
        if end > first and self.blocks.prefix_cache:
            keys = sequence.full_block_keys(size, sequence.num_computed)
            for index in range(first, end):
                self.blocks.publish(sequence.block_table[index], keys[index])

    def _free(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0
        sequence.admitted = False
