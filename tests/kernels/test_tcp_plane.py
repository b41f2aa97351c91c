"""What is particular to lanes over TCP; both ends in one process, or one of them made by hand."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import ANSWER, BEAT, FRAME, REQUEST, an_offer
from ep_kernels.plane import (
    Answer,
    AnswerStatus,
    LaneLost,
    LanePending,
    LaneRefused,
    LaneShape,
    PairBlock,
    PlaneError,
)
from ep_kernels.shm.handshake import Reply, decode, encode
from ep_kernels.tcp import TcpExpertPlane, TcpRouterPlane, handshake
from lane_peer import CAPACITY, DIGEST, HIDDEN, KEY, RING, TOP_K, expected, part_of, serve
from plane_pair import DEADLINE_S, SHAPE, Pair

OTHER_KEY = bytes(32)


@pytest.fixture
def pair(tmp_path):
    pair = Pair(tmp_path, "tcp")
    yield pair
    pair.close()


class ByHand:
    """A router's end of a lane that says what the test wants."""

    def __init__(self, port: int) -> None:
        self.link = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        self.challenged = handshake.read_challenge(self.read(handshake.CHALLENGE_BYTES))
        self.nonce = handshake.new_nonce()

    def read(self, count: int) -> bytes:
        deadline = time.monotonic() + DEADLINE_S
        return handshake.receive_exactly(self.link, count, deadline)

    def present(self, body: bytes, key: bytes = KEY) -> str:
        """The expert worker's refusal; empty if it opened the lane."""
        self.link.sendall(handshake.pack_offer(body, key, self.challenged, self.nonce))
        head = self.read(handshake.HEAD_BYTES)
        reply = self.read(handshake.body_bytes(head))
        handshake.check_reply(head, reply, key, self.challenged, self.nonce)
        return decode(reply, Reply).refusal

    def frame(self, kind, index=0, size=0, header=(0,) * 7, body=b""):
        self.link.sendall(FRAME.pack(kind, index, size, *header) + body)

    def hung_up(self) -> bool:
        try:
            while True:
                self.read(1)
        except (EOFError, ConnectionError):
            return True


@pytest.fixture
def by_hand(pair):
    made = []

    def start():
        made.append(ByHand(pair.expert.port))
        return made[-1]

    yield start
    for one in made:
        one.link.close()


def lost_of(plane):
    deadline = time.monotonic() + DEADLINE_S
    while not (lost := plane.lost()):
        assert time.monotonic() < deadline
        plane.poll()
        plane.wait(DEADLINE_S)
    return lost


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the awaited event did not come"
        time.sleep(0.005)


def test_who_does_not_know_the_key_gets_no_lane_and_no_answer(pair, by_hand, caplog):
    stranger = by_hand()
    body = encode(an_offer())
    stranger.link.sendall(
        handshake.pack_offer(body, OTHER_KEY, stranger.challenged, stranger.nonce)
    )
    assert stranger.hung_up()
    router = pair.new_router("r1")
    with pytest.raises(PlaneError, match="closed the connection") as caught:
        router.connect("e0", f"tcp://127.0.0.1:{pair.expert.port}#{OTHER_KEY.hex()}", 5, DEADLINE_S)
    assert not isinstance(caught.value, LaneRefused)
    router.close()
    assert pair.expert.peers() == ["r0"]
    assert "does not know the key of this worker's lanes" in caplog.text
    assert KEY.hex() not in caplog.text


def test_an_overheard_offer_opens_no_second_lane(pair, by_hand):
    first, again = by_hand(), by_hand()
    offer = handshake.pack_offer(encode(an_offer()), KEY, first.challenged, first.nonce)
    again.link.sendall(offer)
    assert again.hung_up()
    assert pair.expert.peers() == ["r0"]


