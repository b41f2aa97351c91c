"""What is particular to lanes in shared memory; both ends in one process."""

from __future__ import annotations

import json
import os
import socket
import stat
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from by_hand import an_offer
from ep_kernels.plane import AnswerStatus, LaneLost, LaneShape, PlaneError
from ep_kernels.shm import ShmExpertPlane, ShmRouterPlane, handshake, memory
from ep_kernels.shm.doorbell import BELL_BYTES, Bell, Doorbell, ring_all
from ep_kernels.shm.layout import lay_out
from lane_peer import CAPACITY, DIGEST, HIDDEN, TOP_K, part_of
from plane_pair import DEADLINE_S, SHAPE, Pair


@pytest.fixture
def pair(tmp_path):
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def test_the_oldest_part_comes_first_over_all_lanes(pair):
    second = ShmRouterPlane("r1", 1, SHAPE, DIGEST)
    second.connect("e0", pair.address, 5, DEADLINE_S)
    for step, plane in enumerate([second, pair.router, second, pair.router, pair.router]):
        assert plane.try_send("e0", part_of(1, step)) is not None
    assert [arrival.step for arrival in pair.arrivals(5)] == [0, 1, 2, 3, 4]
    second.close()


def corrupt_tokens(lane, slot):
    slot.write_request(slot.read_request()._replace(tokens=CAPACITY + 1))


def corrupt_negative_tokens(lane, slot):
    slot.write_request(slot.read_request()._replace(tokens=-1))


def corrupt_pairs(lane, slot):
    slot.write_request(slot.read_request()._replace(pairs=CAPACITY * TOP_K + 1))


def corrupt_pair_token(lane, slot):
    slot.pair_token[0] = 3


def corrupt_negative_pair_token(lane, slot):
    slot.pair_token[0] = -1


def corrupt_flag(lane, slot):
    lane.memory.request_flags[slot.index] += 1


CORRUPTIONS = [
    corrupt_tokens,
    corrupt_negative_tokens,
    corrupt_pairs,
    corrupt_pair_token,
    corrupt_negative_pair_token,
    corrupt_flag,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda function: function.__name__)
def test_a_corrupt_part_costs_its_lane_only(pair, corrupt):
    other = ShmRouterPlane("r1", 1, SHAPE, DIGEST)
    other.connect("e0", pair.address, 5, DEADLINE_S)
    pair.router.try_send("e0", part_of(3))
    lane = pair.router._lanes["e0"]
    corrupt(lane, lane.in_flight[0].slot)
    assert pair.expert.poll() == []
    assert pair.expert.corrupt_lanes == 1
    assert pair.expert.peers() == ["r1"]
    while not (lost := pair.router.lost()):
        pair.router.wait(DEADLINE_S)
    assert lost[0].peer == "e0"
    assert other.try_send("e0", part_of(3)) is not None
    assert len(pair.arrivals()) == 1
    other.close()


def test_a_slot_written_before_its_answer_is_corrupt(pair):
    pair.router.try_send("e0", part_of(3))
    pair.arrivals()
    lane = pair.router._lanes["e0"]
    lane.memory.request_flags[lane.in_flight[0].slot.index] = 2
    assert pair.expert.poll() == []
    assert pair.expert.corrupt_lanes == 1


def test_a_corrupt_answer_costs_its_lane_only(pair):
    pair.router.try_send("e0", part_of(3))
    [arrival] = pair.arrivals()
    pair.expert.answer(arrival, AnswerStatus.OK, 7, 0)
    lane = pair.router._lanes["e0"]
    lane.in_flight[0].slot.write_answer(1, 9, 0, 0, 3)
    assert pair.router.poll() == []
    assert pair.router.corrupt_lanes == 1
    assert "status 9" in pair.router.lost()[0].reason
    assert pair.router.peers() == {}


