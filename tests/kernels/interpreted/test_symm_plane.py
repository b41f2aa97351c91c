"""The symm plane through the Protocols of a data plane, as the shm plane is driven."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import lane_peer
import pytest
import torch
from ep_kernels.plane import AnswerStatus, LaneLost, LaneRefused, LaneShape, PlaneError
from ep_kernels.shm import ShmRouterPlane
from ep_kernels.triton.device import Device, open_device
from ep_kernels.triton.symm import SymmExpertPlane, SymmMemory, SymmRouterPlane
from forked import Forked
from lane_peer import CAPACITY, DIGEST, HIDDEN, RING, TOP_K, expected, part_of, run_expert, serve

DEADLINE_S = 100.0
SHAPE = LaneShape(HIDDEN, TOP_K, CAPACITY, RING)


@cache
def device() -> Device:
    return open_device("interpreter")


class Pair:
    """One router, one expert worker and the lane between them."""

    def __init__(self, directory: Path, shape: LaneShape = SHAPE) -> None:
        self.path = str(directory / "e0")
        self.expert = SymmExpertPlane("e0", 5, self.path, HIDDEN, DIGEST, device=device())
        self.router = SymmRouterPlane("r0", 7, shape, DIGEST, device())
        self.router.connect("e0", self.path, 5, DEADLINE_S)

    def collect(self, plane, count=1):
        found = plane.poll()
        while len(found) < count:
            plane.wait(DEADLINE_S)
            found += plane.poll()
        assert len(found) == count
        return found

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.router.close()
        self.expert.close()


@pytest.mark.parametrize("tokens", [0, 1, CAPACITY])
@pytest.mark.parametrize(
    ("exact", "wire"), [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)]
)
def test_a_part_arrives_as_sent_and_its_answer_comes_back(tmp_path, tokens, exact, wire):
    with Pair(tmp_path, replace(SHAPE, exact=exact, wire=wire)) as pair:
        part = replace(part_of(tokens), step=4, layer=2, epoch=9)
        ticket = pair.router.try_send("e0", part)
        [arrival] = pair.collect(pair.expert)
        assert (arrival.peer, arrival.exact) == ("r0", exact)
        assert (arrival.step, arrival.layer, arrival.epoch) == (4, 2, 9)
        assert arrival.x.dtype is wire
        assert torch.equal(arrival.x, part.x[torch.from_numpy(part.block.rows)].to(wire))
        for name in ("pair_token", "pair_slot", "pair_expert", "pair_weight"):
            assert getattr(arrival, name).tolist() == getattr(part.block, name).tolist()
        rows = part.block.num_pairs if exact else tokens
        assert tuple(arrival.out.shape) == (rows, HIDDEN)
        arrival.out.copy_(torch.arange(rows * HIDDEN).view(rows, HIDDEN))
        pair.expert.answer(arrival, AnswerStatus.OK, 7 << 40, 3 << 33)
        [answer] = pair.collect(pair.router)
        assert (answer.peer, answer.ticket) == ("e0", ticket)
        assert (answer.began_ns, answer.compute_ns) == (7 << 40, 3 << 33)
        assert answer.status is AnswerStatus.OK
        assert torch.equal(answer.out, torch.arange(rows * HIDDEN).view(rows, HIDDEN).float())
        pair.router.release(answer)
        assert pair.router.in_flight() == 0
        assert pair.router.poll() == []
        assert pair.expert.poll() == []


def test_the_ring_fills_and_wraps_with_answers_in_any_order(tmp_path):
    with Pair(tmp_path) as pair:
        rng = random.Random(3)
        waiting, held, done, full = {}, [], 0, 0
        for step in range(40):
            part = part_of(rng.choice([0, 1, 5]), step)
            ticket = pair.router.try_send("e0", part)
            if ticket is not None:
                waiting[ticket] = part
            full += ticket is None
            held += pair.expert.poll()
            rng.shuffle(held)
            if held and (ticket is None or rng.random() < 0.4):
                arrival = held.pop()
                pair.expert.answer(arrival, serve(arrival), 7, 0)
                for answer in pair.router.poll():
                    torch.testing.assert_close(
                        answer.out, expected(waiting.pop(answer.ticket), exact=False)
                    )
                    pair.router.release(answer)
                    done += 1
        assert done > 3 * RING
        assert full


def test_a_stale_answer_carries_its_status(tmp_path):
    with Pair(tmp_path) as pair:
        pair.router.try_send("e0", part_of(2))
        [arrival] = pair.collect(pair.expert)
        pair.expert.answer(arrival, AnswerStatus.STALE, 7, 0)
        assert pair.collect(pair.router)[0].status is AnswerStatus.STALE


def test_a_corrupt_part_costs_its_lane_only(tmp_path):
    with Pair(tmp_path) as pair:
        other = SymmRouterPlane("r1", 1, SHAPE, DIGEST, device())
        other.connect("e0", pair.path, 5, DEADLINE_S)
        pair.router.try_send("e0", part_of(3))
        lane = pair.router._lanes["e0"]
        slot = lane.in_flight[0].slot
        slot.write_request(slot.read_request()._replace(tokens=CAPACITY + 1))
        assert pair.expert.poll() == []
        assert pair.expert.corrupt_lanes == 1
        while not (lost := pair.router.lost()):
            pair.router.wait(DEADLINE_S)
        assert [type(loss) for loss in lost] == [LaneLost]
        assert other.try_send("e0", part_of(3)) is not None
        assert len(pair.collect(pair.expert)) == 1
        other.close()


def test_a_plane_of_the_other_kind_and_a_wire_it_does_not_carry_are_refused(tmp_path):
    with Pair(tmp_path) as pair:
        shm = ShmRouterPlane("r1", 1, SHAPE, DIGEST)
        with pytest.raises(LaneRefused, match="Offer came with 2 fds, expected 3"):
            shm.connect("e0", pair.path, 5, DEADLINE_S)
        shm.close()
        with pytest.raises(PlaneError, match="float16"):
            SymmRouterPlane("r1", 1, replace(SHAPE, wire=torch.float16), DIGEST, device())
        with pytest.raises(PlaneError, match="lower capacity_tokens"):
            SymmMemory.lay_out(LaneShape(7168, 8, 1 << 16, 4))
        with pytest.raises(PlaneError, match="at least 1"):
            SymmMemory.lay_out(LaneShape(7168, 8, 0, 4))


def test_what_is_in_hand_outlives_its_lane_and_then_nothing_is_left(tmp_path):
    def left():
        maps = Path("/proc/self/maps").read_text()
        return len(list(Path("/proc/self/fd").iterdir())), maps.count("memfd:moemesh")

    device()
    gc.collect()
    before = left()
    with Pair(tmp_path) as pair:
        part = part_of(3)
        pair.router.try_send("e0", part)
        [arrival] = pair.collect(pair.expert)
        pair.expert.answer(arrival, serve(arrival), 7, 0)
        [answer] = pair.collect(pair.router)
        pair.router.connect("e0", pair.path, 5, DEADLINE_S)  # in place of the first
        pair.router.try_send("e0", part_of(5))
        [other] = pair.collect(pair.expert)
        pair.expert.answer(other, serve(other), 7, 0)
        assert len(pair.collect(pair.router)) == 1
    torch.testing.assert_close(answer.out, expected(part, exact=False))
    assert torch.equal(arrival.x, part.x[torch.from_numpy(part.block.rows)])
    del pair, arrival, answer, other
    gc.collect()
    assert left() == before


def test_expert_workers_in_processes_of_their_own_and_what_a_killed_one_costs(tmp_path):
    """Messages with random delays and answers out of order; then one is killed in mid-part."""
    peers = [
        Forked(run_expert, "symm", name, 1, tmp_path / name, HIDDEN, seed)
        for seed, name in enumerate(("e0", "e1"))
    ]
    try:
        assert [peer.told() for peer in peers] == [str(tmp_path / name) for name in ("e0", "e1")]
        plane = SymmRouterPlane("r0", 1, SHAPE, DIGEST, device())
        for name in ("e0", "e1"):
            plane.connect(name, str(tmp_path / name), 1, DEADLINE_S)
        rng = random.Random(5)
        waiting, sent = {}, 0
        while sent < 60 or waiting:
            while sent < 60:
                part = lane_peer.make_part(rng, rng.choice([0, 1, 2, 7]), sent)
                ticket = plane.try_send(rng.choice(["e0", "e1"]), part)
                if ticket is None:
                    break
                waiting[ticket] = part
                sent += 1
            plane.wait(DEADLINE_S)
            for answer in plane.poll():
                wanted = expected(waiting.pop(answer.ticket), exact=False)
                if wanted is None:
                    assert answer.status is AnswerStatus.STALE
                else:
                    torch.testing.assert_close(answer.out, wanted, rtol=0, atol=1e-3)
                plane.release(answer)
        peers[0].kill()
        while not (lost := plane.lost()):
            plane.wait(DEADLINE_S)
        assert [loss.peer for loss in lost] == ["e0"]
        with pytest.raises(LaneLost):
            plane.try_send("e0", part_of(3))
        assert plane.try_send("e1", part_of(3)) is not None
        [answer] = Pair.collect(None, plane)
        torch.testing.assert_close(answer.out, expected(part_of(3), exact=False))
        plane.close()
    finally:
        for peer in peers:
            peer.kill()
