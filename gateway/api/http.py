"""The HTTP edge around the endpoints: bodies in, errors and event streams out.

``Edge`` wraps the router: it keeps or makes the request's id, asks the guard whose request it is,
turns errors into OpenAI's error objects, counts and logs. ``EventStream`` sends server-sent events.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from gateway.api.guard import OPEN_PATHS, Guard
from gateway.api.responses import error_frame
from gateway.errors import (
    ApiError,
    BodyTooLarge,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    SlowRequest,
    UnsupportedEncoding,
    shown,
)
from gateway.generation import ClientGone
from gateway.meters import Meters

BODY_TIMEOUT_S = 30.0
_CUT_OFF = 8
"""How many times the accepted size a body may have to be read, and dropped, to its end."""
_CLOSE = {"Connection": "close"}
"""With an answer to a body that was not read to its end."""
_KEPT_ID = re.compile(r"[\x21-\x7e]{1,128}")
_BODIES = 16
"""How many bodies of the accepted size may be held at once, all requests together."""
_LOGGED_PATH_CHARACTERS = 200


def json_response(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, media_type="application/json")


class BodyBudget:
    """Bytes of bodies that all requests together may hold: those being read, and those whose
    request is not yet admitted or answered.
    """

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self, size: int) -> None:
        """Raises ``Overloaded`` when so much is not left."""
        if size > self._left:
            raise Overloaded(
                "The gateway is reading as much as it can hold.",
                retry_after_s=1.0,
                headers=_CLOSE,
            )
        self._left -= size

    def give(self, size: int) -> None:
        self._left += size


class HeldBody:
    """One request's part of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._size = 0

    def take(self, size: int) -> None:
        self._budget.take(size)
        self._size += size

    def release(self) -> None:
        """The body is dropped, or another bound now holds for what was made of it."""
        self._budget.give(self._size)
        self._size = 0


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, within the request's ``HeldBody``.

    Raises ``Overloaded``, ``BodyTooLarge``, ``SlowRequest``, ``UnsupportedEncoding``, or
    ``ClientGone`` when the client left before its end.
    A body that is somewhat too large is read to its end, because most clients look for an answer
    only after they have sent all; one that is much too large is cut off.
    """
    chunks: list[bytes] = []
    size = 0
    more = True
    held: HeldBody = request.state.held
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while more and size <= _CUT_OFF * max_bytes:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                more = message.get("more_body", False)
                size += len(chunk)
                if size <= max_bytes:
                    held.take(len(chunk))
                    chunks.append(chunk)
                else:
                    chunks.clear()
                    held.release()
    except TimeoutError:
        raise SlowRequest(
            f"The body did not arrive within {BODY_TIMEOUT_S:g} s.", headers=_CLOSE
        ) from None
    if size > max_bytes:
        raise BodyTooLarge(
            f"The body has more than {max_bytes} bytes.", headers=_CLOSE if more else None
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise UnsupportedEncoding(
            f"Content-Encoding {shown(encoding)!r} is not supported; send the body as it is."
        )
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class EventStream(Response):
    """Server-sent events; ``frames`` yields whole events.

    The status goes out with the first frame, so that an error before it has its own status;
    one after it becomes an ``error`` event and the stream ends without ``[DONE]``.
    """

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        self._frames = frames
        # No content-length: the length is not known.
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        started = False
        try:
            async with contextlib.aclosing(self._frames) as frames:
                async for frame in frames:
                    if not started:
                        started = True
                        await self._start(send)
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
        except ApiError as error:
            if not started:
                raise
            await send(
                {
                    "type": "http.response.body",
                    "body": error_frame(error.body()),
                    "more_body": True,
                }
            )
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )


class Edge:
    """The outermost ASGI application; see the module's docstring.

    ``scope["state"]`` gains ``request_id``, ``log`` (bound to it), ``tenant`` and ``held`` (a
    ``HeldBody``) for the endpoints.
    """

    def __init__(
        self,
        app: ASGIApp,
        guard: Guard,
        meters: Meters,
        log: FilteringBoundLogger,
        *,
        max_body_bytes: int,
    ) -> None:
        self._app = app
        self._guard = guard
        self._bodies = BodyBudget(_BODIES * max_body_bytes)
        self._meters = meters
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started_at = time.monotonic()
        request_id = _request_id(scope)
        log = self._log.bind(trace=request_id)
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["log"] = log
        held = state["held"] = HeldBody(self._bodies)
        path = scope["path"][:_LOGGED_PATH_CHARACTERS]
        scope["app"] = self  # lets Starlette's router raise HTTPException instead of answering
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode("ascii")),
                ]
            await send(message)

        try:
            await self._answer(scope, receive, tagged, log)
        except ClientGone:
            status = 499  # nginx's code: the client left before the answer
        except Exception:
            log.exception("request.failed", path=path)
            if status:
                raise  # the answer has begun: the server closes the connection
            await error_response(ApiError("The gateway failed on this request."))(
                scope, receive, tagged
            )
        finally:
            held.release()
            endpoint = getattr(scope.get("endpoint"), "__name__", "none")
            self._meters.http_requests.labels(endpoint, str(status)).inc()
            # Probes come every few seconds.
            write = log.debug if scope["path"] in OPEN_PATHS else log.info
            write(
                "request.answered",
                method=scope["method"],
                path=path,
                status=status,
                duration_ms=round((time.monotonic() - started_at) * 1000, 1),
                **state.get("facts", {}),
            )

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, log: FilteringBoundLogger
    ) -> None:
        try:
            tenant = scope["state"]["tenant"] = self._guard.check(scope)
            if tenant is not None:
                scope["state"]["facts"] = {"tenant": tenant.name}
            await self._app(scope, receive, send)
        except HTTPException as error:
            if error.status_code == 405:
                refusal: ApiError = MethodNotAllowed(
                    f"{scope['method']} is not allowed for {shown(scope['path'])}."
                )
                refusal.headers = dict(error.headers or {})
            else:
                refusal = NotFound(f"There is nothing at {shown(scope['path'])}.")
            await error_response(refusal)(scope, receive, send)
        except ApiError as error:
            if error.status >= 500 and scope["path"] not in OPEN_PATHS:
                log.warning("request.refused", status=error.status, reason=error.message)
            await error_response(error)(scope, receive, send)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            if _KEPT_ID.fullmatch(text):
                return text
    return uuid.uuid4().hex