def test_an_impossible_lane_is_refused_with_its_arithmetic():
    with pytest.raises(PlaneError, match=r"4 ring slots x \(65536 tokens x 7168 hidden x 2 bytes"):
        lay_out(LaneShape(7168, 8, 65536, 4, wire=torch.bfloat16))
    with pytest.raises(PlaneError, match="at least 1"):
        lay_out(LaneShape(7168, 8, 0, 4))
    with pytest.raises(PlaneError, match="ring slots, not 65"):
        lay_out(LaneShape(8, 1, 1, 65))
    with pytest.raises(PlaneError, match="float64"):
        ShmRouterPlane("r", 1, replace(SHAPE, wire=torch.float64), DIGEST)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("hidden", [1, 24, 192])
def test_regions_of_a_lane_do_not_overlap(hidden, exact):
    shape = LaneShape(hidden, 3, 5, 3, exact=exact, wire=torch.bfloat16)
    layout = lay_out(shape)
    rows = 15 if exact else 5
    assert layout.answer_flags >= 8 * 3
    assert layout.answer_flags + 8 * 3 <= layout.slots
    assert layout.pairs + 4 * layout.pair_array_bytes <= layout.x
    assert layout.pair_array_bytes >= 4 * 15
    assert layout.x + 5 * hidden * 2 <= layout.out
    assert layout.out + rows * hidden * 4 <= layout.slot_bytes
    assert layout.slots + 3 * layout.slot_bytes == layout.total_bytes
    assert layout.x % 64 == layout.out % 64 == layout.slot_bytes % 64 == 0


def test_the_socket_is_private_and_removed_at_the_end(pair):
    mode = Path(pair.address).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    pair.expert.close()
    assert not Path(pair.address).exists()


def test_a_path_in_use_is_refused_and_a_dead_ones_taken_over(tmp_path, pair):
    with pytest.raises(PlaneError, match="another process does"):
        ShmExpertPlane("e0", 6, pair.address, HIDDEN, DIGEST)
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(PlaneError, match="no socket"):
        ShmExpertPlane("e0", 6, str(file), HIDDEN, DIGEST)
    assert file.read_text() == "precious"
    with pytest.raises(PlaneError, match="cannot listen"):
        ShmExpertPlane("e0", 6, str(tmp_path / "missing" / "e0"), HIDDEN, DIGEST)
    dead = str(tmp_path / "dead")
    leftover = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    leftover.bind(dead)
    leftover.close()
    ShmExpertPlane("e0", 6, dead, HIDDEN, DIGEST).close()


def test_an_unreachable_peer_is_named(tmp_path):
    router = ShmRouterPlane("r0", 1, SHAPE, DIGEST)
    with pytest.raises(PlaneError, match="cannot reach e0"):
        router.connect("e0", str(tmp_path / "nobody"), 1, DEADLINE_S)
    with pytest.raises(PlaneError, match="1 to 107 bytes"):
        router.connect("e0", "x" * 108, 1, DEADLINE_S)
    listener = handshake.new_socket()
    listener.bind(str(tmp_path / "deaf"))
    listener.listen(1)
    with pytest.raises(PlaneError, match=r"did not answer in 0\.05 s"):
        router.connect("e0", str(tmp_path / "deaf"), 1, 0.05)
    listener.close()
    with pytest.raises(LaneLost, match="no lane"):
        router.try_send("e0", part_of(1))
    router.close()


def offer(**changes):
    return asdict(an_offer(sender=1)) | changes


def present(pair, message, lane_fd=None, bell_fd=None):
    """The expert worker's refusal of a hand-made offer."""
    fds = [
        lane_fd if lane_fd is not None else memory.create("lane", lay_out(SHAPE).total_bytes),
        bell_fd if bell_fd is not None else memory.create("bell", BELL_BYTES),
    ]
    with handshake.new_socket() as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect(pair.address)
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        socket.send_fds(connection, [data], fds)
        for fd in fds:
            os.close(fd)
        reply, got = handshake.receive(connection, handshake.Reply, 1)
        for fd in got:
            os.close(fd)
        return reply.refusal


def plain_file(tmp_path, size):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.truncate(fd, size)
    return fd


