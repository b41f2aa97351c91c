"""JSON Schemas of the bodies that clients send and get, from the Structs that read and write them
and the ranges that are checked.

What no schema can say (``top_logprobs`` needs ``logprobs``, prompt and output share the context)
is left to the 400 that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.api.requests import (
    HARMLESS,
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)
from gateway.api.sampling import (
    LOGIT_BIAS_RANGE,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOKEN_ENTRIES,
    RANGES,
    TOKEN_ID,
    Range,
)
from gateway.chat import ROLES, TEXT_PARTS

Schema = dict[str, Any]

_NULL: Schema = {"type": "null"}
_REF = "#/components/schemas/{name}"
_MOST_INT = 2**31 - 1


def components(
    requests: Sequence[type[msgspec.Struct]],
    responses: Sequence[type[msgspec.Struct]],
    *,
    model: str,
    vocab_size: int,
    context: int,
) -> dict[str, Schema]:
    """Schemas by the Structs' names. ``model``: the one id that is served."""
    _, found = msgspec.json.schema_components([*requests, *responses], ref_template=_REF)
    special = _special(model, vocab_size)
    for kind in requests:
        schema = found[kind.__name__]
        properties = schema["properties"]
        generating = issubclass(kind, (CompletionRequest, ChatRequest))
        for name in properties:
            if name in special:
                optional = name not in schema.get("required", ())
                properties[name] = _nullable(special[name]) if optional else special[name]
            elif generating and name in RANGES:
                properties[name] = _number(properties[name], RANGES[name])
        if kind is CompletionRequest:
            properties["max_tokens"] = _nullable(_bounded("integer", Range(0, _MOST_INT)))
            properties["logprobs"] = _nullable(_bounded("integer", Range(0, MAX_LOGPROBS)))
            properties["prompt"] = _prompt(vocab_size, context)
        if kind is TokenizeRequest:
            schema["oneOf"] = [_given("prompt", "messages"), _given("messages", "prompt")]
        # parse() takes these from every request, and nothing that it does not know.
        for name in sorted(HARMLESS - properties.keys()):
            properties[name] = {"description": "Accepted and ignored."}
        for name, neutral in sorted(UNSUPPORTED.items()):
            properties.setdefault(
                name,
                {"enum": [None, *neutral], "description": "Not supported but for these values."},
            )
        schema["additionalProperties"] = False
    return found


def reference(kind: type[msgspec.Struct]) -> Schema:
    return {"$ref": _REF.format(name=kind.__name__)}


def _special(model: str, vocab_size: int) -> dict[str, Schema]:
    """Fields that mean the same wherever they are."""
    ids = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
    messages = {"type": "array", "minItems": 1, "items": _message()}
    bias = _bounded("number", LOGIT_BIAS_RANGE)
    return {
        "model": {"enum": [model]},
        "max_tokens": _bounded("integer", Range(1, _MOST_INT)),
        "messages": messages,
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": MAX_STOPS}]},
        "stop_token_ids": _nullable({"type": "array", "items": ids, "maxItems": MAX_TOKEN_ENTRIES}),
        "logit_bias": _nullable(
            {
                "type": "object",
                "description": f"By token id, 0 to {vocab_size - 1}.",
                "propertyNames": {"pattern": f"^({TOKEN_ID.pattern})$"},
                "additionalProperties": bias,
                "maxProperties": MAX_TOKEN_ENTRIES,
            }
        ),
        "tokens": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
        },
    }


def _prompt(vocab_size: int, context: int) -> Schema:
    ids = {
        "type": "array",
        "minItems": 1,
        "maxItems": context,
        "items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1},
    }
    return {
        "description": "A text, texts, token ids, or lists of token ids.",
        "anyOf": [
            {"type": "string"},
            {"type": "array", "minItems": 1, "items": {"type": "string"}},
            ids,
            {"type": "array", "minItems": 1, "items": ids},
        ],
    }


def _given(name: str, other: str) -> Schema:
    """``name`` is there, ``other`` is not."""
    return {"required": [name], "properties": {name: {"not": _NULL}, other: _NULL}}


def _message() -> Schema:
    part = {
        "type": "object",
        "properties": {"type": {"enum": list(TEXT_PARTS)}, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    return {
        "type": "object",
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]},
            "name": {"type": ["string", "null"]},
        },
        "required": ["role", "content"],
        "additionalProperties": {"enum": [None, []]},
    }


def _number(schema: Schema, accepted: Range) -> Schema:
    """``schema`` of an optional number, within ``accepted``."""
    kind = next(part["type"] for part in schema["anyOf"] if part != _NULL)
    return _nullable(_bounded(kind, accepted))


def _bounded(kind: str, accepted: Range) -> Schema:
    lowest = -1 if accepted.or_minus_one else accepted.low
    low = {"exclusiveMinimum" if accepted.low_open else "minimum": lowest}
    return {"type": kind, **low, "maximum": accepted.high}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL]}
