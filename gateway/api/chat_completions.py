"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from gateway.api import logprobs as shapes
from gateway.api.engine import Engine
from gateway.api.http import EventStream, json_response, read_body
from gateway.api.requests import ChatRequest, parse
from gateway.api.responses import (
    DONE,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Frames,
    encode,
)
from gateway.api.run import Ticket, collect, running, stream_options, usage_of
from gateway.api.sampling import check_ranges, max_tokens, sampling, stop_strings
from gateway.chat import plain_messages
from gateway.errors import InvalidValue, UnsupportedField
from gateway.output import Choice, Entry


class _Job:
    """One request, checked and tokenized."""

    def __init__(self, request: ChatRequest, prompt: tuple[int, ...], ticket: Ticket) -> None:
        self.request = request
        self.prompt = prompt
        self.ticket = ticket
        self.top = request.top_logprobs or 0
        model = ticket.engine.model
        budget = max_tokens(
            request, prompt_tokens=len(prompt), context=model.context, defaults=model.defaults
        )
        parameters = sampling(
            request,
            max_tokens=budget,
            seed=ticket.engine.random_seed(),
            logprobs=self.top if request.logprobs else -1,
            prompt_logprobs=-1,
            vocab_size=model.vocab_size,
            defaults=model.defaults,
        )
        stops = stop_strings(request)
        n = request.n or 1
        choices = [
            Choice(
                i,
                model.tokenizer.detokenizer(
                    prompt, skip_special_tokens=request.skip_special_tokens is not False
                ),
                stops=stops,
                include_stop=bool(request.include_stop_str_in_output),
                min_tokens=request.min_tokens or 0,
                entries=bool(request.logprobs),
            )
            for i in range(n)
        ]
        self.generation = ticket.generate([prompt], [parameters], choices, per_prompt=n)

    def logprobs(self, entries: Seq[Entry]) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        return ChatLogprobs(shapes.chat(entries, self.ticket.engine.model.tokenizer, self.top))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        include_usage, continuous = stream_options(self.request)
        generation, prompt_tokens = self.generation, len(self.prompt)
        frames = Frames(
            id_=self.ticket.id,
            created=self.ticket.created,
            model=self.ticket.engine.model.id,
            chat=True,
            choices=len(generation.choices),
            usage_field=include_usage,
        )
        begun = [False] * len(generation.choices)
        async with running(self.ticket, generation, prompt_tokens):
            while pieces := await generation.next():
                out = []
                for piece in pieces:
                    now = usage_of(generation, prompt_tokens) if continuous else None
                    if not begun[piece.choice]:
                        begun[piece.choice] = True
                        out.append(frames.role(piece.choice, now))
                    scored = self.logprobs(piece.entries)
                    out.append(frames.piece(piece.choice, piece.text, scored, piece.finish, now))
                yield b"".join(out)
        if include_usage:
            yield frames.final_usage(usage_of(generation, prompt_tokens))
        yield DONE

    async def answer(self) -> bytes:
        outcomes = await collect(self.ticket, self.generation, len(self.prompt))
        choices = [
            ChatChoice(
                index,
                ChatMessage("assistant", outcome.text),
                self.logprobs(outcome.entries),
                outcome.finish,
            )
            for index, outcome in enumerate(outcomes)
        ]
        return encode(
            ChatCompletion(
                self.ticket.id,
                "chat.completion",
                self.ticket.created,
                self.ticket.engine.model.id,
                choices,
                usage_of(self.generation, len(self.prompt)),
            )
        )


class ChatCompletions:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def chat_completions(self, http: Request) -> Response:
        """Chat completions, streamed or whole; raises ``ApiError``."""
        job = await self._job(http)
        if job.request.stream:
            return EventStream(job.stream())
        return json_response(await job.answer())

    async def _job(self, http: Request) -> _Job:
        # Body and messages may be large and end with this call, before the answer begins.
        engine = self._engine
        body = await read_body(http, engine.max_body_bytes)
        request = await engine.off_loop(body, lambda: parse(body, ChatRequest))
        engine.model.check_name(request.model)
        check_ranges(request)
        if request.top_logprobs and not request.logprobs:
            raise InvalidValue("top_logprobs needs logprobs=true.", param="top_logprobs")
        text = await engine.off_loop(body, lambda: chat_prompt(engine, request))
        ticket = Ticket(engine, http, "chatcmpl", request.n or 1, priority=request.priority)
        try:
            # Templates write special tokens such as the begin-of-text themselves.
            prompt = await engine.prompt_ids(
                text, "messages", add_special_tokens=bool(request.add_special_tokens)
            )
            return _Job(replace(request, messages=[], chat_template_kwargs=None), prompt, ticket)
        except BaseException:
            ticket.free()
            raise


def chat_prompt(engine: Engine, request: ChatRequest) -> str:
    """The messages by the model's template; raises ``InvalidRequest``."""
    template = engine.model.template
    if template is None:
        raise UnsupportedField(
            f"The model {engine.model.id!r} has no chat template; use /v1/completions.",
            param="messages",
        )
    return template.render(
        plain_messages(request.messages),
        add_generation_prompt=request.add_generation_prompt is not False,
        variables=request.chat_template_kwargs or {},
    )
