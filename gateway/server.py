"""uvicorn as the gateway runs it: no signal handlers of its own, no patience with stuck clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from http import HTTPStatus
from typing import ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import ApiError, MalformedHttp, SlowRequest

_KEEP_ALIVE_S = 65
"""Longer than the usual 60 s of load balancers, which must be the first to close."""
_LEAST_BYTES = 4096


class Connection(HttpToolsProtocol):
    """Parts with clients that are stuck, and answers what is no request as the API answers errors.

    Dropped is a client that takes less than 4 KiB in ``stalled_s`` while more waits for it. An
    endpoint cannot send while the transport's buffer is full: a client that stops reading would
    keep its request, and the request's room in the queue, for ever; dropped, it looks to the
    endpoint like any other that left.

    Closed is a connection without a request's whole head within ``head_s`` of its opening, of the
    head's first byte, or of an answer that did not wait for the body. uvicorn itself ends only
    connections that send nothing between requests.
    """

    stalled_s: ClassVar[float] = 30.0
    head_s: ClassVar[float] = 30.0
    _stalled: asyncio.TimerHandle | None = None
    _headless: asyncio.TimerHandle | None = None
    _in_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        if self._headless is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_awaiting_head()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._headless is None and self.cycle.response_complete and self.cycle.more_body:
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        self._refuse(MalformedHttp(msg))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unwatch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._stop_awaiting_head()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._headless = self.loop.call_later(self.head_s, self._check_head)

    def _stop_awaiting_head(self) -> None:
        if self._headless is not None:
            self._headless.cancel()
            self._headless = None

    def _check_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # a pipelined head may wait for the answer before it
        elif self._in_head:
            self._refuse(
                SlowRequest(f"The request's head did not arrive within {self.head_s:g} s.")
            )
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer outside of any request, and close."""
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()

    def _watch(self) -> None:
        self._stalled = self.loop.call_later(
            self.stalled_s, self._check, self.transport.get_write_buffer_size()
        )

    def _unwatch(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _check(self, waited: int) -> None:
        if waited - self.transport.get_write_buffer_size() < _LEAST_BYTES:
            self.transport.abort()
        else:
            self._watch()


class Server(uvicorn.Server):
    """Serves ``app``. ``grace_s``: how long open requests may go on after ``should_exit``."""

    def __init__(
        self, app: ASGIApp, *, grace_s: int, connection: type[Connection] = Connection
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=grace_s,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """``run_service`` has them."""
        yield
