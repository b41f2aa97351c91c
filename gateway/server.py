"""uvicorn as the gateway runs it: no signal handlers of its own, no patience with stuck clients."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Generator
from http import HTTPStatus
from typing import ClassVar, NoReturn

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import (
    ApiError,
    HeadTooLarge,
    MalformedHttp,
    SlowRequest,
    TooManyConnections,
)

_KEEP_ALIVE_S = 65
"""Longer than the usual 60 s of load balancers, which must be the first to close."""
_LEAST_BYTES = 4096
_MAX_HEAD_BYTES = 65_536
_MAX_HEADERS = 200
_OVERHEAD = 17
"""Bytes that may come for each byte of a body, itself included: chunks of one byte take six."""


class _Config(uvicorn.Config):
    max_connections: int
    lets_go: bool
    """Each connection ends with its next answer."""


class _HeadTooLargeError(Exception):
    """Raised out of the parser's callbacks, which ends the parsing."""


class Connection(HttpToolsProtocol):
    """Parts with clients that are stuck, and answers what is no request as the API answers errors.

    Dropped is a client that takes less than 4 KiB in ``stalled_s`` while more waits for it. An
    endpoint cannot send while the transport's buffer is full: a client that stops reading would
    keep its request, and the request's room in the queue, for ever; dropped, it looks to the
    endpoint like any other that left.

    Closed is a connection without a request's whole head within ``head_s`` of its opening, of the
    head's first byte, or of an answer that did not wait for the body. uvicorn itself ends only
    connections that send nothing between requests.

    Refused are heads of more than 64 KiB or 200 headers, and as much that comes beside a body
    (trailers, chunk extensions), all of which the parser would collect without end. Refused are
    connections beyond ``max_connections``.
    """

    config: _Config

    stalled_s: ClassVar[float] = 30.0
    head_s: ClassVar[float] = 30.0
    _stalled: asyncio.TimerHandle | None = None
    _headless: asyncio.TimerHandle | None = None
    _in_head = False
    _in_message = False
    _begun = False  # a message, by the bytes being parsed
    _overhead = 0  # bytes of this message that are no body, less what its body allows
    _too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.config.max_connections:
            self._refuse(
                TooManyConnections(
                    f"The gateway has its {self.config.max_connections} connections.",
                    retry_after_s=1.0,
                )
            )
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # refused: what still arrives is not looked at
        self._begun = False
        super().data_received(data)
        # What came with the message's first bytes may have belonged to the one before.
        if self._in_message and not self._begun:
            self._overhead += len(data)
            if self._overhead > _MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(_head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_message = self._begun = True
        self._overhead = 0
        if self._headless is None:
            self._await_head()

    def on_body(self, body: bytes) -> None:
        self._overhead -= _OVERHEAD * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > _MAX_HEADERS:
            self._end_parsing()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > _MAX_HEAD_BYTES:
            self._end_parsing()
        self._in_head = False
        self._stop_awaiting_head()
        super().on_headers_complete()
        if self.config.lets_go:
            self.let_go()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._headless is None and self.cycle.response_complete and self.cycle.more_body:
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        self._refuse(_head_too_large() if self._too_large else MalformedHttp(msg))

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

    def let_go(self) -> None:
        """Close after the answer under way, if there is one."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    @property
    def busy(self) -> bool:
        """A request has begun to come whose answer is not complete."""
        return self._in_head or (self.cycle is not None and not self.cycle.response_complete)

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

    def _end_parsing(self) -> NoReturn:
        """Called back by the parser, which reports the exception as a bad request."""
        self._too_large = True
        raise _HeadTooLargeError

    def _refuse(self, error: ApiError) -> None:
        """Answer outside of any request, and close."""
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n"
        )
        head += "".join(f"{name.lower()}: {value}\r\n" for name, value in error.headers.items())
        self.transport.write(head.encode("ascii") + b"\r\n" + body)
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


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge(
        f"The request's head has more than {_MAX_HEAD_BYTES} bytes or {_MAX_HEADERS} headers."
    )


class Server(uvicorn.Server):
    """Serves ``app``. ``grace_s``: how long open requests may go on after ``should_exit``.

    ``tls``: serve https with it.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        grace_s: int,
        max_connections: int,
        tls: ssl.SSLContext | None = None,
        connection: type[Connection] = Connection,
    ) -> None:
        config = _Config(
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
            ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        )
        config.max_connections = max_connections
        config.lets_go = False
        self._config = config
        super().__init__(config)

    @property
    def lets_go(self) -> bool:
        """Whether connections end with each answer: the client's next one may lead to another
        gateway.
        """
        return self._config.lets_go

    @lets_go.setter
    def lets_go(self, lets_go: bool) -> None:
        self._config.lets_go = lets_go

    def stop_accepting(self) -> None:
        """Take no connection any more; those that are open go on until their answer is complete.

        What waits at the listening socket stays there, for whoever else listens.
        """
        self.lets_go = True
        if self.started:
            for listening in self.servers:
                listening.close()
        for connection in self._connections:
            connection.let_go()

    @property
    def busy(self) -> bool:
        """Whether some request has begun to come and is not answered."""
        return any(connection.busy for connection in self._connections)

    @property
    def _connections(self) -> list[Connection]:
        return [one for one in self.server_state.connections if isinstance(one, Connection)]

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """``run_service`` has them."""
        yield
