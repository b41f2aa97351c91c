"""Response bodies as OpenAI's clients read them, whole and as stream frames.

A stream frame is one server-sent event. All that is the same in every frame of a choice is
encoded once; a token then costs one JSON string and one join.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.api.logprobs import ChatLogprob, LegacyLogprobs

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        PromptDetails(cached_tokens),
    )


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
    refusal: str | None = None


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: list[ChatLogprob] | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Model(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    object: str
    data: list[Model]


class Tokenized(msgspec.Struct, frozen=True, omit_defaults=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


class Frames:
    """Encodes the stream frames of one response.

    ``chat``: chat chunks, else legacy completion chunks. ``usage_field``: every frame has a
    ``usage`` field, null unless given.
    """

    def __init__(
        self, *, id_: str, created: int, model: str, chat: bool, choices: int, usage_field: bool
    ) -> None:
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = _encode({"id": id_, "object": kind, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._chat = chat
        self._tail = b'],"usage":null}\n\n' if usage_field else b"]}\n\n"
        field = b',"delta":' if chat else b',"text":'
        self._prefix = [self._head + b'{"index":%d' % index + field for index in range(choices)]
        opening, closing = (b'{"content":', b"}") if chat else (b"", b"")
        self._text_prefix = [prefix + opening for prefix in self._prefix]
        self._text_closing = closing
        self._plain_suffix = closing + b',"logprobs":null,"finish_reason":null}' + self._tail

    def role(self, choice: int, usage_now: Usage | None) -> bytes:
        """The first frame of a chat's choice."""
        return self._close(
            self._prefix[choice] + b'{"role":"assistant","content":""}', None, None, usage_now
        )

    def piece(
        self,
        choice: int,
        text: str,
        logprobs: ChatLogprobs | LegacyLogprobs | None,
        finish: str | None,
        usage_now: Usage | None,
    ) -> bytes:
        """A frame with new text; ``finish`` on a choice's last."""
        if logprobs is None and finish is None and usage_now is None:
            return self._text_prefix[choice] + _encode(text) + self._plain_suffix
        if self._chat and finish is not None and not text:
            return self._close(self._prefix[choice] + b"{}", logprobs, finish, usage_now)
        start = self._text_prefix[choice] + _encode(text) + self._text_closing
        return self._close(start, logprobs, finish, usage_now)

    def _close(
        self, start: bytes, logprobs: Any, finish: str | None, usage_now: Usage | None
    ) -> bytes:
        end = b',"logprobs":' + _encode(logprobs) + b',"finish_reason":' + _encode(finish) + b"}"
        if usage_now is None:
            return start + end + self._tail
        return start + end + b'],"usage":' + _encode(usage_now) + b"}\n\n"

    def final_usage(self, total: Usage) -> bytes:
        """The frame after the last choice: no choices, the whole request's usage."""
        return self._head + b'],"usage":' + _encode(total) + b"}\n\n"


def error_frame(body: bytes) -> bytes:
    """An error in a stream that has begun; ``body`` is the JSON of an error object."""
    return b"data: " + body + b"\n\n"


def model_list(models: Sequence[Model]) -> bytes:
    return _encode(ModelList("list", list(models)))


def encode(body: msgspec.Struct | dict[str, Any]) -> bytes:
    """JSON of a response body."""
    return _encode(body)
