"""How a lane opens over TCP.

    expert -> router   ``Challenge``: magic, a nonce
    router -> expert   a message: ``Offer`` as over a Unix socket, a nonce of its own
    expert -> router   a message: ``Reply``

    both               values, where the lane's carrier needs a rendezvous (``ep_kernels.group``)

A message is a head (size of the body, nonce, proof) and a JSON body. The proof is the HMAC-SHA256
(RFC 2104) of both nonces and the body under the *lane key*, a secret that the expert worker draws
when it starts and that routers learn over the control plane. So neither end believes a stranger,
and nobody can use again what he has overheard. What follows on the connection is neither encrypted
nor signed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from dataclasses import dataclass
from struct import Struct
from time import monotonic
from typing import Final
from urllib.parse import urlsplit

from ep_kernels.plane import PlaneError

SCHEME: Final = "tcp://"
KEY_BYTES: Final = 32

_MAGIC: Final = 0x4D4D_4C31
"""Written in the machine's byte order, in which all frames are: the two ends' must agree."""
_CHALLENGE: Final = Struct("=I16s")
_HEAD: Final = Struct("=I16s32s")
_NONCE_BYTES: Final = 16
_MAX_BODY_BYTES: Final = 8192
_OFFER: Final = b"offer"
_REPLY: Final = b"reply"
_VALUE_OF: Final = {True: b"value of the router", False: b"value of the expert worker"}
_KEY_SIZE: Final = Struct("=H")

CHALLENGE_BYTES: Final = _CHALLENGE.size
HEAD_BYTES: Final = _HEAD.size


@dataclass(frozen=True, slots=True)
class LaneAddress:
    """``tcp://HOST:PORT#KEY``: where an expert worker takes lanes, and what lets a router in.
    Another scheme names another carrier.
    """

    host: str
    port: int
    key: bytes
    scheme: str = SCHEME

    def __str__(self) -> str:
        """Without the key: for logs and errors."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Session:
    """What the proofs of one connection's messages are made of: the lane key and both nonces."""

    key: bytes
    challenged: bytes
    own: bytes


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def read_address(address: str, scheme: str = SCHEME) -> LaneAddress:
    """Raises ``PlaneError``, which does not show a key."""
    shown = address.partition("#")[0]
    try:
        parts = urlsplit(address)
        host, port, key = parts.hostname, parts.port, bytes.fromhex(parts.fragment)
    except ValueError:
        host, port, key = None, None, b""
    if not address.startswith(scheme) or not host or not port or len(key) != KEY_BYTES:
        raise PlaneError(
            f"the address of a lane is {scheme}HOST:PORT#KEY with a key of {KEY_BYTES} bytes in "
            f"hexadecimal digits, not {shown}#..."
        )
    return LaneAddress(host, port, key, scheme)


# ---------------------------------------------------------------- both ends


def new_nonce() -> bytes:
    return secrets.token_bytes(_NONCE_BYTES)


def challenge(nonce: bytes) -> bytes:
    return _CHALLENGE.pack(_MAGIC, nonce)


def read_challenge(data: bytes) -> bytes:
    """The nonce. Raises ``PlaneError``."""
    magic, nonce = _CHALLENGE.unpack(data)
    if magic != _MAGIC:
        raise PlaneError("it is no expert worker's lane, or one of another byte order")
    return bytes(nonce)


def pack_offer(body: bytes, key: bytes, challenged: bytes, own: bytes) -> bytes:
    return _pack(_OFFER, body, key, challenged, own)


def pack_reply(body: bytes, key: bytes, challenged: bytes, own: bytes) -> bytes:
    """``challenged``, ``own``: the same two nonces, in the same order."""
    return _pack(_REPLY, body, key, challenged, own)


def body_bytes(head: bytes) -> int:
    """How much follows ``head``. Raises ``PlaneError``."""
    size: int = _HEAD.unpack(head)[0]
    if not 0 < size <= _MAX_BODY_BYTES:
        raise PlaneError(f"not a lane message: {size} bytes, at most {_MAX_BODY_BYTES}")
    return size


def read_offer(head: bytes, body: bytes, key: bytes, challenged: bytes) -> bytes:
    """Check the router's proof and return its nonce. Raises ``PlaneError``."""
    _, own, proof = _HEAD.unpack(head)
    if not hmac.compare_digest(proof, _proof(_OFFER, body, key, challenged, own)):
        raise PlaneError("it does not know the key of this worker's lanes")
    return bytes(own)


def check_reply(head: bytes, body: bytes, key: bytes, challenged: bytes, own: bytes) -> None:
    """Check the expert worker's proof. Raises ``PlaneError``."""
    _, _, proof = _HEAD.unpack(head)
    if not hmac.compare_digest(proof, _proof(_REPLY, body, key, challenged, own)):
        raise PlaneError("who answers there does not know the key of the worker's lanes")


def pack_value(session: Session, name: str, value: bytes, *, of_router: bool) -> bytes:
    """A value that one end tells the other while their lane opens."""
    encoded = name.encode()
    body = _KEY_SIZE.pack(len(encoded)) + encoded + value
    return _pack(_VALUE_OF[of_router], body, session.key, session.challenged, session.own)


def read_value(head: bytes, body: bytes, session: Session, *, of_router: bool) -> tuple[str, bytes]:
    """Check the proof of the other end's value: its name and itself. Raises ``PlaneError``."""
    _, _, proof = _HEAD.unpack(head)
    kind = _VALUE_OF[of_router]
    if not hmac.compare_digest(
        proof, _proof(kind, body, session.key, session.challenged, session.own)
    ):
        raise PlaneError("a value came with another proof than the lane's key makes")
    if len(body) < _KEY_SIZE.size:
        raise PlaneError("a value came without a name")
    end = _KEY_SIZE.size + _KEY_SIZE.unpack(body[: _KEY_SIZE.size])[0]
    try:
        return body[_KEY_SIZE.size : end].decode(), body[end:]
    except UnicodeDecodeError as error:
        raise PlaneError(f"a value has a name that is no text: {error}") from None


def _pack(kind: bytes, body: bytes, key: bytes, challenged: bytes, own: bytes) -> bytes:
    return _HEAD.pack(len(body), own, _proof(kind, body, key, challenged, own)) + body


def _proof(kind: bytes, body: bytes, key: bytes, challenged: bytes, own: bytes) -> bytes:
    return hmac.digest(key, kind + challenged + own + body, "sha256")


def receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """``count`` bytes from a connection with a time-out. Raises ``EOFError``, ``OSError``, and
    ``TimeoutError`` after the monotonic ``deadline``.
    """
    data = b""
    while len(data) < count:
        left_s = deadline - monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data
