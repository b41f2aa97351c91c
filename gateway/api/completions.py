"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.api import logprobs as shapes
from gateway.api.engine import Engine
from gateway.api.http import EventStream, json_response, read_body
from gateway.api.logprobs import LegacyLogprobs
from gateway.api.prompts import split_prompts
from gateway.api.requests import CompletionRequest, parse
from gateway.api.responses import DONE, Completion, CompletionChoice, Frames, encode
from gateway.api.run import (
    Outcome,
    Ticket,
    collect,
    running,
    stream_options,
    usage_of,
)
from gateway.api.sampling import (
    MAX_LOGPROBS,
    Range,
    check_ranges,
    max_tokens,
    sampling,
    stop_strings,
)
from gateway.errors import InvalidValue
from gateway.generation import Generation
from gateway.output import Choice, Entry


class _Prompt(msgspec.Struct, frozen=True):
    ids: tuple[int, ...]
    text: str
    """What ``echo`` puts before the output."""
    given_as_text: bool
    max_tokens: int


class _Job:
    """One request, checked and tokenized."""

    def __init__(
        self, request: CompletionRequest, prompts: Seq[_Prompt], ticket: Ticket, per_prompt: int
    ) -> None:
        self.request = request
        self.prompts = prompts
        self.ticket = ticket
        self.per_prompt = per_prompt
        self.echo = bool(request.echo)
        self.top = request.logprobs or 0
        self.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self._tokenizer = ticket.engine.model.tokenizer
        self.generation = self._generation()

    def _generation(self) -> Generation:
        request, model = self.request, self.ticket.engine.model
        best_of = self.per_prompt > (request.n or 1)
        skip_special = request.skip_special_tokens is not False
        samplings = [
            sampling(
                request,
                max_tokens=prompt.max_tokens,
                # One a prompt: equal prompts must not get equal answers.
                seed=self.ticket.engine.random_seed(),
                # best_of ranks by the chosen tokens' log-probabilities.
                logprobs=self.top if request.logprobs is not None else 0 if best_of else -1,
                prompt_logprobs=self.top if self.echo and request.logprobs is not None else -1,
                vocab_size=model.vocab_size,
                defaults=model.defaults,
            )
            for prompt in self.prompts
        ]
        stops = stop_strings(request)
        choices = [
            Choice(
                p * self.per_prompt + i,
                model.tokenizer.detokenizer(prompt.ids, skip_special_tokens=skip_special),
                stops=stops,
                include_stop=bool(request.include_stop_str_in_output),
                min_tokens=request.min_tokens or 0,
                entries=request.logprobs is not None,
                offset=len(prompt.text) if self.echo else 0,
            )
            for p, prompt in enumerate(self.prompts)
            for i in range(self.per_prompt)
        ]
        return self.ticket.generate(
            [prompt.ids for prompt in self.prompts],
            samplings,
            choices,
            per_prompt=self.per_prompt,
        )

    def opening(self, choice: Choice) -> tuple[str, LegacyLogprobs | None]:
        """What stands before a choice's output: with ``echo`` its prompt, else nothing."""
        if not self.echo:
            return "", None
        prompt = self.prompts[choice.index // self.per_prompt]
        if self.request.logprobs is None:
            return prompt.text, None
        return prompt.text, shapes.legacy_prompt(
            prompt.ids,
            prompt.text,
            choice.prompt_logprobs,
            self._tokenizer,
            self.top,
            special_tokens_shown=not prompt.given_as_text,
        )

    def logprobs(
        self, opening: LegacyLogprobs | None, entries: Seq[Entry]
    ) -> LegacyLogprobs | None:
        if self.request.logprobs is None:
            return None
        found = shapes.legacy(entries, self._tokenizer, self.top)
        if opening is None:
            return found
        opening.extend(found)
        return opening

    async def stream(self) -> AsyncGenerator[bytes, None]:
        include_usage, continuous = stream_options(self.request)
        frames = Frames(
            id_=self.ticket.id,
            created=self.ticket.created,
            model=self.ticket.engine.model.id,
            chat=False,
            choices=len(self.generation.choices),
            usage_field=include_usage,
        )
        generation, prompt_tokens = self.generation, self.prompt_tokens
        begun = [not self.echo] * len(generation.choices)
        async with running(self.ticket, generation, prompt_tokens):
            while pieces := await generation.next():
                out = []
                for piece in pieces:
                    text, opening = piece.text, None
                    if not begun[piece.choice]:
                        begun[piece.choice] = True
                        before, opening = self.opening(generation.choices[piece.choice])
                        text = before + text
                    now = usage_of(generation, prompt_tokens) if continuous else None
                    scored = self.logprobs(opening, piece.entries)
                    out.append(frames.piece(piece.choice, text, scored, piece.finish, now))
                yield b"".join(out)
        if include_usage:
            yield frames.final_usage(usage_of(generation, prompt_tokens))
        yield DONE

    async def answer(self) -> bytes:
        outcomes = await collect(self.ticket, self.generation, self.prompt_tokens)
        chosen = [
            CompletionChoice(index, *self._whole(choice, outcomes[choice.index]))
            for index, choice in enumerate(self._best())
        ]
        return encode(
            Completion(
                self.ticket.id,
                "text_completion",
                self.ticket.created,
                self.ticket.engine.model.id,
                chosen,
                usage_of(self.generation, self.prompt_tokens),
            )
        )

    def _whole(
        self, choice: Choice, outcome: Outcome
    ) -> tuple[str, LegacyLogprobs | None, str | None]:
        before, opening = self.opening(choice)
        scored = self.logprobs(opening, outcome.entries)
        return before + outcome.text, scored, outcome.finish

    def _best(self) -> list[Choice]:
        """Of each prompt's ``best_of`` choices the ``n`` with the best log-prob per token."""
        n = self.request.n or 1
        best: list[Choice] = []
        for start in range(0, len(self.generation.choices), self.per_prompt):
            group = list(self.generation.choices[start : start + self.per_prompt])
            if n < self.per_prompt:
                group.sort(key=lambda choice: -choice.logprob_sum / max(1, choice.tokens))
            best += group[:n]
        return best


class Completions:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def completions(self, http: Request) -> Response:
        """Legacy completions, streamed or whole; raises ``ApiError``."""
        job = await self._job(http)
        if job.request.stream:
            return EventStream(job.stream())
        return json_response(await job.answer())

    async def _job(self, http: Request) -> _Job:
        # The body may be large and ends with this call, before the answer begins.
        engine = self._engine
        body = await read_body(http, engine.max_body_bytes)
        request = await engine.off_loop(body, lambda: parse(body, CompletionRequest))
        engine.model.check_name(request.model)
        check_ranges(request)
        if request.logprobs is not None:
            Range(0, MAX_LOGPROBS).check("logprobs", request.logprobs)
        per_prompt = _per_prompt(request)
        prompts = split_prompts(request.prompt)
        ticket = Ticket(engine, http, "cmpl", len(prompts) * per_prompt, priority=request.priority)
        try:
            tokenized = await self._tokenize(request, prompts)
            return _Job(msgspec.structs.replace(request, prompt=""), tokenized, ticket, per_prompt)
        except BaseException:
            ticket.free()
            raise

    async def _tokenize(
        self, request: CompletionRequest, prompts: Seq[str | list[int]]
    ) -> list[_Prompt]:
        model = self._engine.model
        found = []
        for i, prompt in enumerate(prompts):
            ids = await self._engine.prompt_ids(
                prompt,
                "prompt" if len(prompts) == 1 else f"prompt[{i}]",
                add_special_tokens=request.add_special_tokens is not False,
            )
            budget = max_tokens(
                request,
                prompt_tokens=len(ids),
                context=model.context,
                defaults=model.defaults,
            )
            text = ""
            if request.echo:
                text = prompt if isinstance(prompt, str) else await self._engine.detokenize(ids)
            found.append(_Prompt(ids, text, isinstance(prompt, str), budget))
        return found


def _per_prompt(request: CompletionRequest) -> int:
    """Sequences to run for each prompt."""
    n = request.n or 1
    best_of = request.best_of or n
    if best_of < n:
        raise InvalidValue(f"best_of must be at least n ({n}), got {best_of}.", param="best_of")
    if best_of > n and request.stream:
        raise InvalidValue("best_of above n cannot be streamed.", param="best_of")
    return best_of