def test_an_impostor_is_no_expert_worker(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        router = TcpRouterPlane("r0", 1, SHAPE, DIGEST)
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}#{KEY.hex()}"
        for said, reason in (
            (b"HTTP/1.1 400 Bad Request", "no expert worker's lane"),
            (
                handshake.challenge(bytes(16))
                + handshake.pack_reply(encode(Reply(0)), OTHER_KEY, bytes(16), bytes(16)),
                "does not know the key",
            ),
            (handshake.challenge(bytes(16)) + b"\xff" * 52, "not a lane message"),
        ):
            with pytest.raises(LanePending, match="has not answered"):
                router.connect("e0", address, 5, 0.0)
            link, _ = listener.accept()
            link.sendall(said)
            with pytest.raises(PlaneError, match=reason):
                router.connect("e0", address, 5, DEADLINE_S)
            link.close()
        router.close()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (encode(an_offer(protocol=3)), "lane protocol 3, expected 2"),
        (encode(an_offer(wire="int8")), "wire dtype 'int8'"),
        (encode(an_offer(ring_slots=0)), "at least 1"),
        (encode(an_offer(capacity_tokens=1 << 40)), "a lane may take"),
        (b"[]", "not a lane message: list"),
        (b"\xff", "not a lane message"),
    ],
)
def test_a_bad_offer_is_refused_with_its_reason(pair, by_hand, body, reason):
    assert reason in by_hand().present(body)
    pair.router.try_send("e0", part_of(1))
    assert len(pair.arrivals()) == 1


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://127.0.0.1:1", "a key of 32 bytes"),
        (f"tcp://127.0.0.1#{KEY.hex()}", "HOST:PORT"),
        (f"tcp://127.0.0.1:x#{KEY.hex()}", "HOST:PORT"),
        ("tcp://127.0.0.1:1#xyz", "hexadecimal"),
        (f"tcp://127.0.0.1:1#{KEY.hex()}", "cannot reach e0 at tcp://127.0.0.1:1"),
    ],
)
def test_an_unusable_address_is_named_without_its_key(address, reason):
    router = TcpRouterPlane("r0", 1, SHAPE, DIGEST)
    with pytest.raises(PlaneError, match=reason) as caught:
        router.connect("e0", address, 5, DEADLINE_S)
    assert KEY.hex() not in str(caught.value)
    router.close()


HEADER = (1, 0, 0, 0, 1, 1, 0)
"""Message 1: one token, one pair."""
SIZE = 16 + 4 * HIDDEN


@pytest.mark.parametrize(
    "frame",
    [
        (9,),
        (BEAT, 0, 1),
        (ANSWER, 0, 0, (1, 1, 0, 0, 0, 0, 0)),
        (REQUEST, RING, SIZE, HEADER),
        (REQUEST, 0, SIZE + 1, HEADER),
        (REQUEST, 0, SIZE, (0, *HEADER[1:])),
        (REQUEST, 0, SIZE, (1, 0, 0, 0, CAPACITY + 1, 1, 0)),
        (REQUEST, 0, SIZE, (1, 0, 0, 0, -1, 1, 0)),
        (REQUEST, 0, SIZE, (1, 0, 0, 0, 1, CAPACITY * TOP_K + 1, 0)),
        (REQUEST, 0, SIZE, HEADER, b"\xff" * 4 + bytes(SIZE - 4)),  # a pair's token
    ],
)
def test_nonsense_costs_its_lane_only(pair, by_hand, frame):
    peer = by_hand()
    assert peer.present(encode(an_offer())) == ""
    peer.frame(*frame)
    until(lambda: not pair.expert.poll() and pair.expert.corrupt_lanes == 1)
    assert peer.hung_up()
    assert pair.expert.peers() == ["r0"]
    pair.router.try_send("e0", part_of(1))
    assert len(pair.arrivals()) == 1


def test_a_slot_written_before_its_answer_is_nonsense(pair, by_hand):
    peer = by_hand()
    assert peer.present(encode(an_offer())) == ""
    for sequence in (1, 2):
        peer.frame(REQUEST, 0, SIZE, (sequence, *HEADER[1:]), bytes(SIZE))
    until(lambda: pair.expert.corrupt_lanes == 1)
    assert peer.hung_up()


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ((2, 1, 0, 0, 1, 0, 0), "no message 2 to answer"),
        ((1, 9, 0, 0, 1, 0, 0), "status 9"),
        ((1, 1, 0, 0, CAPACITY + 1, 0, 0), "41 rows"),
        ((1, 1, 0, 0, 2, 0, 0), "expected message 1 with 1 rows"),
    ],
)
def test_a_nonsensical_answer_costs_its_lane(header, reason):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        router = TcpRouterPlane("r0", 1, SHAPE, DIGEST)
        peer = connected(router, listener)
        router.try_send("e0", part_of(1))
        rows = max(0, header[4]) if header[1] == AnswerStatus.OK else 0
        size = 4 * HIDDEN * rows
        peer.sendall(FRAME.pack(ANSWER, 0, size, *header) + bytes(size))
        assert reason in lost_of(router)[0].reason
        assert router.corrupt_lanes == 1
        router.close()
        peer.close()


