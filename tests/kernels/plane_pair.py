"""A router's and an expert worker's plane in one process, and the lane between them."""

from __future__ import annotations

import time
from pathlib import Path

from ep_kernels.group import GlooBackend, GroupExpertPlane, GroupRouterPlane
from ep_kernels.plane import LaneShape
from ep_kernels.shm import ShmExpertPlane, ShmRouterPlane
from ep_kernels.tcp import TcpExpertPlane, TcpRouterPlane
from lane_peer import CAPACITY, DIGEST, HIDDEN, KEY, RING, TOP_K, serve

DEADLINE_S = 20.0
SHAPE = LaneShape(HIDDEN, TOP_K, CAPACITY, RING)


class Pair:
    """``kind``: ``shm``, ``tcp``, ``gloo``, or ``gloo-device`` whose rows lie where the interpreter
    computes. Router r0 of incarnation 7, expert worker e0 of 5.
    """

    def __init__(self, directory: Path, kind: str = "shm", shape: LaneShape = SHAPE) -> None:
        self.kind = kind
        self.expert: ShmExpertPlane
        if kind == "shm":
            self.address = str(directory / "e0")
            self.expert = ShmExpertPlane("e0", 5, self.address, HIDDEN, DIGEST, max_lanes=2)
        else:
            tcp = self._far()
            self.expert = tcp
            self.address = f"{kind.partition('-')[0]}://127.0.0.1:{tcp.port}#{KEY.hex()}"
        self.router = self.new_router("r0", 7, shape)
        self.connect(self.router)

    def new_router(
        self, name: str, incarnation: int = 1, shape: LaneShape = SHAPE, digest: str = DIGEST
    ) -> ShmRouterPlane:
        if self.kind.startswith("gloo"):
            return GroupRouterPlane(name, incarnation, shape, digest, self._backend())
        kind = ShmRouterPlane if self.kind == "shm" else TcpRouterPlane
        return kind(name, incarnation, shape, digest)

    def _far(self) -> TcpExpertPlane:
        places = {"host": "127.0.0.1", "key": KEY}
        if self.kind.startswith("gloo"):
            return GroupExpertPlane(
                "e0", 5, HIDDEN, DIGEST, max_lanes=2, backend=self._backend(), **places
            )
        return TcpExpertPlane("e0", 5, "", HIDDEN, DIGEST, max_lanes=2, **places)

    def _backend(self) -> GlooBackend:
        return GlooBackend(on_device=self.kind == "gloo-device")

    def connect(self, router: ShmRouterPlane, peer: str = "e0", incarnation: int = 5) -> None:
        router.connect(peer, self.address, incarnation, DEADLINE_S)

    def close(self) -> None:
        self.router.close()
        self.expert.close()

    def arrivals(self, count=1):
        return self._collect(self.expert, count)

    def answers(self, count=1):
        return self._collect(self.router, count)

    def _collect(self, plane, count):
        deadline = time.monotonic() + DEADLINE_S
        found = plane.poll()
        while len(found) < count:
            assert time.monotonic() < deadline, "nothing came"
            plane.wait(DEADLINE_S)
            found += plane.poll()
        assert len(found) == count
        return found

    def serve(self, count=1):
        for arrival in self.arrivals(count):
            self.expert.answer(arrival, serve(arrival), 7, 11)
