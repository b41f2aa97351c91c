"""One engine step: micro-batches through all layers, then logits, log-probabilities and tokens.

The micro-batches' layer loops are generators that yield while the experts have them; the runner
goes round those that can go on, and waits when none can. A micro-batch that fails takes only its
own sequences with it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Literal

import torch
from ep_kernels.crew import Crew
from structlog.typing import FilteringBoundLogger

from mesh.messages import Logprob
from moe_model.experts import Ticket
from moe_model.forward import ServedModel, forward
from moe_model.plan import Chunk as ModelChunk
from moe_model.sampler import UNDRAWABLE
from router_svc.ahead import Ahead
from router_svc.experts import MeshExperts
from router_svc.microbatch import MicroBatchRule, split_chunks
from router_svc.peers import GroupLost
from router_svc.profile import TimedModel, Times
from router_svc.scheduler import Chunk, StepWork
from router_svc.sequence import Sequence as RequestSequence
from router_svc.tickets import ExpertsUnavailableError

_LOGPROB_ROWS = 64
"""Prompt rows whose logits are held at once."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sequence cannot go on."""

    reason: str
    unavailable: bool = False
    """Experts had no worker: trying again later can help."""


@dataclass(slots=True)
class StepResult:
    """Keyed by request. A sequence in ``failed`` drew nothing and its chunk does not count."""

    drawn: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, Logprob] = field(default_factory=dict)
    failed: dict[str, Failure] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _MicroBatch:
    index: int
    chunks: list[Chunk]
    layers: Generator[Ticket, None, torch.Tensor]
    """Runs the layers; returns final hidden states ``[tokens, hidden]``."""
    ticket: Ticket | None = None
    """What it waits for."""