def connected(router: TcpRouterPlane, listener: socket.socket) -> socket.socket:
    """The other end of a lane of ``router``, held by the test."""
    address = f"tcp://127.0.0.1:{listener.getsockname()[1]}#{KEY.hex()}"
    with pytest.raises(LanePending, match="has not answered"):
        router.connect("e0", address, 5, 0.0)
    link, _ = listener.accept()
    challenged = handshake.new_nonce()
    link.sendall(handshake.challenge(challenged))
    deadline = time.monotonic() + DEADLINE_S
    head = handshake.receive_exactly(link, handshake.HEAD_BYTES, deadline)
    body = handshake.receive_exactly(link, handshake.body_bytes(head), deadline)
    nonce = handshake.read_offer(head, body, KEY, challenged)
    link.sendall(handshake.pack_reply(encode(Reply(0)), KEY, challenged, nonce))
    router.connect("e0", address, 5, DEADLINE_S)  # takes what was begun in the background
    assert router.peers() == {"e0": 5}
    return link


@pytest.mark.parametrize("end", ["router", "expert"])
def test_a_peer_that_goes_silent_is_lost(end):
    """Its host is cut off, say: the connection stands and nothing comes."""
    if end == "router":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            router = TcpRouterPlane("r0", 1, SHAPE, DIGEST, silence_s=0.2)
            peer = connected(router, listener)
            [loss] = lost_of(router)
            assert (loss.peer, loss.reason) == ("e0", "the peer has gone silent")
            with pytest.raises(LaneLost):
                router.try_send("e0", part_of(1))
            router.close()
            peer.close()
    else:
        expert = TcpExpertPlane(
            "e0", 5, "", HIDDEN, DIGEST, host="127.0.0.1", key=KEY, silence_s=0.2
        )
        silent, peer = ByHand(expert.port), ByHand(expert.port)
        assert peer.present(encode(an_offer())) == ""
        assert peer.hung_up()  # after some beats of the expert worker's
        until(lambda: expert.peers() == [])
        assert silent.hung_up()
        expert.close()


def test_idle_peers_keep_their_lane_by_beats():
    expert = TcpExpertPlane("e0", 5, "", HIDDEN, DIGEST, host="127.0.0.1", key=KEY, silence_s=0.4)
    router = TcpRouterPlane("r0", 1, SHAPE, DIGEST, silence_s=0.4)
    router.connect("e0", f"tcp://127.0.0.1:{expert.port}#{KEY.hex()}", 5, DEADLINE_S)
    router.poll()
    deadline = time.monotonic() + 1.2
    while time.monotonic() < deadline:
        router.wait(0.1)
    assert router.lost() == []
    assert expert.peers() == ["r0"]
    router.close()
    expert.close()


def test_messages_larger_than_the_systems_buffers_pass_while_others_compute():
    shape = LaneShape(4096, 2, 512, 3)  # 8 MiB a message each way
    expert = TcpExpertPlane("e0", 5, "", 4096, DIGEST, host="127.0.0.1", key=KEY)
    router = TcpRouterPlane("r0", 1, shape, DIGEST)
    router.connect("e0", f"tcp://127.0.0.1:{expert.port}#{KEY.hex()}", 5, DEADLINE_S)
    x = torch.arange(512 * 4096, dtype=torch.float32).view(512, 4096)
    rows, none = np.arange(511, -1, -1, dtype=np.int32), np.zeros(0, dtype=np.int32)
    block = PairBlock.of(rows, none, none, none, none.view(np.float32))
    part = replace(part_of(1), x=x, block=block)
    tickets = [router.try_send("e0", part) for _ in range(3)]
    served = 0
    deadline = time.monotonic() + DEADLINE_S
    while served < 3:
        assert time.monotonic() < deadline
        expert.wait(1.0)
        for arrival in expert.poll():
            assert torch.equal(arrival.x, x.flip(0))
            arrival.out.copy_(arrival.x * 2)
            expert.answer(arrival, AnswerStatus.OK, 0, 0)
            served += 1
    answers = []
    while len(answers) < 3:
        assert time.monotonic() < deadline
        router.wait(1.0)
        answers += router.poll()
    assert [answer.ticket for answer in answers] == tickets
    assert all(torch.equal(answer.out, x.flip(0) * 2) for answer in answers)
    router.close()
    expert.close()


