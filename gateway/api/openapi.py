"""``/openapi.json``: the gateway's endpoints, from the routes that it serves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.routing import Route

from gateway.api.admin import ModeRequest, PinRequest, RebalanceRequest
from gateway.api.engine import Engine
from gateway.api.guard import OPEN_PATHS, Guard
from gateway.api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from gateway.api.responses import (
    ChatCompletion,
    Completion,
    Detokenized,
    Model,
    ModelList,
    Tokenized,
)
from gateway.api.run import TIMEOUT_HEADER
from gateway.api.schemas import components, reference
from gateway.errors import ErrorObject
from mesh.placement_json import PlacementDocument

_JSON = "application/json"
_PARAMETER = re.compile(r"{(?P<name>\w+)(:\w+)?}")

_REQUEST: dict[str, type[msgspec.Struct]] = {
    "completions": CompletionRequest,
    "chat_completions": ChatRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
    "place": PlacementDocument,
    "rebalance": RebalanceRequest,
    "mode": ModeRequest,
    "pin": PinRequest,
}
_RESPONSE: dict[str, type[msgspec.Struct]] = {
    "completions": Completion,
    "chat_completions": ChatCompletion,
    "tokenize": Tokenized,
    "detokenize": Detokenized,
    "models": ModelList,
    "model": Model,
}
_OPTIONAL_BODY = frozenset({"rebalance"})
_GENERATING = frozenset({"completions", "chat_completions"})
_ERRORS = {
    "400": "The request is wrong.",
    "401": "No key, or one that is not known.",
    "403": "Whoever asks may not do this.",
    "404": "There is no such thing.",
    "408": "The request was sent too slowly.",
    "409": "Impossible now; nothing was changed.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "No room now, or the key's limit is reached; see Retry-After.",
    "431": "The head is too large.",
    "500": "It failed in the mesh.",
    "503": "The mesh cannot do it now; see Retry-After.",
    "504": "It took too long.",
}
_RETRY_AFTER = {
    "Retry-After": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds."}
}


def document(engine: Engine, guard: Guard, routes: Sequence[Route], version: str) -> bytes:
    """The OpenAPI 3.1 document of ``routes``, as JSON. Endpoints are described by their
    docstrings, and by the tables above under their names.
    """
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\g<name>}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, guard)
    model = engine.model
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "moemesh gateway",
                "version": version,
                "description": "OpenAI-compatible API of a mesh that serves a Mixture-of-Experts "
                "model. Every error is an OpenAI error object.",
            },
            "paths": paths,
            "components": {
                "schemas": components(
                    tuple(_REQUEST.values()),
                    (*_RESPONSE.values(), ErrorObject),
                    model=model.id,
                    vocab_size=model.vocab_size,
                    context=model.context,
                ),
                "securitySchemes": {
                    "apiKey": {"type": "http", "scheme": "bearer"},
                    "adminKey": {"type": "http", "scheme": "bearer"},
                },
            },
        }
    )


def _operation(route: Route, guard: Guard) -> dict[str, Any]:
    name = route.name
    admin = route.path.startswith("/admin")
    text = " ".join((route.endpoint.__doc__ or "").split())
    operation: dict[str, Any] = {
        "operationId": f"admin_{name}" if admin else name,
        "description": text.replace("``", "`"),
        "parameters": _parameters(route),
        "responses": {"200": _answer(name), **_errors(route)},
        "security": _security(route.path, guard),
    }
    if (kind := _REQUEST.get(name)) is not None:
        operation["requestBody"] = {
            "required": name not in _OPTIONAL_BODY,
            "content": {_JSON: {"schema": reference(kind)}},
        }
    return operation


def _security(path: str, guard: Guard) -> list[dict[str, list[str]]]:
    if path in OPEN_PATHS:
        return []
    if path.startswith("/admin"):
        return [{"adminKey": []}] if guard.admins else []
    if not guard.keys:
        return []
    return [{"apiKey": []}, *([{}] if guard.anonymous else [])]


def _parameters(route: Route) -> list[dict[str, Any]]:
    found = [
        {"name": match["name"], "in": "path", "required": True, "schema": {"type": "string"}}
        for match in _PARAMETER.finditer(route.path)
    ]
    if route.name in _GENERATING:
        found.append(
            {
                "name": TIMEOUT_HEADER,
                "in": "header",
                "schema": {"type": "number", "exclusiveMinimum": 0},
                "description": "Seconds that the request may take, if less than configured.",
            }
        )
    if route.name == "placement":
        found.append({"name": "format", "in": "query", "schema": {"enum": ["sglang"]}})
    return found


def _answer(name: str) -> dict[str, Any]:
    if name == "metrics":
        return _content("Prometheus metrics.", {"text/plain": {"schema": {"type": "string"}}})
    kind = _RESPONSE.get(name)
    schema: dict[str, Any] = {"type": "object"} if kind is None else reference(kind)
    if name == "targets":
        schema = {"type": "array", "items": schema}
    content: dict[str, Any] = {_JSON: {"schema": schema}}
    if name in _GENERATING:  # with stream=true
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return _content("Done.", content)


def _errors(route: Route) -> dict[str, Any]:
    statuses = {"400", "408", "431", "503"}  # of every connection
    if route.path not in OPEN_PATHS:
        statuses |= {"401"}
    if route.path.startswith("/admin"):
        statuses |= {"403", "404", "409"}
    if route.param_convertors:
        statuses |= {"404"}
    if "POST" in (route.methods or set()):
        statuses |= {"404", "413", "415", "429"}
    if route.name in _GENERATING:
        statuses |= {"500", "504"}
    content = {_JSON: {"schema": reference(ErrorObject)}}
    return {
        status: _content(_ERRORS[status], content)
        | ({"headers": _RETRY_AFTER} if status in {"429", "503"} else {})
        for status in sorted(statuses)
    }


def _content(description: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": content}