def test_a_bad_offer_is_refused_with_its_reason(pair, tmp_path):
    total = lay_out(SHAPE).total_bytes
    assert present(pair, offer()) == ""
    assert "lane protocol 3, expected 2" in present(pair, offer(protocol=3))
    assert "not a lane message" in present(pair, b"\xff\x00")
    assert "not a lane message: list" in present(pair, b"[]")
    assert "Offer.hidden is '24', expected int" in present(pair, offer(hidden="24"))
    assert "Offer.exact is None" in present(pair, {**offer(), "exact": None})
    assert "wire dtype 'int8'" in present(pair, offer(wire="int8"))
    assert "at least 1" in present(pair, offer(ring_slots=0))
    assert "a lane may take" in present(pair, offer(capacity_tokens=1 << 40))
    assert "sender index 5000" in present(pair, offer(sender=5000))
    small = memory.create("lane", total - 64)
    assert f"has {total - 64} bytes, expected {total}" in present(pair, offer(), lane_fd=small)
    loose = os.memfd_create("lane", os.MFD_ALLOW_SEALING)
    os.truncate(loose, total)
    assert "not sealed" in present(pair, offer(), lane_fd=loose)
    assert "not a memfd" in present(pair, offer(), lane_fd=plain_file(tmp_path, total))
    assert "shared memory" in present(pair, offer(), bell_fd=memory.create("bell", 64))
    with handshake.new_socket() as connection:
        connection.connect(pair.address)
        connection.send(json.dumps(offer()).encode())
        reply, _ = handshake.receive(connection, handshake.Reply, 1)
    assert "came with 0 fds, expected 2" in reply.refusal
    pair.router.try_send("e0", part_of(1))
    assert len(pair.arrivals()) == 1


def test_silent_connections_do_not_keep_a_router_out(pair):
    silent = [handshake.new_socket() for _ in range(40)]
    for connection in silent:
        connection.connect(pair.address)
    router = ShmRouterPlane("r1", 1, SHAPE, DIGEST)
    router.connect("e0", pair.address, 5, DEADLINE_S)
    assert router.peers() == {"e0": 5}
    router.close()
    for connection in silent:
        connection.close()


class _Rung:
    def __init__(self, name: str, wakes_on: int, rung: list[str]) -> None:
        self.name, self.wakes_on, self._rung = name, wakes_on, rung

    def ring(self) -> None:
        self._rung.append(self.name)


def test_whoever_would_take_this_threads_cpu_is_woken_last() -> None:
    allowed = os.sched_getaffinity(0)
    own = min(allowed)
    os.sched_setaffinity(0, {own})
    try:
        rung: list[str] = []
        ring_all([_Rung("here", own, rung), _Rung("far", -1, rung), _Rung("there", own + 1, rung)])
        assert rung == ["far", "there", "here"]
    finally:
        os.sched_setaffinity(0, allowed)


def test_parts_sent_together_are_signalled_at_the_end_each_peer_once(pair: Pair) -> None:
    word = pair.expert._doorbell
    pair.router.try_send("e0", part_of(3))
    first = word.value()
    with pair.router.together():
        tickets = [pair.router.try_send("e0", part_of(n)) for n in (1, 2)]
        assert word.value() == first
    assert word.value() == first + 1  # the sender counts its rings there
    assert [arrival.x.shape[0] for arrival in pair.arrivals(3)] == [3, 1, 2]
    assert None not in tickets


def test_what_was_sent_together_is_signalled_when_something_fails(pair: Pair) -> None:
    before = pair.expert._doorbell.value()

    def fails() -> None:
        with pair.router.together():
            pair.router.try_send("e0", part_of(1))
            raise ValueError("amid")

    with pytest.raises(ValueError, match="amid"):
        fails()
    assert pair.expert._doorbell.value() != before
    assert len(pair.arrivals(1)) == 1


def test_a_bell_says_on_which_cpu_its_owner_went_to_sleep() -> None:
    doorbell = Doorbell("moemesh-test-bell", spin_ns=0)
    bell = Bell(os.dup(doorbell.fd), 1)
    allowed = os.sched_getaffinity(0)
    cpu = max(allowed)
    os.sched_setaffinity(0, {cpu})
    try:
        doorbell.wait(doorbell.value(), 0.001)
    finally:
        os.sched_setaffinity(0, allowed)
    assert bell.wakes_on == cpu
    doorbell.close_fd()
