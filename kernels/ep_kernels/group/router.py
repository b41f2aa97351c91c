"""``GroupRouterPlane``: a router's end of lanes over process groups."""

from __future__ import annotations

import socket
from typing import ClassVar

from ep_kernels.group.backend import Backend
from ep_kernels.group.carrier import GroupCarrier, forget_ended, join_all
from ep_kernels.group.memory import GroupMemory, new_memory
from ep_kernels.group.rendezvous import Groups, LaneStore, admitted, meet
from ep_kernels.plane import LaneRefused, LaneShape, PlaneError
from ep_kernels.shm.doorbell import SPIN_NS
from ep_kernels.shm.handshake import Offer
from ep_kernels.shm.lane import LaneMemory
from ep_kernels.tcp.carrier import Carrier, Kind, Lost
from ep_kernels.tcp.dial import Dial
from ep_kernels.tcp.handshake import LaneAddress, Session, read_address
from ep_kernels.tcp.router import TcpRouterPlane


class GroupDial(Dial):
    """Also makes the lane's groups with the other end."""

    def __init__(
        self, address: LaneAddress, offer: Offer, silence_s: float, backend: Backend
    ) -> None:
        self._backend = backend
        self.limit_s = backend.limit_s
        self.groups: Groups | None = None
        super().__init__(address, offer, silence_s)

    def _greet(self, connection: socket.socket, deadline: float) -> Session:
        session = super()._greet(connection, deadline)
        store = LaneStore(connection, session, deadline, of_router=True)
        self.groups = meet(self._backend, store, connection, deadline)
        if refusal := admitted(store):
            raise LaneRefused(self.offer.expert, refusal)
        store.seal()
        return session


class GroupRouterPlane(TcpRouterPlane):
    """``RouterPlane`` over process groups, to addresses ``gloo://HOST:PORT#KEY`` (or ``nccl://``),
    after the back end's name. ``connect`` raises ``LanePending`` as a ``TcpRouterPlane`` does.

    The x of a part, and what of it ``rows`` picks, lie on ``backend.device``, and so do answers.
    """

    _memory: ClassVar[type[LaneMemory]] = GroupMemory

    def __init__(
        self,
        router_id: str,
        incarnation: int,
        shape: LaneShape,
        digest: str,
        backend: Backend,
        *,
        silence_s: float = 3.0,
        spin_ns: int = SPIN_NS,
    ) -> None:
        self._backend = backend
        self.on_device = backend.on_device
        self._scheme = f"{backend.name}://"
        self._carriers: list[GroupCarrier] = []
        super().__init__(
            router_id, incarnation, shape, digest, silence_s=silence_s, spin_ns=spin_ns
        )

    def connect(self, peer: str, address: str, incarnation: int, timeout_s: float) -> None:
        read_address(address, self._scheme)  # of no other kind
        super().connect(peer, address, incarnation, timeout_s)

    def close(self) -> None:
        super().close()
        join_all(self._carriers)

    def _tick(self) -> None:
        super()._tick()
        forget_ended(self._carriers)

    def _new_dial(self, address: LaneAddress, offer: Offer) -> Dial:
        return GroupDial(address, offer, self._silence_s, self._backend)

    def _carry(self, dial: Dial, connection: socket.socket, lost: Lost) -> Carrier:
        assert isinstance(dial, GroupDial), "_new_dial made it"
        groups, dial.groups = dial.groups, None
        assert groups is not None, "a dial that has a result has its groups"
        try:
            memory = new_memory(self._layout, self._backend)
        except (OSError, RuntimeError) as error:
            connection.close()
            raise PlaneError(f"the lane's memory: {error}") from error
        carrier = GroupCarrier(
            connection,
            memory,
            Kind.REQUEST,
            self._watcher,
            self._doorbell,
            lost,
            groups,
            self._backend,
            self._silence_s,
        )
        self._carriers.append(carrier)
        return carrier
