"""From a checked request to its generation, and the generation under a watched connection."""

from __future__ import annotations

import math
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
from gateway.errors import InvalidValue, shown
from gateway.generation import Generation
from gateway.output import Choice, Entry, Piece
from gateway.sequences import Mailbox, Sequence
from gateway.tenants import Tenant
from mesh.messages import FinishReason, Sampling

TIMEOUT_HEADER = "X-Request-Timeout"


class Ticket:
    """A request's room in the admission queue and its name; give it to ``generate`` or ``free``.

    ``priority``: the request's field, None for 0.
    """

    def __init__(
        self,
        engine: Engine,
        request: Request,
        prefix: str,
        sequences: int,
        *,
        priority: int | None,
    ) -> None:
        """Raises ``Overloaded`` when the queue is full, ``InvalidValue`` for the header."""
        self.engine = engine
        self.http = request
        self.tenant: Tenant = request.state.tenant
        self.arrived = time.monotonic()
        self.created = int(time.time())
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._sequences = sequences
        self._priority = priority or 0
        self._deadline = self.arrived + timeout_s(
            request.headers.get(TIMEOUT_HEADER), engine.request_timeout_s
        )
        engine.admission.admit(self.tenant, sequences, self.arrived)
        request.state.held.release()  # from here on what is admitted is bounded

    def free(self) -> None:
        """The request will not run after all."""
        self.engine.admission.finish(self.tenant, self._sequences, time.monotonic())

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
        assert len(choices) == len(prompts) * per_prompt == self._sequences
        sequences = [
            Sequence(
                id_=f"{self.id}-{p * per_prompt + i}",
                choice=p * per_prompt + i,
                prompt=prompt,
                sampling=for_choice(sampling, i),
                trace=self.http.state.request_id,
                mailbox=mailbox,
                deadline=self._deadline,
                tenant=self.tenant,
                priority=self._priority,
                # In a router, where tenants mix, one must not get ahead of another by it.
                router_priority=-self._priority if engine.one_tenant else 0,
            )
            for p, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
            for i in range(per_prompt)
        ]
        engine.meters.prompt_tokens.inc(sum(map(len, prompts)))
        return Generation(
            table=engine.pool.table,
            admission=engine.admission,
            tenant=self.tenant,
            meters=engine.meters,
            mailbox=mailbox,
            sequences=sequences,
            choices=choices,
            arrived=self.arrived,
            deadline=self._deadline,
        )


def timeout_s(header: str | None, most: float) -> float:
    """Seconds that a request may take: what its client asks for, but never more than ``most``.

    Raises ``InvalidValue`` for what is no positive number.
    """
    if header is None:
        return most
    try:
        asked = float(header)
    except ValueError:
        asked = math.nan
    if not 0 < asked < math.inf:  # false for NaN
        raise InvalidValue(
            f"{TIMEOUT_HEADER}: expected seconds, more than 0, got {shown(header)!r}.",
            param=TIMEOUT_HEADER,
        )
    return min(asked, most)


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
                "request": ticket.id,
                "prompt_tokens": prompt_tokens,
                "completion_tokens": generation.generated_tokens,
            }
            ticket.http.state.facts |= facts


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
