"""What every plane does, whatever carries its lanes; both ends in one process."""

from __future__ import annotations

import gc
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ep_kernels.plane import AnswerStatus, LaneLost, LaneRefused, PairBlock, PlaneError
from lane_peer import CAPACITY, DIGEST, HIDDEN, RING, expected, part_of, serve
from plane_pair import DEADLINE_S, SHAPE, Pair


@pytest.fixture(params=["shm", "tcp", "gloo", "gloo-device"])
def kind(request):
    return request.param


@pytest.fixture
def pair(tmp_path, kind):
    pair = Pair(tmp_path, kind)
    yield pair
    pair.close()


@pytest.mark.parametrize("tokens", [0, 1, 2, CAPACITY])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("wire", [torch.float32, torch.float16, torch.bfloat16])
def test_a_part_arrives_as_sent_and_its_answer_comes_back(tmp_path, kind, tokens, exact, wire):
    pair = Pair(tmp_path, kind, replace(SHAPE, exact=exact, wire=wire))
    part = replace(part_of(tokens), step=4, layer=2, epoch=9)
    began = time.perf_counter_ns()
    ticket = pair.router.try_send("e0", part)
    [arrival] = pair.arrivals()
    assert (arrival.peer, arrival.exact) == ("r0", exact)
    assert (arrival.step, arrival.layer, arrival.epoch) == (4, 2, 9)
    assert arrival.x.dtype is wire
    block = part.block
    assert torch.equal(arrival.x, part.x[torch.from_numpy(block.rows)].to(wire))
    for name in ("pair_token", "pair_slot", "pair_expert", "pair_weight"):
        assert getattr(arrival, name).tolist() == getattr(block, name).tolist()
    rows = block.num_pairs if exact else tokens
    assert tuple(arrival.out.shape) == (rows, HIDDEN)
    arrival.out.copy_(torch.arange(rows * HIDDEN).view(rows, HIDDEN))
    pair.expert.answer(arrival, AnswerStatus.OK, 7, 123)
    [answer] = pair.answers()
    assert (answer.peer, answer.ticket) == ("e0", ticket)
    assert answer.compute_ns == 123
    if kind == "shm":
        assert answer.began_ns == 7
    else:  # the other end's clock means nothing at this one
        assert began < answer.began_ns < time.perf_counter_ns()
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
    waiting, held, done, step = {}, [], 0, 0
    deadline = time.monotonic() + DEADLINE_S
    while done < 20 * RING:
        assert time.monotonic() < deadline
        part = part_of(rng.choice([0, 1, 5, CAPACITY]), step)
        step += 1
        ticket = pair.router.try_send("e0", part)
        if ticket is not None:
            waiting[ticket] = part
        held += pair.expert.poll()
        rng.shuffle(held)
        if held and (ticket is None or rng.random() < 0.4):
            arrival = held.pop()
            pair.expert.answer(arrival, serve(arrival), 7, 0)
        for answer in pair.router.poll():
            want = expected(waiting.pop(answer.ticket), exact=False)
            torch.testing.assert_close(answer.out, want)
            pair.router.release(answer)
            done += 1
        if ticket is None and not held:
            pair.router.wait(0.01)


def test_a_stale_answer_carries_its_status(pair):
    pair.router.try_send("e0", part_of(2))
    [arrival] = pair.arrivals()
    pair.expert.answer(arrival, AnswerStatus.STALE, 7, 0)
    assert pair.answers()[0].status is AnswerStatus.STALE


def test_slots_are_lent_of_lanes_in_shared_memory_and_none_in_vain(pair, kind):
    router = pair.router
    assert router.in_memory(["e0", "nobody"]) == (kind == "shm")
    assert router.take(["nobody"], 1) is None
    taken = router.take(["e0", None], 3)
    assert (taken is None) == (kind != "shm")
    assert router.in_flight() == (kind == "shm")
    if taken is not None:
        assert taken.lanes[1] is None
        router.give_back(taken)
    assert router.in_flight() == 0
    router.try_send("e0", part_of(1))  # later sequences are as good
    pair.serve()
    (answer,) = pair.answers()
    router.release(answer)


def test_a_part_beyond_the_capacity_is_refused_before_anything_is_sent(pair):
    part = part_of(3)
    none = np.zeros(0, dtype=np.int32)
    rows = np.zeros(CAPACITY + 1, dtype=np.int32)
    many = PairBlock.of(rows, none, none, none, none.view(np.float32))
    big = replace(part, block=many)
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
    router = pair.new_router("r1", 1, change.get("shape", SHAPE), change.get("digest", DIGEST))
    peer = change.get("peer", "e0")
    with pytest.raises(LaneRefused, match=reason) as caught:
        pair.connect(router, peer, change.get("incarnation", 5))
    assert caught.value.peer == peer
    assert router.peers() == {}
    assert pair.expert.peers() == ["r0"]
    router.close()


def test_an_older_incarnation_of_a_router_is_fenced_even_after_the_newer_left(pair):
    pair.router.close()
    zombie = pair.new_router("r0", 6)
    with pytest.raises(LaneRefused, match="incarnation 6 of router r0 is fenced: 7"):
        pair.connect(zombie)
    zombie.close()
    heir = pair.new_router("r0", 8)
    pair.connect(heir)
    heir.close()


def test_lanes_are_limited_and_a_closed_one_makes_room(pair):
    routers = [pair.new_router(f"x{i}") for i in range(2)]
    pair.connect(routers[0])
    with pytest.raises(LaneRefused, match="has its 2 lanes open already"):
        pair.connect(routers[1])
    pair.connect(pair.router)  # replaces its own
    routers[0].disconnect("e0")
    while len(pair.expert.peers()) > 1:
        pair.expert.wait(DEADLINE_S)
    pair.connect(routers[1])
    assert sorted(pair.expert.peers()) == ["r0", "x1"]
    for router in routers:
        router.close()


def test_a_new_lane_to_the_same_peer_drops_the_old_tickets(pair):
    pair.router.try_send("e0", part_of(1, step=1))
    [old] = pair.arrivals()
    pair.connect(pair.router)
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


def test_a_plane_leaves_no_descriptor_thread_or_memory_behind(tmp_path, kind):
    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    def mapped():
        return Path("/proc/self/maps").read_text().count("memfd:moemesh")

    gc.collect()
    before = (descriptors(), mapped(), threading.active_count())
    for _ in range(3):
        pair = Pair(tmp_path, kind)
        pair.router.try_send("e0", part_of(1))
        pair.serve()
        [answer] = pair.answers()
        pair.router.release(answer)
        pair.connect(pair.router)
        pair.close()
        pair.close()
        del pair, answer
    gc.collect()
    assert (descriptors(), mapped(), threading.active_count()) == before
