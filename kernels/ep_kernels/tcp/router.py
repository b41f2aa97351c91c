"""``TcpRouterPlane``: a router's end of lanes over TCP and in shared memory."""

from __future__ import annotations

import socket

from ep_kernels.plane import LanePending, LaneShape, PlaneError
from ep_kernels.shm.doorbell import SPIN_NS
from ep_kernels.shm.handshake import Offer
from ep_kernels.shm.lane import LaneMemory
from ep_kernels.shm.router import RouterLane, ShmRouterPlane
from ep_kernels.tcp.carrier import BEATS, Carrier, Kind, Lost, own_memory
from ep_kernels.tcp.dial import Dial
from ep_kernels.tcp.handshake import SCHEME, LaneAddress, read_address


class TcpRouterPlane(ShmRouterPlane):
    """A ``ShmRouterPlane`` that also opens lanes to addresses ``tcp://HOST:PORT#KEY``.

    ``connect`` to such an address raises ``LanePending`` when its time-out has passed; the next
    call with the same address and incarnation takes the lane that has come about. A peer that says
    nothing for ``silence_s`` seconds is lost.
    """

    _scheme: str = SCHEME

    def __init__(
        self,
        router_id: str,
        incarnation: int,
        shape: LaneShape,
        digest: str,
        *,
        silence_s: float = 3.0,
        spin_ns: int = SPIN_NS,
    ) -> None:
        super().__init__(router_id, incarnation, shape, digest, spin_ns=spin_ns)
        self._silence_s = silence_s
        self._dials: dict[str, Dial] = {}
        self._watcher.every(silence_s / BEATS, self._tick)

    def connect(self, peer: str, address: str, incarnation: int, timeout_s: float) -> None:
        if not address.startswith(self._scheme):
            super().connect(peer, address, incarnation, timeout_s)
            return
        self._disconnect_lane(peer)
        dial = self._dial(peer, read_address(address, self._scheme), incarnation)
        if not dial.wait(timeout_s):
            raise LanePending(f"{peer} at {dial.address} has not answered so far")
        self._dials.pop(peer, None)
        lane, carrier = self._over(dial, peer, incarnation)
        try:
            self._add(lane, carrier.on_event)
        except PlaneError:
            carrier.close()
            raise

    def disconnect(self, peer: str) -> None:
        if (dial := self._dials.pop(peer, None)) is not None:
            dial.cancel()
        self._disconnect_lane(peer)

    def close(self) -> None:
        dials = tuple(self._dials.values())
        for dial in dials:
            dial.cancel()
        for dial in dials:
            dial.join()
        self._dials.clear()
        super().close()

    def _over(self, dial: Dial, peer: str, incarnation: int) -> tuple[RouterLane, Carrier]:
        """The lane that a dial has come to. Raises ``LaneRefused``, ``PlaneError``."""
        connection = dial.result()

        def lost(reason: str, corrupt: bool) -> None:
            self.corrupt_lanes += corrupt
            self._lose(lane, reason)

        carrier = self._carry(dial, connection, lost)
        lane = RouterLane(peer, incarnation, connection, 0, carrier.memory, carrier, carrier.close)
        return lane, carrier

    def _new_dial(self, address: LaneAddress, offer: Offer) -> Dial:
        return Dial(address, offer, self._silence_s)

    def _carry(self, dial: Dial, connection: socket.socket, lost: Lost) -> Carrier:  # noqa: ARG002
        """The carrier of the lane that ``dial`` has opened on ``connection``."""
        mapping = own_memory(self._layout.total_bytes)
        return Carrier(
            connection,
            mapping,
            LaneMemory(mapping, self._layout),
            Kind.REQUEST,
            self._watcher,
            self._doorbell,
            lost,
        )

    def _disconnect_lane(self, peer: str) -> None:
        super().disconnect(peer)

    def _dial(self, peer: str, address: LaneAddress, incarnation: int) -> Dial:
        """The attempt under way to reach just this process there, else a new one."""
        offer = self._offer(peer, incarnation, sender=0)
        dial = self._dials.get(peer)
        if dial is not None and (dial.address, dial.offer) == (address, offer):
            return dial
        if dial is not None:
            dial.cancel()
        dial = self._dials[peer] = self._new_dial(address, offer)
        return dial

    def _tick(self) -> None:
        for lane in self._lanes.values():
            if isinstance(lane.bell, Carrier):
                lane.bell.tick()
