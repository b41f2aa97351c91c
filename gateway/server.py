"""uvicorn as the gateway runs it: no signal handlers of its own, no patience with stuck clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_KEEP_ALIVE_S = 65
"""Longer than the usual 60 s of load balancers, which must be the first to close."""
_LEAST_BYTES = 4096


class Connection(HttpToolsProtocol):
    """Drops a client that takes less than 4 KiB in ``stalled_s`` while more waits for it.

    An endpoint cannot send while the transport's buffer is full. A client that stops reading
    would so keep its request, and the request's room in the queue, for ever; dropped, it looks
    to the endpoint like any other that left.
    """

    stalled_s: ClassVar[float] = 30.0
    _stalled: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unwatch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

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
