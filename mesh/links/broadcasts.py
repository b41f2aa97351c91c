"""Snapshots for whoever listens: PUB and SUB."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from mesh.inbox import Codec, Counters, LinkClosed, LinkError
from mesh.links.net import Dialer, EventSocket, Monitor, Net

In = TypeVar("In")
Out = TypeVar("Out")


class Publisher(Generic[Out]):
    """PUB end. A subscriber that is slow or absent misses messages; a snapshot repairs that."""

    def __init__(self, net: Net, address: str) -> None:
        """Bind; raises ``LinkError``."""
        self._raw = net.socket(zmq.PUB)
        self._net = net
        self.address = net.bind(self._raw, address)
        self.counters = Counters()
        self._encode = msgspec.msgpack.Encoder().encode
        self._monitor = Monitor(net, self._raw, self.counters, address)

    def send(self, message: Out) -> None:
        self._raw.send(self._encode(message), zmq.NOBLOCK)
        self.counters.sent += 1

    def close(self) -> None:
        self._monitor.close()
        self._raw.close()
        self._net.unbind(self.address)


class Subscriber(Generic[In]):
    """SUB end for snapshots: a newer message replaces one that was not yet received."""

    def __init__(self, net: Net, address: str, *, receives: Any, server: str = "planner") -> None:
        """Start to connect; ``server`` as for ``ClientLink``. Raises ``LinkError``."""
        socket = net.socket(zmq.SUB)
        socket.setsockopt(zmq.CONFLATE, 1)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.address = address
        self.counters = Counters()
        self._codec: Codec[In, None] = Codec(receives, address, self.counters)
        self._newest: In | None = None
        self._arrived = asyncio.Event()
        self._socket = EventSocket(net, socket, self._on_frames)
        self._dialer = Dialer(net, socket, address, server)
        self._monitor = Monitor(net, socket, self.counters, address, dialer=self._dialer)
        try:
            self._dialer.dial()
        except LinkError:
            self.close()
            raise

    async def recv(self) -> In:
        """The newest message that has not been received yet. Raises ``LinkClosed``."""
        while self._newest is None:
            if self._socket.closed:
                raise LinkClosed(f"the subscription to {self.address} is closed")
            self._arrived.clear()
            await self._arrived.wait()
        newest, self._newest = self._newest, None
        return newest

    def _on_frames(self, frames: Sequence[zmq.Frame]) -> bool:
        message = self._codec.decode([frame.bytes for frame in frames])
        if message is not None:
            self._newest = message
            self._arrived.set()
        return True

    def close(self) -> None:
        self._dialer.close()
        self._monitor.close()
        self._socket.close()
        self._arrived.set()
