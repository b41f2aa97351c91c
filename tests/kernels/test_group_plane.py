"""What is particular to lanes over process groups; a peer that misbehaves is made by hand."""

from __future__ import annotations

import gc
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import BEAT, FRAME, REQUEST, an_offer
from ep_kernels.group import GlooBackend, GroupExpertPlane, GroupRouterPlane, NcclBackend
from ep_kernels.group.backend import PlaneUnavailableError
from ep_kernels.group.memory import DeviceMemory, GroupMemory
from ep_kernels.group.rendezvous import Groups
from ep_kernels.group.router import GroupDial
from ep_kernels.plane import AnswerStatus, LaneShape, PairBlock, PlaneError
from ep_kernels.planes import Listening, expert_plane, router_plane
from ep_kernels.shm.handshake import Reply, decode, encode
from ep_kernels.shm.layout import lay_out_apart
from ep_kernels.tcp import handshake
from ep_kernels.tcp.handshake import Session, read_address
from lane_peer import CAPACITY, DIGEST, HIDDEN, KEY, RING, expected, part_of, serve
from plane_pair import DEADLINE_S, SHAPE, Pair

ANNOUNCED = (1, 0, 0, 0, 1, 1, 0)
"""Message 1: one token, one pair."""
PAIR_BYTES = 16


@pytest.fixture
def pair(tmp_path):
    pair = Pair(tmp_path, "gloo")
    yield pair
    pair.close()


class ByHand:
    """A router's end of a lane that opens as it should and then says what the test wants."""

    def __init__(self, address: str) -> None:
        dial = GroupDial(read_address(address, "gloo://"), an_offer(), 60.0, GlooBackend())
        assert dial.wait(DEADLINE_S)
        self.link = dial.result()
        self.groups: Groups = dial.groups

    def frame(self, kind, index=0, size=0, header=(0,) * 7, body=b""):
        self.link.setblocking(True)
        self.link.sendall(FRAME.pack(kind, index, size, *header) + body)

    def announce(self, index=0, header=ANNOUNCED):
        self.frame(REQUEST, index, PAIR_BYTES, header, bytes(PAIR_BYTES))


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the awaited event did not come"
        time.sleep(0.005)


def exchange(pair: Pair) -> None:
    """The lane of r0 works."""
    part = part_of(3)
    pair.router.try_send("e0", part)
    pair.serve()
    [answer] = pair.answers()
    torch.testing.assert_close(answer.out, expected(part, exact=False))
    pair.router.release(answer)


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_is_told_what_to_install():
    with pytest.raises(PlaneUnavailableError, match=r"built without: install moemesh\[gpu-cu12\]"):
        NcclBackend(torch.device("cuda", 0))


