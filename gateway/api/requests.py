"""What clients may send, as typed Structs, and how a body becomes one.

Every field is known to be one of four kinds: read (a Struct field), harmless (accepted and
ignored), unsupported (OpenAI's or vLLM's, refused by name unless it holds its neutral value), or
unknown (refused by name). A silent no-op would make a client believe that its option works.
"""

from __future__ import annotations

import gc
import re
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from gateway.errors import (
    InvalidJson,
    InvalidType,
    InvalidValue,
    UnknownField,
    UnsupportedField,
    shown,
)

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)

# Unsupported fields and the values that ask for nothing. null always does.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    """A last chunk with empty ``choices`` and the whole request's usage."""
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk."""
    include_obfuscation: bool | None = None
    """Accepted; nothing is added to chunks."""


class _Generate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that both generating endpoints read. None: not given."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    """The lower comes first of what the same API key has waiting."""


class CompletionRequest(_Generate, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[Any]
    """Text, texts, token ids or lists of token ids (``prompts.py`` tells them apart)."""
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ChatRequest(_Generate, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``: a ``prompt``, or ``messages`` for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages."""
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


T = TypeVar("T", bound=msgspec.Struct)

_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_parts = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
# "... - at `$.stream_options.include_usage`"
_PLACE = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"field `(?P<name>[^`]+)`")


def parse(body: bytes, kind: type[T]) -> T:
    """The request in ``body``.

    Raises ``InvalidJson``, ``UnknownField``, ``UnsupportedField``, ``InvalidType`` or
    ``InvalidValue``, each with ``param`` naming the field.
    """
    try:
        # A million small objects would set the cyclic collector to work again and again.
        with _collector_paused():
            fields = _decode_object(body)
    except msgspec.ValidationError:
        raise _unreadable(body) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"The body is not valid JSON: {error}") from None
    known = kind.__struct_fields__
    for name in [name for name in fields if name not in known]:
        value = fields.pop(name)
        if name in HARMLESS:
            continue
        if name not in UNSUPPORTED:
            raise UnknownField(f"Unrecognized request argument supplied: {name}", param=name)
        if value is not None and not _is_one_of(value, UNSUPPORTED[name]):
            raise UnsupportedField(f"{name} is not supported by this server.", param=name)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), fields, kind) from None


@contextmanager
def _collector_paused() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _is_one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    # In JSON, unlike in Python, 0 is not false and 1 is not true.
    kind = isinstance(value, bool)
    return any(value == one and kind == isinstance(one, bool) for one in accepted)


def _unreadable(body: bytes) -> InvalidJson | InvalidValue:
    """Why a body is no object of values: it is something else, or a number too large, or not even
    JSON behind that number.
    """
    try:
        parts = _decode_parts(body)
    except (msgspec.ValidationError, RecursionError):
        return InvalidJson("The body must be a JSON object.")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return InvalidJson(f"The body is not valid JSON: {error}")
    for name, part in parts.items():
        try:
            msgspec.json.decode(part)
        except RecursionError:
            continue  # a field that is there twice is only looked at the last time
        except UnicodeDecodeError as error:
            return InvalidJson(f"The body is not valid JSON: {error}")
        except msgspec.ValidationError as error:
            return InvalidValue(f"{name}: {_PLACE.sub('', str(error))}.", param=name)
    return InvalidJson("The body is not accepted as JSON.")


def _invalid(
    text: str, fields: Mapping[str, Any], kind: type[msgspec.Struct]
) -> InvalidType | InvalidValue:
    """A client's error out of msgspec's message, which ends with the JSON path."""
    place = _PLACE.search(text)
    path = place["path"] if place else ""
    if path == "logit_bias[...]":  # msgspec does not say which key
        path = f"logit_bias.{_first_no_number(fields['logit_bias'])}"
    what = text[: place.start()] if place else text
    if path in fields and (accepted := _choices(kind, path)) and isinstance(fields[path], str):
        return InvalidValue(
            f"{path} is {shown(fields[path])!r}; expected one of {', '.join(accepted)}.", param=path
        )
    if not path and (field := _FIELD.search(what)):  # "Object missing required field `prompt`"
        return InvalidType(f"{what}.", param=field["name"])
    if field := _FIELD.search(what):  # "Object contains unknown field `x`" inside an object
        path = f"{path}.{field['name']}"
    return InvalidType(f"{path}: {what}.", param=path or None)


def _choices(kind: type[msgspec.Struct], field: str) -> tuple[str, ...]:
    """What a field accepts that takes one of a few words; empty for any other."""
    hint = typing.get_type_hints(kind).get(field)
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def _first_no_number(values: Mapping[str, Any]) -> str:
    for key, value in values.items():
        try:
            msgspec.convert(value, float)
        except msgspec.ValidationError:
            return key
    raise AssertionError("msgspec refused one of these")
