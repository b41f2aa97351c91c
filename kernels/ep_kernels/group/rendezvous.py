"""How a lane's two ends find each other's process groups: a store on the lane's own connection.

torch.distributed lets the ranks of a group meet in a store of keys and values, which is usually a
server that anybody may write to. Here each end keeps the values, tells them to the other on the
connection over which the lane opens, and proves each with the lane key. So who does not know the
key has no part in it, nothing more listens, and the store ends with the opening.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from time import monotonic
from typing import Any, Final

import torch
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import Work

from ep_kernels.group.backend import Backend
from ep_kernels.plane import PlaneError
from ep_kernels.tcp import handshake
from ep_kernels.tcp.handshake import Session

_OPENED: Final = "opened"
_MOST_VALUES: Final = 64
_ROUTER, _EXPERT = 0, 1


class LaneStore(Store):
    """The values of both ends. One thread uses it, until ``deadline`` (monotonic) at most."""

    def __init__(
        self, connection: socket.socket, session: Session, deadline: float, *, of_router: bool
    ) -> None:
        super().__init__()
        self._connection: socket.socket | None = connection
        self._session = session
        self._deadline = deadline
        self.of_router = of_router
        self._values: dict[str, bytes] = {}
        self._received = 0
        self.error: Exception | None = None
        """What a call raised; through a group's constructor it comes as something else."""

    def set(self, key: str, value: bytes | str) -> None:
        """Raises ``OSError``."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        if self._connection is None:
            return
        message = handshake.pack_value(self._session, key, data, of_router=self.of_router)
        try:
            self._connection.settimeout(max(1e-3, self._deadline - monotonic()))
            self._connection.sendall(message)
        except OSError as error:
            self.error = error
            raise

    def get(self, key: str) -> bytes:
        """Raises ``PlaneError``, ``OSError``, ``EOFError``."""
        try:
            while key not in self._values:
                self._receive(key)
        except Exception as error:
            self.error = error
            raise
        return self._values[key]

    def wait(self, keys: list[str], _: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def seal(self) -> None:
        """The connection belongs to somebody else from now on."""
        self._connection = None

    def _receive(self, wanted: str) -> None:
        connection = self._connection
        if connection is None:
            raise PlaneError(f"the lane is open, and nobody has set {wanted!r}")
        if self._received >= _MOST_VALUES:
            raise PlaneError(f"{_MOST_VALUES} values have come, and none of them is {wanted!r}")
        self._received += 1
        head = handshake.receive_exactly(connection, handshake.HEAD_BYTES, self._deadline)
        size = handshake.body_bytes(head)
        body = handshake.receive_exactly(connection, size, self._deadline)
        key, value = handshake.read_value(head, body, self._session, of_router=not self.of_router)
        if key == _OPENED != wanted:
            raise PlaneError(f"the expert worker has given up: {value.decode(errors='replace')}")
        self._values[key] = value


class Groups:
    """A lane's two groups of two ranks: one carries rows out to the expert worker, one back. With a
    single one NCCL would have both ends wait for the other to receive first.
    """

    def __init__(self, backend: Backend, store: LaneStore, out: Any, back: Any) -> None:
        self._backend = backend
        self._peer = _EXPERT if store.of_router else _ROUTER
        self._sends, self._receives = (out, back) if self._peer == _EXPERT else (back, out)
        self._store = store  # the groups may ask it as long as they are there

    def send(self, rows: torch.Tensor) -> Work:
        """Queue contiguous rows; hold what is returned until they have arrived. Never blocks.
        Raises ``RuntimeError``.
        """
        work: Work = self._sends.send([rows], self._peer, 0)
        return work

    def receive(self, rows: torch.Tensor, timeout_s: float) -> None:
        """Block until the peer's next rows lie there. Raises ``RuntimeError``."""
        self._backend.finish(self._receives.recv([rows], self._peer, 0), timeout_s)

    def give_up(self) -> None:
        """End the peer's and our own operations. Blocks, for as long as the back end takes."""
        for group in (self._sends, self._receives):
            self._backend.give_up(group, self._peer)


def meet(backend: Backend, store: LaneStore, connection: socket.socket, deadline: float) -> Groups:
    """Make a lane's groups together with the other end, and see rows pass both ways. Blocks until
    ``deadline`` at most. Raises ``PlaneError``, ``OSError``, ``EOFError``, ``TimeoutError``.
    """
    host = connection.getsockname()[0]
    at_router = store.of_router
    rank = _ROUTER if at_router else _EXPERT
    _check_apart(backend, store, rank)
    try:
        out, back = (
            backend.make(PrefixStore(name, store), rank, host, max(1e-3, deadline - monotonic()))
            for name in ("out", "back")
        )
        groups = Groups(backend, store, out, back)
        with backend.receiving():
            # Some back ends connect with the first rows; here they cost no message its time.
            row = torch.zeros(1, device=backend.device)
            sent = []
            for sends in (at_router, not at_router):
                if sends:
                    sent.append(groups.send(row))
                else:
                    groups.receive(torch.empty_like(row), max(1e-3, deadline - monotonic()))
            for work in sent:
                backend.finish(work, max(1e-3, deadline - monotonic()))
    except RuntimeError as error:
        if store.error is not None:
            raise store.error from error
        if monotonic() > deadline:
            raise TimeoutError from error
        raise PlaneError(f"{backend.name}: {first_line(error)}") from error
    return groups


def _check_apart(backend: Backend, store: LaneStore, rank: int) -> None:
    """The back end's own word for this is "invalid usage"."""
    if not backend.alone_on:
        return
    store.set(f"device/{rank}", backend.alone_on)
    if store.get(f"device/{1 - rank}").decode(errors="replace") == backend.alone_on:
        raise PlaneError(
            f"both ends of the lane compute on {backend.device}, which {backend.name} cannot join "
            "with itself: router.device and expert.device must name two GPUs, or "
            "network.data_plane = symm"
        )


def admitted(store: LaneStore) -> str:
    """At the router: wait until the expert worker serves the lane. Returns its refusal."""
    return store.get(_OPENED).decode(errors="replace")


def admission(session: Session, refusal: str = "") -> bytes:
    """At the expert worker: what ``admitted`` waits for."""
    return handshake.pack_value(session, _OPENED, refusal.encode(), of_router=False)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
