"""From a checked request to its generation, and the generation under a watched connection."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request

from gateway.api.engine import Engine
from gateway.api.requests import ChatRequest, CompletionRequest
from gateway.api.responses import Usage, usage
from gateway.api.sampling import for_choice
from gateway.generation import Generation
from gateway.output import Choice, Entry, Piece
from gateway.sequences import Mailbox, Sequence
from mesh.messages import FinishReason, Sampling


class Ticket:
    """A request's room in the admission queue and its name; give it to ``generate`` or ``free``."""

    def __init__(self, engine: Engine, request: Request, prefix: str, sequences: int) -> None:
        """Raises ``Overloaded`` when the queue is full."""
        self.engine = engine
        self.http = request
        self.arrived = time.monotonic()
        self.created = int(time.time())
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._sequences = sequences
        engine.admission.admit(sequences, self.arrived)

    def free(self) -> None:
        """The request will not run after all."""
        self.engine.admission.finish(self._sequences, time.monotonic())

    def generate(
        self,
        prompts: Seq[tuple[int, ...]],
        samplings: Seq[Sampling],
        choices: Seq[Choice],
        *,
        per_prompt: int,
    ) -> Generation:
        """The generation of ``per_prompt`` sequences for each prompt; it frees the room itself.

        ``samplings[p]`` are the parameters of prompt ``p``; ``choices`` are in the order of
        prompts, then of a prompt's sequences.
        """
        engine, mailbox = self.engine, Mailbox()
        deadline = self.arrived + engine.request_timeout_s
        assert len(choices) == len(prompts) * per_prompt == self._sequences
        sequences = [
            Sequence(
                id_=f"{self.id}-{p * per_prompt + i}",
                choice=p * per_prompt + i,
                prompt=prompt,
                sampling=for_choice(sampling, i),
                trace=self.http.state.request_id,
                mailbox=mailbox,
                deadline=deadline,
            )
            for p, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
            for i in range(per_prompt)
        ]
        engine.meters.prompt_tokens.inc(sum(map(len, prompts)))
        return Generation(
            table=engine.pool.table,
            admission=engine.admission,
            meters=engine.meters,
            mailbox=mailbox,
            sequences=sequences,
            choices=choices,
            arrived=self.arrived,
            deadline=deadline,
        )


@asynccontextmanager
async def running(
    ticket: Ticket, generation: Generation, prompt_tokens: int
) -> AsyncGenerator[None, None]:
    """Runs ``generation``; ends it at once when the client disconnects."""
    async with generation:
        watcher = ticket.engine.spawn(_watch(ticket.http, generation))
        try:
            yield
        finally:
            watcher.cancel()
            facts: dict[str, Any] = {
                "id": ticket.id,
                "prompt_tokens": prompt_tokens,
                "completion_tokens": generation.generated_tokens,
            }
            ticket.http.state.facts = facts


async def _watch(request: Request, generation: Generation) -> None:
    # Starlette and uvicorn notice a disconnect only when someone receives.
    while (await request.receive())["type"] != "http.disconnect":
        pass
    generation.abandon()


class Outcome:
    """All of one choice, for an answer that is not streamed."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.entries: list[Entry] = []
        self.finish: FinishReason | None = None

    def add(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        self.entries += piece.entries
        self.finish = piece.finish

    @property
    def text(self) -> str:
        return "".join(self._texts)


async def collect(ticket: Ticket, generation: Generation, prompt_tokens: int) -> list[Outcome]:
    """Run ``generation`` to its end; raises as ``Generation.next`` does."""
    outcomes = [Outcome() for _ in generation.choices]
    async with running(ticket, generation, prompt_tokens):
        while pieces := await generation.next():
            for piece in pieces:
                outcomes[piece.choice].add(piece)
    return outcomes


def usage_of(generation: Generation, prompt_tokens: int) -> Usage:
    """What the request has used so far."""
    return usage(prompt_tokens, generation.generated_tokens, generation.cached_tokens)


def stream_options(request: CompletionRequest | ChatRequest) -> tuple[bool, bool]:
    """(usage in a last frame, usage in every frame)."""
    options = request.stream_options
    if options is None:
        return False, False
    return bool(options.include_usage), bool(options.continuous_usage_stats)
