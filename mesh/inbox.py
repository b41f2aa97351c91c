"""What waits between a link's socket and the task that receives: decoded, counted, bounded.

API
    ``Inbox(limit, resume)``   ``put`` says when it is full; ``await get()``; resumes at half
    ``Codec(receives, address, counters)``    msgpack; what is no message is counted, not raised
    ``Counters``               what a link has done; ``LinkError``, ``LinkClosed``
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import structlog

In = TypeVar("In")
Out = TypeVar("Out")
T = TypeVar("T")


class LinkError(Exception):
    """The link cannot be opened or used; the message names the address."""


class LinkClosed(LinkError):
    """``recv`` on a link that was closed."""


@dataclass(slots=True)
class Counters:
    """What a link has done since it was opened."""

    received: int = 0
    sent: int = 0
    undecodable: int = 0
    unsent: int = 0
    """Messages that ``send`` refused."""
    refused: int = 0
    """Messages that their sender's key does not allow."""
    handshakes_failed: int = 0
    """Connections that did not come about, on account of keys or of what is no ZeroMQ."""


class Inbox(Generic[T]):
    """The bounded queue between a socket's reader and the one task that receives."""

    def __init__(self, limit: int, resume: Callable[[], None]) -> None:
        self._items: deque[T] = deque()
        self._limit = limit
        self._resume = resume
        self._waiter: asyncio.Future[None] | None = None
        self._full = False
        self._closed = False

    def put(self, item: T) -> bool:
        """Returns False once the queue is full; the item was taken all the same."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._full = len(self._items) >= self._limit
        return not self._full

    async def get(self) -> T:
        while not self._items:
            if self._closed:
                raise LinkClosed("the link is closed")
            assert self._waiter is None or self._waiter.done(), "one task receives from a link"
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._items.popleft()
        if self._full and len(self._items) <= self._limit // 2:
            self._full = False
            self._resume()
        return item

    def close(self) -> None:
        self._closed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Codec(Generic[In, Out]):
    """msgpack both ways, counting what cannot be decoded."""

    def __init__(self, receives: Any, address: str, counters: Counters) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(receives).decode
        self._counters = counters
        self._log = structlog.get_logger("mesh.links").bind(address=address)

    def encode(self, message: Out) -> bytes:
        return self._encode(message)

    def decode(self, frames: Sequence[bytes]) -> In | None:
        """The message in ``frames``, which must be one; None when it is none of ours."""
        try:
            if len(frames) != 1:
                raise msgspec.DecodeError(f"{len(frames)} frames, expected 1")
            message: In = self._decode(frames[0])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            count = self._counters.undecodable = self._counters.undecodable + 1
            if count & (count - 1) == 0:
                size = sum(map(len, frames))
                self._log.warning(
                    "link.undecodable", error=str(error), size_bytes=size, count=count
                )
            return None
        self._counters.received += 1
        return message

    def refuse(self, reason: str) -> None:
        """Count and log a message that its sender must not send."""
        count = self._counters.refused = self._counters.refused + 1
        if count & (count - 1) == 0:
            self._log.warning("link.refused", reason=reason, count=count)