class StepRunner:
    """Runs steps on the compute thread; owns the KV cache's memory and the samplers."""

    def __init__(
        self,
        model: ServedModel,
        kv: Any,
        experts: MeshExperts,
        *,
        crew: Crew,
        micro_batches: Literal["auto", "1", "2", "3", "4"],
        pump: Callable[[], None],
        wait: Callable[[], bool],
        times: Times,
        log: FilteringBoundLogger,
        ahead: Ahead | None = None,
    ) -> None:
        """``pump()`` lets tickets take what has arrived for them; ``wait()`` blocks until
        something may have, and returns whether it dropped sequences meanwhile. ``ahead`` tries
        steps of decodes first, where the router can.
        """
        self._model = TimedModel(model, times)
        self._kv = kv
        self._experts = experts
        self._crew = crew
        self._clients = self._model.clients(experts.micro_batch)
        self._fixed = None if micro_batches == "auto" else int(micro_batches)
        self._rule = MicroBatchRule()
        self._pump = pump
        self._ahead = ahead
        self._wait = wait
        self._times = times
        self._log = log
        # One per micro-batch, because a sampler keeps the parameters of the batch it saw last.
        self._samplers = [model.sampler() for _ in range(self._fixed or 2)]

    def run(self, work: StepWork) -> StepResult:
        """Compute the chunks and draw a token where they reach the end of their sequence."""
        times, chunks = self._times, work.chunks
        started = perf_counter_ns()
        if work.tails:
            self._kv.clear(work.tails)
        result = StepResult()
        tokens = sum(chunk.count for chunk in chunks)
        attention_ns, away_ns = times.attention_side_ns, self._experts.tally.away_ns
        count = self._fixed or self._rule.choose(tokens, len(chunks))
        ahead = self._ahead_of(chunks, count)
        if ahead is not None and self._goes_ahead(ahead, chunks, result):
            # What a device's layers take is not known.
            parts, whole = [chunks], not ahead.on_device
            batches: list[_MicroBatch] = []
        else:
            # A step that was tried in vain took longer than one does.
            parts, whole = split_chunks(chunks, count), ahead is None
            batches = [_MicroBatch(i, part, self._layers(part)) for i, part in enumerate(parts)]
        while batches:
            advanced = False
            for batch in tuple(batches):
                if batch.ticket is None or batch.ticket.done:
                    advanced = True
                    if not any(_is_away(other) for other in batches):
                        self._crew.share()  # nothing is with the experts: their cores are idle
                    if self._advance(batch, result):
                        batches.remove(batch)
            if batches:
                waited = perf_counter_ns()
                if not advanced and self._wait():
                    batches = [batch for batch in batches if not self._is_deserted(batch)]
                    whole = False
                self._pump()
                waited_ns = perf_counter_ns() - waited
                times.wait_ns += waited_ns
                times.layers.wait[times.layers.groups.of(times.layer)] += waited_ns
        self._crew.keep()
        times.tokens += tokens
        if self._fixed is None and whole and not result.failed:
            self._rule.observe(
                len(parts),
                tokens,
                times.attention_side_ns - attention_ns,
                self._experts.tally.away_ns - away_ns,
                perf_counter_ns() - started,
            )
        return result

    def _ahead_of(self, chunks: list[Chunk], micro_batches: int) -> Ahead | None:
        """What tries all of a step as one micro-batch, if it may: a device in any case, C only
        where it would be one anyway.
        """
        ahead = self._ahead
        if ahead is None or (micro_batches > 1 and not ahead.on_device):
            return None
        return ahead if ahead.may(chunks) else None

    def _goes_ahead(self, ahead: Ahead, chunks: list[Chunk], result: StepResult) -> bool:
        """Run it, if nothing comes in between."""
        self._crew.share()
        computed = ahead.run(self._plan(chunks), self._kv, _decodes(chunks))
        if computed is None:
            self._crew.keep()
            return False
        hidden, logits = computed
        self._finish(0, chunks, hidden, result, logits)
        return True

    def _plan(self, chunks: list[Chunk]) -> Any:
        return self._model.plan(
            [
                ModelChunk(c.sequence.tokens[c.start : c.end], c.start, c.sequence.block_table)
                for c in chunks
            ],
            self._kv.block_size,
        )

    def _layers(self, chunks: list[Chunk]) -> Generator[Ticket, None, torch.Tensor]:
        plan, experts = self._plan(chunks), self._clients(_decodes(chunks))
        return (yield from forward(self._model, plan, self._kv, experts))

    def _advance(self, batch: _MicroBatch, result: StepResult) -> bool:
        """Run a micro-batch until it waits for experts; True when it is through, well or not."""
        try:
            try:
                batch.ticket = next(batch.layers)
            except StopIteration as stop:
                self._finish(batch.index, batch.chunks, stop.value, result)
            else:
                return False
        except GroupLost:
            raise
        except ExpertsUnavailableError as error:
            self._fail(batch, Failure(str(error), unavailable=True), result)
        except Exception as error:  # noqa: BLE001 - the boundary: the other sequences go on
            self._log.exception("micro_batch.failed", tokens=sum(c.count for c in batch.chunks))
            self._fail(batch, Failure(f"{type(error).__name__}: {error}"), result)
        return True

    def _fail(self, batch: _MicroBatch, failure: Failure, result: StepResult) -> None:
        result.failed.update((chunk.sequence.request, failure) for chunk in batch.chunks)

    def _is_deserted(self, batch: _MicroBatch) -> bool:
        """Whether nobody wants the micro-batch any more; it is abandoned then."""
        if any(chunk.sequence.admitted for chunk in batch.chunks):
            return False
        batch.layers.close()
        return True

    def _finish(
        self,
        index: int,
        chunks: list[Chunk],
        hidden: torch.Tensor,
        result: StepResult,
        logits: torch.Tensor | None = None,
    ) -> None:
        """From final hidden states ``[tokens, hidden]`` of the micro-batch ``index`` to tokens;
        ``logits``: of all rows, if they are known.
        """
        rows: list[int] = []  # the last row of each chunk that draws
        sequences: list[RequestSequence] = []
        first = 0
        for chunk in chunks:
            sequence = chunk.sequence
            if len(sequence.prompt_logprobs) < sequence.num_prompt_logprobs:
                self._score_prompt(index, chunk, hidden[first : first + chunk.count])
            first += chunk.count
            if chunk.draws:
                rows.append(first - 1)
                sequences.append(sequence)
        if not rows:
            return
        if logits is None:
            logits = self._model.logits(hidden if len(rows) == first else hidden[rows])
        elif len(rows) < first:
            logits = logits[rows]
        started = perf_counter_ns()
        tokens, logprobs = self._samplers[index].draw(logits, sequences)
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            if token == UNDRAWABLE:
                result.failed[sequence.request] = Failure("the model's logits are not finite")
                continue
            result.drawn[sequence.request] = token
            if logprob is not None:
                result.logprobs[sequence.request] = logprob
        self._times.sampling_ns += perf_counter_ns() - started

    def _score_prompt(self, micro_batch: int, chunk: Chunk, hidden: torch.Tensor) -> None:
        """Append log-probabilities of the prompt tokens that the chunk's rows predict."""
        sequence = chunk.sequence
        known = sequence.prompt_logprobs
        if not known:
            known.append(None)
        # Row r predicts position start + r + 1.
        begin = len(known) - 1 - chunk.start
        end = min(chunk.count, sequence.prompt_len - 1 - chunk.start)
        for low in range(begin, end, _LOGPROB_ROWS):
            high = min(low + _LOGPROB_ROWS, end)
            known += self._samplers[micro_batch].score(
                self._model.logits(hidden[low:high]),
                sequence.tokens[chunk.start + low + 1 : chunk.start + high + 1],
                sequence.sampling.prompt_logprobs,
            )


def _decodes(chunks: list[Chunk]) -> bytes:
    """A byte a token, 1 if it belongs to a decode step."""
    return b"".join(b"\1" if chunk.decodes else bytes(chunk.count) for chunk in chunks)


def _is_away(batch: _MicroBatch) -> bool:
    return batch.ticket is not None and not batch.ticket.done
