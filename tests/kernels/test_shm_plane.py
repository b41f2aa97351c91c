"""Both ends of lanes in one process: behaviour that needs no second one."""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ep_kernels.plane import AnswerStatus, LaneLost, LaneRefused, LaneShape, PlaneError
from ep_kernels.shm import ShmExpertPlane, ShmRouterPlane, handshake, memory
from ep_kernels.shm.doorbell import BELL_BYTES, Fence
from ep_kernels.shm.layout import lay_out
from lane_peer import CAPACITY, DIGEST, HIDDEN, RING, TOP_K, expected, part_of, serve

DEADLINE_S = 20.0
SHAPE = LaneShape(HIDDEN, TOP_K, CAPACITY, RING)


class Pair:
    """One router, one expert worker and the lane between them."""

    def __init__(self, directory: Path, shape: LaneShape = SHAPE) -> None:
        self.path = str(directory / "e0")
        self.expert = ShmExpertPlane("e0", 5, self.path, HIDDEN, DIGEST, max_lanes=2)
        self.router = ShmRouterPlane("r0", 7, shape, DIGEST)
        self.router.connect("e0", self.path, 5, DEADLINE_S)

    def close(self) -> None:
        self.router.close()
        self.expert.close()

    def arrivals(self, count=1):
        return self._collect(self.expert, count)

    def answers(self, count=1):
        return self._collect(self.router, count)

    def _collect(self, plane, count):
        found = plane.poll()
        while len(found) < count:
            before = len(found)
            plane.wait(DEADLINE_S)
            found += plane.poll()
            assert len(found) > before or not plane.poll(), "nothing came"
        assert len(found) == count
        return found

    def serve(self, count=1):
        for arrival in self.arrivals(count):
            self.expert.answer(arrival, serve(arrival), 7, 11)


@pytest.fixture
def pair(tmp_path):
    pair = Pair(tmp_path)
    yield pair
    pair.close()


@pytest.mark.parametrize("tokens", [0, 1, 2, CAPACITY])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("wire", [torch.float32, torch.float16, torch.bfloat16])
def test_a_part_arrives_as_sent_and_its_answer_comes_back(tmp_path, tokens, exact, wire):
    pair = Pair(tmp_path, replace(SHAPE, exact=exact, wire=wire))
    part = replace(part_of(tokens), step=4, layer=2, epoch=9)
    ticket = pair.router.try_send("e0", part)
    [arrival] = pair.arrivals()
    assert (arrival.peer, arrival.exact) == ("r0", exact)
    assert (arrival.step, arrival.layer, arrival.epoch) == (4, 2, 9)
    assert arrival.x.dtype is wire
    assert torch.equal(arrival.x, part.x[part.rows].to(wire))
    for name in ("pair_token", "pair_slot", "pair_expert", "pair_weight"):
        assert getattr(arrival, name).tolist() == getattr(part, name).tolist()
    rows = part.pair_token.size if exact else tokens
    assert tuple(arrival.out.shape) == (rows, HIDDEN)
    arrival.out.copy_(torch.arange(rows * HIDDEN).view(rows, HIDDEN))
    pair.expert.answer(arrival, AnswerStatus.OK, 7, 123)
    [answer] = pair.answers()
    assert (answer.peer, answer.ticket) == ("e0", ticket)
    assert (answer.began_ns, answer.compute_ns) == (7, 123)
    assert answer.status is AnswerStatus.OK
    assert torch.equal(answer.out, torch.arange(rows * HIDDEN).view(rows, HIDDEN).float())
    pair.router.release(answer)
    assert pair.router.in_flight() == 0
    assert pair.router.poll() == []
    assert pair.expert.poll() == []
    pair.close()


def test_a_full_ring_takes_no_part_until_an_answer_is_released(pair):
    part = part_of(3)
    tickets = [pair.router.try_send("e0", part) for _ in range(RING)]
    assert None not in tickets
    assert len(set(tickets)) == RING
    assert pair.router.try_send("e0", part) is None
    assert pair.router.in_flight() == RING
    pair.serve(RING)
    answers = pair.answers(RING)
    assert pair.router.try_send("e0", part) is None
    pair.router.release(answers[1])
    assert pair.router.try_send("e0", part) is not None