def test_nccl_is_refused_to_who_computes_on_no_gpu_and_the_settings_are_named():
    refused = "computes on cpu: router.device and expert.device must both be cuda"
    with pytest.raises(PlaneUnavailableError, match=refused):
        router_plane("nccl", "r0", 1, SHAPE, DIGEST, silence_s=3.0)
    at = Listening(host="127.0.0.1", key=KEY)
    with pytest.raises(PlaneUnavailableError, match=refused):
        expert_plane("nccl", "e0", 1, HIDDEN, DIGEST, 4, at=at, silence_s=3.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_so(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    with pytest.raises(PlaneUnavailableError, match="needs a GPU, and torch sees none"):
        NcclBackend(torch.device("cuda", 0))


def test_gloo_carries_no_memory_of_a_gpu():
    with pytest.raises(PlaneUnavailableError, match="not on cuda:0: nccl is the plane for GPUs"):
        GlooBackend(torch.device("cuda", 0))


def test_two_processes_on_one_device_are_told_so_where_the_back_end_cannot_join_them(pair):
    def backend(device):
        made = GlooBackend()
        made.alone_on = device
        return made

    expert = GroupExpertPlane(
        "e1", 5, HIDDEN, DIGEST, backend=backend("GPU-1"), host="127.0.0.1", key=KEY
    )
    address = f"gloo://127.0.0.1:{expert.port}#{KEY.hex()}"
    router = GroupRouterPlane("r0", 1, SHAPE, DIGEST, backend("GPU-1"))
    with pytest.raises(PlaneError, match="must name two GPUs, or"):
        router.connect("e1", address, 5, DEADLINE_S)
    router.close()
    router = GroupRouterPlane("r0", 1, SHAPE, DIGEST, backend("GPU-2"))
    router.connect("e1", address, 5, DEADLINE_S)
    assert router.peers() == {"e1": 5}
    router.close()
    expert.close()


def test_an_address_of_another_carrier_is_refused(pair):
    port = pair.expert.port
    with pytest.raises(PlaneError, match=r"is gloo://HOST:PORT#KEY .* not tcp://127\.0\.0\.1"):
        pair.router.connect("e0", f"tcp://127.0.0.1:{port}#{KEY.hex()}", 5, DEADLINE_S)
    assert pair.router.peers() == {"e0": 5}


def test_rows_that_were_announced_and_do_not_come_cost_their_lane_only(caplog):
    expert = GroupExpertPlane(
        "e0", 5, HIDDEN, DIGEST, backend=GlooBackend(), host="127.0.0.1", key=KEY, silence_s=0.4
    )
    address = f"gloo://127.0.0.1:{expert.port}#{KEY.hex()}"
    router = GroupRouterPlane("r0", 1, SHAPE, DIGEST, GlooBackend(), silence_s=0.4)
    router.connect("e0", address, 5, DEADLINE_S)
    peer = ByHand(address)
    peer.announce()

    def dropped():
        try:
            peer.frame(BEAT)  # it lives, and keeps its promise not
        except OSError:
            return True
        return expert.peers() == ["r0"]

    until(dropped)
    until(lambda: "lost router=r9: rows were announced and did not come" in caplog.text)
    assert expert.poll() == []
    part = part_of(2)
    router.try_send("e0", part)
    until(lambda: [expert.answer(one, serve(one), 0, 0) for one in expert.poll()])
    until(lambda: (answers := router.poll()) and torch.allclose(
        answers[0].out, expected(part, exact=False)))  # fmt: skip
    router.close()
    expert.close()


@pytest.mark.parametrize(
    "frames",
    [
        [(0, ANNOUNCED), (0, (2, *ANNOUNCED[1:]))],  # before the rows of the first have come
        [(RING, ANNOUNCED)],
        [(0, (1, 0, 0, 0, CAPACITY + 1, 1, 0))],
    ],
)
def test_nonsense_costs_its_lane_only(pair, frames):
    peer = ByHand(pair.address)
    for index, header in frames:
        peer.announce(index, header)
    until(lambda: pair.expert.corrupt_lanes == 1)
    assert pair.expert.peers() == ["r0"]
    exchange(pair)


def test_who_breaks_off_while_rows_are_awaited_is_lost_at_once(pair):
    peer = ByHand(pair.address)
    peer.announce()
    peer.link.close()
    until(lambda: pair.expert.peers() == ["r0"])
    exchange(pair)


def offered(pair: Pair, router: str) -> tuple[socket.socket, Session]:
    """A router whose offer was accepted, and which has made no groups so far."""
    link = socket.create_connection(("127.0.0.1", pair.expert.port), DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S

    def read(count):
        return handshake.receive_exactly(link, count, deadline)

    session = Session(KEY, handshake.read_challenge(read(handshake.CHALLENGE_BYTES)), bytes(16))
    body = encode(an_offer(router=router))
    link.sendall(handshake.pack_offer(body, KEY, session.challenged, session.own))
    head = read(handshake.HEAD_BYTES)
    assert decode(read(handshake.body_bytes(head)), Reply).refusal == ""
    return link, session


def test_a_value_that_the_lane_key_did_not_make_ends_the_opening(pair, caplog):
    link, session = offered(pair, "r9")
    forged = replace(session, key=bytes(32))
    link.sendall(handshake.pack_value(forged, "out/0/0", b"elsewhere", of_router=True))
    until(lambda: "another proof than the lane's key makes" in caplog.text)
    link.close()
    # Nor is what this end said itself good for an answer.
    link, session = offered(pair, "r8")
    link.sendall(handshake.pack_value(session, "out/0/0", b"elsewhere", of_router=False))
    until(lambda: caplog.text.count("another proof than the lane's key makes") == 2)
    link.close()
    assert pair.expert.peers() == ["r0"]
    exchange(pair)


def test_a_router_is_told_why_the_worker_could_not_make_its_groups(pair, monkeypatch):
    def fail(*_):
        raise RuntimeError("no more descriptors\nand a trace")

    backend = GlooBackend()
    monkeypatch.setattr(backend, "make", fail)
    expert = GroupExpertPlane("e1", 5, HIDDEN, DIGEST, backend=backend, host="127.0.0.1", key=KEY)
    with pytest.raises(PlaneError, match=r"e1 at .*: the expert worker has given up: gloo: no mor"):
        pair.router.connect("e1", f"gloo://127.0.0.1:{expert.port}#{KEY.hex()}", 5, DEADLINE_S)
    assert pair.router.peers() == {"e0": 5}
    expert.close()


def test_a_router_that_makes_no_groups_holds_up_nobody(tmp_path):
    before = threading.active_count()
    pair = Pair(tmp_path, "gloo")
    links = [offered(pair, f"r{i}")[0] for i in (8, 9)]
    exchange(pair)
    other = pair.new_router("r0", 8)
    with pytest.raises(PlaneError, match="opens 2 lanes at this moment"):
        pair.connect(other)
    for link in links:
        link.close()
    until(lambda: not pair.expert._meetings)
    pair.connect(other)
    assert pair.expert.peers() == ["r0"]
    other.close()
    pair.close()
    assert threading.active_count() == before


def test_an_opening_is_ended_by_the_planes_end(tmp_path):
    before = threading.active_count()
    pair = Pair(tmp_path, "gloo")
    link, _ = offered(pair, "r9")
    pair.close()
    assert threading.active_count() == before
    link.close()


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_rows_that_c_cannot_reach_are_copied_by_torch(wire):
    memory = DeviceMemory(lay_out_apart(replace(SHAPE, wire=wire)), torch.device("cpu"))
    part, slot = replace(part_of(7), step=4, layer=2, epoch=9), memory.slots[1]
    memory.send(slot, part, 3)
    request = slot.read_request()
    assert (request.sequence, request.step, request.layer, request.epoch) == (3, 4, 2, 9)
    assert memory.request_flags.tolist() == [0, 3, 0]
    picked = part.x[torch.from_numpy(part.block.rows)].to(wire)
    assert torch.equal(slot.x.first(request.tokens), picked)
    for name in ("pair_token", "pair_slot", "pair_expert", "pair_weight"):
        assert getattr(slot, name)[: request.pairs].tolist() == getattr(part.block, name).tolist()


def test_no_memory_of_a_lost_lane_is_kept():
    def memories():
        gc.collect()
        return sum(type(one) is GroupMemory for one in gc.get_objects())

    before = memories()
    expert = GroupExpertPlane(
        "e0", 5, HIDDEN, DIGEST, backend=GlooBackend(), host="127.0.0.1", key=KEY, silence_s=0.4
    )
    peer = ByHand(f"gloo://127.0.0.1:{expert.port}#{KEY.hex()}")
    assert memories() == before + 1
    peer.link.close()
    until(lambda: memories() == before)
    expert.close()


def test_messages_of_many_megabytes_pass_while_others_wait():
    shape = LaneShape(4096, 2, 512, 3)  # 8 MiB a message each way
    expert = GroupExpertPlane(
        "e0", 5, 4096, DIGEST, backend=GlooBackend(), host="127.0.0.1", key=KEY
    )
    router = GroupRouterPlane("r0", 1, shape, DIGEST, GlooBackend())
    router.connect("e0", f"gloo://127.0.0.1:{expert.port}#{KEY.hex()}", 5, DEADLINE_S)
    x = torch.arange(512 * 4096, dtype=torch.float32).view(512, 4096)
    rows, none = np.arange(511, -1, -1, dtype=np.int32), np.zeros(0, dtype=np.int32)
    block = PairBlock.of(rows, none, none, none, none.view(np.float32))
    part = replace(part_of(1), x=x, block=block)
    tickets = [router.try_send("e0", part) for _ in range(3)]
    answers = []
    deadline = time.monotonic() + DEADLINE_S
    while len(answers) < 3:
        assert time.monotonic() < deadline
        expert.wait(0.01)
        for arrival in expert.poll():
            assert torch.equal(arrival.x, x.flip(0))
            arrival.out.copy_(arrival.x * 2)
            expert.answer(arrival, AnswerStatus.OK, 0, 0)
        answers += router.poll()
    assert [answer.ticket for answer in answers] == tickets
    assert all(torch.equal(answer.out, x.flip(0) * 2) for answer in answers)
    router.close()
    expert.close()
