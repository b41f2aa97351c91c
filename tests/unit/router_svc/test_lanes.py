"""Where a router opens its lane to an expert worker."""

from __future__ import annotations

import msgspec
import pytest
import structlog
from ep_kernels.plane import LanePending, LaneRefused, PlaneError

from mesh.messages import Member
from mesh.settings import DataPlane
from router_svc.lanes import Lanes, reach

UNIX, TCP = "/run/e0.lanes", "tcp://10.0.0.2:7100#aa"
WORKER = Member(
    id="e0", role="expert", incarnation=3, pid=1, host="h", state="ready",
    lanes=UNIX, lanes_tcp=TCP, host_id="here",
)  # fmt: skip


@pytest.mark.parametrize(
    ("data_plane", "host_id", "addresses"),
    [
        ("auto", "here", [UNIX, TCP]),
        ("auto", "there", [TCP]),
        ("shm", "here", [UNIX]),
        ("shm", "there", [UNIX]),
        ("tcp", "here", [TCP]),
        ("tcp", "there", [TCP]),
        ("symm", "there", [UNIX]),
        ("gloo", "here", []),  # what the worker has at its port are other lanes
    ],
)
def test_shared_memory_inside_a_host_and_tcp_between_hosts(
    data_plane: DataPlane, host_id: str, addresses: list[str]
) -> None:
    assert list(reach(data_plane, host_id)(WORKER)) == addresses


@pytest.mark.parametrize("carrier", ["gloo", "nccl"])
def test_a_router_opens_lanes_of_the_kind_that_the_worker_has(carrier: DataPlane) -> None:
    address = f"{carrier}://10.0.0.2:7100#aa"
    worker = msgspec.structs.replace(WORKER, lanes="", lanes_tcp=address)
    assert list(reach(carrier, "here")(worker)) == [address]
    assert list(reach("auto", "there")(worker)) == []


class Plane:
    """Answers ``connect`` with what the test says for each address."""

    def __init__(self, outcomes: dict[str, Exception | None]) -> None:
        self.outcomes = outcomes
        self.tried: list[str] = []
        self.disconnected: list[str] = []
        self.up: dict[str, int] = {}

    def peers(self) -> dict[str, int]:
        return dict(self.up)

    def disconnect(self, peer: str) -> None:
        self.disconnected.append(peer)
        self.up.pop(peer, None)

    def connect(self, peer: str, address: str, incarnation: int, timeout_s: float) -> None:
        self.tried.append(address)
        if (error := self.outcomes[address]) is not None:
            raise error
        self.up[peer] = incarnation


@pytest.mark.parametrize(
    ("outcomes", "tried", "opened"),
    [
        ({UNIX: None}, [UNIX], True),
        # The kernel says one host, and the socket is not there: another container, say.
        ({UNIX: PlaneError("no such file"), TCP: None}, [UNIX, TCP], True),
        ({UNIX: PlaneError("no such file"), TCP: PlaneError("no route")}, [UNIX, TCP], False),
        # Who refuses has been reached.
        ({UNIX: LaneRefused("e0", "another model")}, [UNIX], False),
    ],
)
def test_what_cannot_be_reached_is_tried_at_the_next_address(
    outcomes: dict[str, Exception | None], tried: list[str], opened: bool
) -> None:
    plane = Plane(outcomes)
    lanes = Lanes(plane, lambda: 0.0, structlog.get_logger(), reach("auto", "here"))
    lanes.want([WORKER])
    assert lanes.tend(busy=False) is opened
    assert plane.tried == tried


def test_a_lane_that_opens_in_the_background_is_taken_once_it_stands() -> None:
    now = 0.0
    plane = Plane({TCP: LanePending("not yet")})
    lanes = Lanes(plane, lambda: now, structlog.get_logger(), reach("auto", "elsewhere"))
    lanes.want([WORKER])
    assert not lanes.tend(busy=True)
    assert 0.0 < lanes.next_try_s() < 0.05  # however often it was asked
    now = 0.03
    assert not lanes.tend(busy=True)
    assert 0.0 < lanes.next_try_s() < 0.05
    plane.outcomes[TCP] = None
    now = 0.06
    assert lanes.tend(busy=True)
    assert lanes.serving() == {"e0"}


@pytest.mark.parametrize("up", [True, False])
def test_a_worker_that_leaves_takes_its_lane_along_or_the_attempt_at_one(*, up: bool) -> None:
    plane = Plane({UNIX: None if up else PlaneError("?"), TCP: LanePending("not yet")})
    lanes = Lanes(plane, lambda: 0.0, structlog.get_logger(), reach("auto", "here"))
    lanes.want([WORKER])
    lanes.tend(busy=True)
    assert lanes.want([]) == (["e0"] if up else [])
    assert "e0" in plane.disconnected
    assert plane.up == {}