def test_the_ring_wraps_with_answers_in_any_order(pair):
    rng = random.Random(3)
    waiting, held, done = {}, [], 0
    for step in range(200):
        part = part_of(rng.choice([0, 1, 5, CAPACITY]), step)
        ticket = pair.router.try_send("e0", part)
        if ticket is not None:
            waiting[ticket] = part
        held += pair.expert.poll()
        rng.shuffle(held)
        while held and (ticket is None or rng.random() < 0.4):
            arrival = held.pop()
            pair.expert.answer(arrival, serve(arrival), 7, 0)
            for answer in pair.router.poll():
                torch.testing.assert_close(
                    answer.out, expected(waiting.pop(answer.ticket), exact=False)
                )
                pair.router.release(answer)
                done += 1
            break
    assert done > 5 * RING


def test_the_oldest_part_comes_first_over_all_lanes(pair):
    second = ShmRouterPlane("r1", 1, SHAPE, DIGEST)
    second.connect("e0", pair.path, 5, DEADLINE_S)
    for step, plane in enumerate([second, pair.router, second, pair.router, pair.router]):
        assert plane.try_send("e0", part_of(1, step)) is not None
    assert [arrival.step for arrival in pair.arrivals(5)] == [0, 1, 2, 3, 4]
    second.close()


def test_a_stale_answer_carries_its_status(pair):
    pair.router.try_send("e0", part_of(2))
    [arrival] = pair.arrivals()
    pair.expert.answer(arrival, AnswerStatus.STALE, 7, 0)
    assert pair.answers()[0].status is AnswerStatus.STALE


def test_a_part_beyond_the_capacity_is_refused_before_anything_is_sent(pair):
    part = part_of(3)
    big = replace(part, rows=torch.zeros(CAPACITY + 1, dtype=torch.int64))
    with pytest.raises(PlaneError, match=rf"{CAPACITY + 1} tokens .* {CAPACITY} tokens"):
        pair.router.try_send("e0", big)
    assert pair.router.in_flight() == 0
    assert pair.router.try_send("e0", part) is not None


def test_answering_twice_is_an_error(pair):
    pair.router.try_send("e0", part_of(1))
    [arrival] = pair.arrivals()
    pair.expert.answer(arrival, AnswerStatus.OK, 7, 0)
    with pytest.raises(PlaneError, match="answered already"):
        pair.expert.answer(arrival, AnswerStatus.OK, 7, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"peer": "e9"}, "this is expert worker e0, not e9"),
        ({"incarnation": 4}, "this is incarnation 5 of e0, not 4"),
        ({"digest": "other"}, "e0 serves model test-model, router r1 other"),
        ({"shape": replace(SHAPE, hidden=32)}, "hidden size 24, router r1 32"),
    ],
)
def test_a_mismatch_is_refused_with_its_reason(pair, change, reason):
    router = ShmRouterPlane("r1", 1, change.get("shape", SHAPE), change.get("digest", DIGEST))
    peer = change.get("peer", "e0")
    with pytest.raises(LaneRefused, match=reason) as caught:
        router.connect(peer, pair.path, change.get("incarnation", 5), DEADLINE_S)
    assert caught.value.peer == peer
    assert router.peers() == {}
    assert pair.expert.peers() == ["r0"]
    router.close()


def test_an_older_incarnation_of_a_router_is_fenced_even_after_the_newer_left(pair):
    pair.router.close()
    zombie = ShmRouterPlane("r0", 6, SHAPE, DIGEST)
    with pytest.raises(LaneRefused, match="incarnation 6 of router r0 is fenced: 7"):
        zombie.connect("e0", pair.path, 5, DEADLINE_S)
    zombie.close()
    heir = ShmRouterPlane("r0", 8, SHAPE, DIGEST)
    heir.connect("e0", pair.path, 5, DEADLINE_S)
    heir.close()


def test_lanes_are_limited_and_a_closed_one_makes_room(pair):
    routers = [ShmRouterPlane(f"x{i}", 1, SHAPE, DIGEST) for i in range(2)]
    routers[0].connect("e0", pair.path, 5, DEADLINE_S)
    with pytest.raises(LaneRefused, match="has its 2 lanes open already"):
        routers[1].connect("e0", pair.path, 5, DEADLINE_S)
    pair.router.connect("e0", pair.path, 5, DEADLINE_S)  # replaces its own
    routers[0].disconnect("e0")
    while len(pair.expert.peers()) > 1:
        pair.expert.wait(DEADLINE_S)
    routers[1].connect("e0", pair.path, 5, DEADLINE_S)
    assert sorted(pair.expert.peers()) == ["r0", "x1"]
    for router in routers:
        router.close()


def test_a_new_lane_to_the_same_peer_drops_the_old_tickets(pair):
    pair.router.try_send("e0", part_of(1, step=1))
    [old] = pair.arrivals()
    pair.router.connect("e0", pair.path, 5, DEADLINE_S)
    assert pair.router.in_flight() == 0
    pair.expert.answer(old, AnswerStatus.OK, 7, 0)
    ticket = pair.router.try_send("e0", part_of(1, step=2))
    pair.serve()
    assert [answer.ticket for answer in pair.answers()] == [ticket]
    assert pair.router.lost() == []