def test_one_plane_has_lanes_of_both_kinds(tmp_path):
    path = str(tmp_path / "e0")
    expert = TcpExpertPlane("e0", 5, path, HIDDEN, DIGEST, host="127.0.0.1", key=KEY)
    near, far = TcpRouterPlane("near", 1, SHAPE, DIGEST), TcpRouterPlane("far", 1, SHAPE, DIGEST)
    near.connect("e0", path, 5, DEADLINE_S)
    far.connect("e0", f"tcp://127.0.0.1:{expert.port}#{KEY.hex()}", 5, DEADLINE_S)
    assert sorted(expert.peers()) == ["far", "near"]
    part = part_of(3)
    for router in (near, far):
        assert router.try_send("e0", part) is not None
        deadline = time.monotonic() + DEADLINE_S
        answers = []
        while not answers:
            assert time.monotonic() < deadline
            expert.wait(0.05)
            for arrival in expert.poll():
                expert.answer(arrival, serve(arrival), 0, 0)
            answers = router.poll()
        torch.testing.assert_close(answers[0].out, expected(part, exact=False))
        router.release(answers[0])
    near.close()
    until(lambda: expert.peers() == ["far"])
    far.close()
    expert.close()


def test_strangers_that_say_nothing_do_not_keep_a_router_out(pair):
    silent = [socket.create_connection(("127.0.0.1", pair.expert.port)) for _ in range(40)]
    router = pair.new_router("r1")
    pair.connect(router)
    assert router.peers() == {"e0": 5}
    router.close()
    for link in silent:
        link.close()


def test_an_expert_worker_takes_the_first_free_port_of_its_range():
    def listen(ports):
        return TcpExpertPlane("e0", 5, "", HIDDEN, DIGEST, host="127.0.0.1", ports=ports, key=KEY)

    first = listen([0])
    second = listen([first.port, 0])
    assert second.port != first.port
    with pytest.raises(
        PlaneError, match=rf"cannot listen for lanes at 127.0.0.1, port {first.port}:"
    ):
        listen([first.port])
    with pytest.raises(PlaneError, match="a lane key has 32 bytes"):
        TcpExpertPlane("e0", 5, "", HIDDEN, DIGEST, host="127.0.0.1", key=b"short")
    first.close()
    second.close()


def test_closing_does_not_wait_for_a_dial():
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        router = TcpRouterPlane("r0", 1, SHAPE, DIGEST)
        with pytest.raises(LanePending, match="has not answered"):
            router.connect("e0", f"tcp://127.0.0.1:{deaf.getsockname()[1]}#{KEY.hex()}", 5, 0.01)
        [thread] = [t for t in threading.enumerate() if t.name == "dial-e0"]
        router.close()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_random_bytes_never_harm_another_lane(pair, by_hand):
    rng = random.Random(11)
    served = RING + 3
    for _ in range(60):
        peer = by_hand()
        valid = FRAME.pack(REQUEST, 0, SIZE, *HEADER) + bytes(SIZE)
        if rng.random() < 0.5:
            assert peer.present(encode(an_offer())) == ""
            said = bytearray(valid * 2)
            for _ in range(rng.randrange(1, 6)):
                said[rng.randrange(len(said))] = rng.randrange(256)
        else:
            said = rng.randbytes(rng.randrange(1, 300))
        with contextlib.suppress(ConnectionError):
            peer.link.sendall(said)
        peer.link.close()
    for _ in range(served):
        ticket = pair.router.try_send("e0", part_of(2))
        assert ticket is not None
        answers: list[Answer] = []
        deadline = time.monotonic() + DEADLINE_S
        while not answers:
            assert time.monotonic() < deadline
            pair.expert.wait(0.01)
            for arrival in pair.expert.poll():
                if arrival.pair_token.size and int(arrival.pair_token.max()) >= len(arrival.x):
                    pytest.fail("nonsense was let through")
                pair.expert.answer(arrival, serve(arrival), 0, 0)
            answers = pair.router.poll()
        assert answers[0].ticket == ticket
        pair.router.release(answers[0])
    assert pair.router.lost() == []
    assert pair.router.peers() == {"e0": 5}
