"""The routes of the gateway: OpenAI's, vLLM's tokenizer endpoints, probes, metrics, admin."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from gateway.api.admin import AdminPages
from gateway.api.chat_completions import ChatCompletions
from gateway.api.completions import Completions
from gateway.api.engine import Engine
from gateway.api.guard import Guard
from gateway.api.http import Edge, json_response, read_body
from gateway.api.openapi import document
from gateway.api.prompts import check_ids
from gateway.api.requests import DetokenizeRequest, TokenizeRequest, parse
from gateway.api.responses import Detokenized, Model, Tokenized, encode, model_list
from gateway.chat import plain_messages
from gateway.errors import InvalidValue, Unavailable, UnsupportedField
from mesh import metrics
from mesh.admin import PlannerDesk

_VERSION = importlib.metadata.version("moemesh")


class Utilities:
    """Everything that runs no token."""

    def __init__(self, engine: Engine, registry: CollectorRegistry) -> None:
        self._engine = engine
        self._registry = registry

    def _model(self) -> Model:
        model = self._engine.model
        return Model(model.id, "model", model.created, "moemesh", model.root, model.context)

    async def models(self, http: Request) -> Response:  # noqa: ARG002
        """The one model that this mesh serves."""
        return json_response(model_list([self._model()]))

    async def model(self, http: Request) -> Response:
        """The model, if that is its id."""
        self._engine.model.check_name(http.path_params["id"])
        return json_response(encode(self._model()))

    async def tokenize(self, http: Request) -> Response:
        """Tokens of a text, or of messages by the chat template."""
        engine = self._engine
        body = await read_body(http, engine.max_body_bytes)
        request = await engine.off_loop(body, lambda: parse(body, TokenizeRequest))
        engine.model.check_name(request.model)
        special = request.add_special_tokens
        if (request.prompt is None) == (request.messages is None):
            raise InvalidValue("Give either prompt or messages.", param="prompt")
        if request.prompt is not None:
            text, special = request.prompt, special is not False
        else:
            text = await engine.off_loop(body, lambda: self._render(request))
            special = bool(special)
        ids = await engine.tokenize(text, add_special_tokens=special)
        names = await engine.spell(ids) if request.return_token_strs else None
        return json_response(encode(Tokenized(len(ids), engine.model.context, ids, names)))

    def _render(self, request: TokenizeRequest) -> str:
        template = self._engine.model.template
        if template is None:
            raise UnsupportedField("The model has no chat template.", param="messages")
        return template.render(
            plain_messages(request.messages or []),
            add_generation_prompt=request.add_generation_prompt is not False,
            variables=request.chat_template_kwargs or {},
        )

    async def detokenize(self, http: Request) -> Response:
        """Text of token ids, special tokens included."""
        body = await read_body(http, self._engine.max_body_bytes)
        request = await self._engine.off_loop(body, lambda: parse(body, DetokenizeRequest))
        model = self._engine.model
        model.check_name(request.model)
        check_ids(request.tokens, model.vocab_size, "tokens")
        return json_response(encode(Detokenized(await self._engine.detokenize(request.tokens))))

    async def tokenizer_info(self, http: Request) -> Response:  # noqa: ARG002
        """``tokenizer_config.json``, special tokens as strings, and the chat template in use."""
        model = self._engine.model
        info: dict[str, Any] = {
            "eos_token": None,
            "bos_token": None,
            "pad_token": None,
            **model.tokenizer.config,
            "chat_template": None if model.template is None else model.template.source,
        }
        return json_response(encode(info))

    async def health(self, http: Request) -> Response:  # noqa: ARG002
        """The process lives; says nothing about the mesh."""
        return json_response(encode({"status": "ok"}))

    async def ready(self, http: Request) -> Response:  # noqa: ARG002
        """200 when the mesh can run a token, else 503 with the reason."""
        why = self._engine.pool.why_not_ready()
        if why:
            raise Unavailable(f"Not ready: {why}.")
        return json_response(encode({"status": "ready"}))

    async def metrics(self, http: Request) -> Response:  # noqa: ARG002
        """Numbers for Prometheus; no prompt, key or tenant is in them."""
        return Response(
            metrics.page(self._registry), headers={"content-type": metrics.CONTENT_TYPE}
        )

    async def version(self, http: Request) -> Response:  # noqa: ARG002
        """The version of moemesh that answers."""
        return json_response(encode({"version": _VERSION}))


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    del scope, receive, send
    raise HTTPException(404)


def build_app(
    engine: Engine,
    guard: Guard,
    planner: PlannerDesk,
    registry: CollectorRegistry,
    log: FilteringBoundLogger,
) -> Edge:
    """The ASGI application."""
    utilities = Utilities(engine, registry)
    routes = [
        Route("/v1/completions", Completions(engine).completions, methods=["POST"]),
        Route("/v1/chat/completions", ChatCompletions(engine).chat_completions, methods=["POST"]),
        Route("/v1/models", utilities.models),
        Route("/v1/models/{id:path}", utilities.model),
        Route("/tokenize", utilities.tokenize, methods=["POST"]),
        Route("/detokenize", utilities.detokenize, methods=["POST"]),
        Route("/tokenizer_info", utilities.tokenizer_info),
        Route("/health", utilities.health),
        Route("/ready", utilities.ready),
        Route("/metrics", utilities.metrics),
        Route("/version", utilities.version),
        *AdminPages(planner, engine.max_body_bytes).routes(),
    ]

    async def openapi(http: Request) -> Response:  # noqa: ARG001
        """All endpoints, as OpenAPI describes them."""
        return json_response(described)

    routes.append(Route("/openapi.json", openapi))
    described = document(engine, guard, routes, _VERSION)
    router = Router(routes, redirect_slashes=False, default=_nothing)
    return Edge(router, guard, engine.meters, log, max_body_bytes=engine.max_body_bytes)
