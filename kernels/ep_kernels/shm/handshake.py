"""How a lane opens: one message each way over a Unix socket of packets.

    router -> expert   ``Offer``   + memfds: the lane, the router's doorbell; with ``symm`` a third
                                   descriptor, of what its rows lie in
    expert -> router   ``Reply``   + memfd: the expert worker's doorbell (when accepted)

Messages are small JSON objects with a protocol number. The connection stays open and silent;
its end tells each side that the other is gone.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, TypeVar

import torch

from ep_kernels.plane import LaneShape, PlaneError

PROTOCOL: Final = 2
MAX_PATH_BYTES: Final = 107
"""Longest path of a Unix socket on Linux."""

_MAX_MESSAGE_BYTES: Final = 8192
_WIRE_NAMES: Final = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_WIRES: Final = {name: dtype for dtype, name in _WIRE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Offer:
    """A router offers a lane to one incarnation of an expert worker."""

    router: str
    router_incarnation: int
    expert: str
    expert_incarnation: int
    digest: str
    sender: int
    """The expert worker's sender index on the router's doorbell; 0 where it gets none."""
    hidden: int
    top_k: int
    capacity_tokens: int
    ring_slots: int
    exact: bool
    wire: str
    protocol: int = PROTOCOL

    def shape(self) -> LaneShape:
        """Raises ``PlaneError`` for an unknown wire dtype."""
        if self.wire not in _WIRES:
            raise PlaneError(f"wire dtype {self.wire!r} is not one of {sorted(_WIRES)}")
        return LaneShape(
            hidden=self.hidden,
            top_k=self.top_k,
            capacity_tokens=self.capacity_tokens,
            ring_slots=self.ring_slots,
            exact=self.exact,
            wire=_WIRES[self.wire],
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """``sender`` is the router's sender index on the expert worker's doorbell; an empty
    ``refusal`` accepts.
    """

    sender: int
    refusal: str = ""
    protocol: int = PROTOCOL


_Message = TypeVar("_Message", Offer, Reply)


def wire_name(wire: torch.dtype) -> str:
    return _WIRE_NAMES[wire]


def check_path(path: str) -> None:
    """Raise ``PlaneError`` when no Unix socket can have this path."""
    length = len(os.fsencode(path))
    if not 0 < length <= MAX_PATH_BYTES:
        raise PlaneError(
            f"the path of a Unix socket has 1 to {MAX_PATH_BYTES} bytes, {path!r} has {length}"
        )


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(connection: socket.socket, message: Offer | Reply, fds: list[int]) -> None:
    """Send one message; the kernel duplicates ``fds``. Raises ``OSError``."""
    socket.send_fds(connection, [encode(message)], fds)


def receive(
    connection: socket.socket, kind: type[_Message], fd_count: int
) -> tuple[_Message, list[int]]:
    """Receive one message; the caller owns the returned fds.

    Raises ``OSError`` from the socket, ``EOFError`` when the peer closed it, and ``PlaneError``
    for anything that is not a ``kind`` of our protocol with ``fd_count`` fds (none is left open).
    A refusal comes without fds.
    """
    data, fds, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 8, socket.MSG_CMSG_CLOEXEC)
    try:
        if not data:
            raise EOFError
        message = decode(data, kind)
        expected = 0 if isinstance(message, Reply) and message.refusal else fd_count
        if len(fds) != expected:
            raise PlaneError(f"{kind.__name__} came with {len(fds)} fds, expected {expected}")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return message, fds


def encode(message: Offer | Reply) -> bytes:
    return json.dumps(asdict(message)).encode()


def decode(data: bytes, kind: type[_Message]) -> _Message:
    """Raises ``PlaneError`` for anything that is not a ``kind`` of our protocol."""
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PlaneError(f"not a lane message: {error}") from error
    if not isinstance(found, dict):
        raise PlaneError(f"not a lane message: {type(found).__name__}")
    # The number comes first: another protocol may have other fields.
    if found.get("protocol") != PROTOCOL:
        raise PlaneError(f"lane protocol {found.get('protocol')!r}, expected {PROTOCOL}")
    types = {"str": str, "int": int, "bool": bool}
    for field in fields(kind):
        value = found.get(field.name)
        if type(value) is not types[str(field.type)]:
            raise PlaneError(f"{kind.__name__}.{field.name} is {value!r}, expected {field.type}")
    return kind(**{field.name: found[field.name] for field in fields(kind)})