def test_the_answer_in_hand_outlives_its_lane(pair):
    part = part_of(4)
    pair.router.try_send("e0", part)
    pair.serve()
    [answer] = pair.answers()
    pair.expert.close()
    while not (lost := pair.router.lost()):
        pair.router.wait(DEADLINE_S)
    assert lost[0].peer == "e0"
    torch.testing.assert_close(answer.out, expected(part, exact=False))
    pair.router.release(answer)
    with pytest.raises(LaneLost):
        pair.router.try_send("e0", part)


def test_an_event_between_poll_and_wait_is_not_slept_through(pair):
    assert pair.expert.poll() == []
    pair.router.try_send("e0", part_of(1))
    pair.expert.wait(1e9)
    assert len(pair.expert.poll()) == 1
    pair.router.poll()
    pair.router.wake()
    pair.router.poll()
    pair.router.wait(1e9)  # woken, although a poll came after the bell


@pytest.mark.parametrize("end", ["router", "expert"])
def test_wake_ends_a_wait_of_another_thread(pair, end):
    plane = getattr(pair, end)
    returned = threading.Event()
    plane.poll()

    def wait():
        plane.wait(1e9)
        returned.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    plane.wake()
    assert returned.wait(DEADLINE_S)
    thread.join()


def test_a_wait_without_event_ends(pair):
    pair.router.poll()
    pair.router.wait(0.01)
    pair.router.wait(0.0)
    pair.router.wait(-1.0)
    assert pair.router.poll() == []


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
    other.connect("e0", pair.path, 5, DEADLINE_S)
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
    mode = Path(pair.path).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    pair.expert.close()
    assert not Path(pair.path).exists()


def test_a_path_in_use_is_refused_and_a_dead_ones_taken_over(tmp_path, pair):
    with pytest.raises(PlaneError, match="another process does"):
        ShmExpertPlane("e0", 6, pair.path, HIDDEN, DIGEST)
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
    values = {
        "router": "r9",
        "router_incarnation": 1,
        "expert": "e0",
        "expert_incarnation": 5,
        "digest": DIGEST,
        "sender": 1,
        "hidden": HIDDEN,
        "top_k": TOP_K,
        "capacity_tokens": CAPACITY,
        "ring_slots": RING,
        "exact": False,
        "wire": "fp32",
        "protocol": 1,
    }
    return {**values, **changes}


def present(pair, message, lane_fd=None, bell_fd=None):
    """The expert worker's refusal of a hand-made offer."""
    fds = [
        lane_fd if lane_fd is not None else memory.create("lane", lay_out(SHAPE).total_bytes),
        bell_fd if bell_fd is not None else memory.create("bell", BELL_BYTES),
    ]
    with handshake.new_socket() as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect(pair.path)
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
    assert "lane protocol 2, expected 1" in present(pair, offer(protocol=2))
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
        connection.connect(pair.path)
        connection.send(json.dumps(offer()).encode())
        reply, _ = handshake.receive(connection, handshake.Reply, 1)
    assert "came with 0 fds, expected 2" in reply.refusal
    pair.router.try_send("e0", part_of(1))
    assert len(pair.arrivals()) == 1


def test_silent_connections_do_not_keep_a_router_out(pair):
    silent = [handshake.new_socket() for _ in range(40)]
    for connection in silent:
        connection.connect(pair.path)
    router = ShmRouterPlane("r1", 1, SHAPE, DIGEST)
    router.connect("e0", pair.path, 5, DEADLINE_S)
    assert router.peers() == {"e0": 5}
    router.close()
    for connection in silent:
        connection.close()


def test_a_plane_leaves_no_descriptor_thread_or_memory_behind(tmp_path):
    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    def mapped():
        return Path("/proc/self/maps").read_text().count("memfd:moemesh")

    gc.collect()
    before = (descriptors(), mapped(), threading.active_count())
    for _ in range(3):
        pair = Pair(tmp_path)
        pair.router.try_send("e0", part_of(1))
        pair.serve()
        [answer] = pair.answers()
        pair.router.release(answer)
        pair.router.connect("e0", pair.path, 5, DEADLINE_S)
        pair.close()
        pair.close()
        del pair, answer
    gc.collect()
    assert (descriptors(), mapped(), threading.active_count()) == before


def test_the_fence_of_weakly_ordered_machines_can_be_called():
    fence = Fence()
    fence()
