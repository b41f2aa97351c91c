"""Lanes between real processes, and what is left when one is killed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from ep_kernels.plane import AnswerStatus, LaneLost, LaneShape
from forked import Forked
from lane_peer import (
    CAPACITY,
    HIDDEN,
    RING,
    TOP_K,
    expected,
    new_expert,
    new_router,
    part_of,
    run_expert,
    run_router,
    serve,
)

DEADLINE_S = 120.0


@pytest.fixture(params=["shm", "tcp", "gloo"])
def kind(request):
    return request.param


@pytest.fixture
def spawn():
    peers: list[Forked] = []

    def start(*arguments: object) -> Forked:
        peers.append(Forked(*arguments))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the awaited event did not come"


def test_two_routers_and_three_experts_exchange_many_messages(spawn, tmp_path, kind):
    names, messages = ["e0", "e1", "e2"], {"shm": 500, "tcp": 150, "gloo": 40}[kind]
    experts = [
        spawn(run_expert, kind, name, 1, tmp_path / name, HIDDEN, seed)
        for seed, name in enumerate(names)
    ]
    places = {name: expert.told() for name, expert in zip(names, experts, strict=True)}
    routers = [
        spawn(run_router, f"r{seed}", messages, seed, exact, places)
        for seed, exact in enumerate([False, True])
    ]
    for router in routers:
        result = router.told()
        assert result["sent"] == messages
        assert result["stale"] > 0
        assert result["full"] > 0
    assert [peer.stop() for peer in [*routers, *experts]] == [0] * 5
    assert list(tmp_path.iterdir()) == []


def test_a_killed_expert_is_noticed_while_waiting_and_its_heir_is_reached(spawn, tmp_path, kind):
    in_shm = set(Path("/dev/shm").iterdir())
    first = spawn(run_expert, kind, "e0", 1, tmp_path / "e0", HIDDEN, 0)
    address = first.told()
    plane = new_router("r0", LaneShape(HIDDEN, TOP_K, CAPACITY, RING), [address])
    plane.connect("e0", address, 1, DEADLINE_S)
    first.signal(signal.SIGSTOP)  # the part stays unanswered
    part = part_of(3)
    assert plane.try_send("e0", part) is not None
    plane.poll()
    first.kill()
    plane.wait(DEADLINE_S)
    lost = plane.lost()
    assert [(loss.peer, type(loss)) for loss in lost] == [("e0", LaneLost)]
    assert plane.lost() == []
    assert plane.poll() == []
    assert plane.in_flight() == 0
    with pytest.raises(LaneLost):
        plane.try_send("e0", part)

    second = spawn(run_expert, kind, "e0", 2, tmp_path / "e0", HIDDEN, 0)
    plane.connect("e0", second.told(), 2, DEADLINE_S)
    assert plane.peers() == {"e0": 2}
    ticket = plane.try_send("e0", part)
    answers = []
    until(lambda: plane.wait(1.0) or answers.extend(plane.poll()) or answers)
    assert answers[0].ticket == ticket
    assert answers[0].status is AnswerStatus.OK
    torch.testing.assert_close(answers[0].out, expected(part, exact=False))
    plane.release(answers[0])
    plane.close()
    assert second.stop() == 0
    assert set(Path("/dev/shm").iterdir()) == in_shm
    assert list(tmp_path.iterdir()) == []


def test_a_killed_router_frees_its_lane_and_a_late_answer_is_ignored(spawn, tmp_path, kind):
    plane, address = new_expert(kind, "e0", 1, str(tmp_path / "e0"), HIDDEN)
    router = spawn(run_router, "r0", 100, 0, False, {"e0": address})
    arrivals = []
    until(lambda: plane.wait(1.0) or arrivals.extend(plane.poll()) or arrivals)
    assert plane.peers() == ["r0"]
    router.kill()
    until(lambda: plane.wait(1.0) or arrivals.extend(plane.poll()) or not plane.peers())
    for arrival in arrivals:
        plane.answer(arrival, serve(arrival), 7, 0)
    assert plane.poll() == []
    assert plane.corrupt_lanes == 0
    plane.close()


def test_a_killed_expert_costs_its_own_lane_only(spawn, tmp_path):
    """Whose rows and those of others go through groups of one back end."""
    experts = [spawn(run_expert, "gloo", name, 1, tmp_path, HIDDEN, 0) for name in ("e0", "e1")]
    addresses = [expert.told() for expert in experts]
    plane = new_router("r0", LaneShape(HIDDEN, TOP_K, CAPACITY, RING), addresses)
    for name, address in zip(("e0", "e1"), addresses, strict=True):
        plane.connect(name, address, 1, DEADLINE_S)
    experts[0].signal(signal.SIGSTOP)
    part = part_of(CAPACITY)
    while plane.try_send("e0", part) is not None:
        pass  # all that its ring takes is under way when it dies
    experts[0].kill()
    lost, answers = [], []
    until(lambda: plane.wait(1.0) or plane.poll() or lost.extend(plane.lost()) or lost)
    assert [loss.peer for loss in lost] == ["e0"]
    for _ in range(2 * RING):
        ticket = plane.try_send("e1", part)
        until(lambda: plane.wait(1.0) or answers.extend(plane.poll()) or answers)
        assert [answer.ticket for answer in answers] == [ticket]
        torch.testing.assert_close(answers[0].out, expected(part, exact=False))
        plane.release(answers.pop())
    assert plane.lost() == []
    plane.close()
    assert experts[1].stop() == 0
