"""A router's device sends to expert workers and waits for them by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from ep_kernels.plane import AnswerStatus, Arrival, LaneShape
from ep_kernels.routing import Places
from ep_kernels.shm.lane import Request
from ep_kernels.triton.ahead import ExchangeShape, StepExchange, StepRoutes
from ep_kernels.triton.device import Device, open_device
from ep_kernels.triton.lane_messages import Fault, Verdict
from ep_kernels.triton.symm import SymmExpertPlane, SymmRouterPlane, Taken
from forked import Forked
from lane_peer import DIGEST, HIDDEN, TOP_K, compute, part_of, run_expert, serve

FRAME, RING, EXPERTS = 4, 2, 8
LAYERS = (1, 3, 4)
DEADLINE_S = 100.0


@cache
def device() -> Device:
    return open_device("interpreter")


def places(first_rank: int = 0) -> Places:
    """Expert e is on one of two ranks in turn, expert 0 on both."""
    own = [[(e + first_rank) % 2] for e in range(EXPERTS)]
    own[0] = [0, 1]
    first = np.cumsum([0, *map(len, own)], dtype=np.int32)
    expert = np.repeat(np.arange(EXPERTS), [len(ranks) for ranks in own])
    rank = np.array([r for ranks in own for r in ranks], dtype=np.int32)
    return Places(first, rank, (expert + 10 * rank).astype(np.int32))


class Worker:
    """An expert worker's host on a thread: ``act`` is what it does with a part."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = str(directory / name)
        self.plane = SymmExpertPlane(name, 1, self.path, HIDDEN, DIGEST, device=device())
        self.act: Callable[[Arrival], None] = self.answer
        self.seen: list[Arrival] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def answer(self, arrival: Arrival, status: AnswerStatus | None = None) -> None:
        found = serve(arrival)
        self.plane.answer(arrival, found if status is None else status, 7, 0)

    def _run(self) -> None:
        while not self._stopping:
            self.plane.wait(5.0)
            for arrival in self.plane.poll():
                self.seen.append(arrival)
                self.act(arrival)

    def close(self) -> None:
        self._stopping = True
        self.plane.wake()
        self._thread.join(DEADLINE_S)
        self.plane.close()


class World:
    """A router with lanes to two workers, and a frame of four rows."""

    def __init__(self, directory: Path, wire: torch.dtype = torch.float32) -> None:
        self.workers = [Worker(directory, name) for name in ("e0", "e1")]
        shape = LaneShape(HIDDEN, TOP_K, FRAME, RING, wire=wire)
        self.plane = SymmRouterPlane("r0", 1, shape, DIGEST, device())
        for worker in self.workers:
            self.plane.connect(Path(worker.path).name, worker.path, 1, DEADLINE_S)
        self.routes = StepRoutes([places()] * len(LAYERS), 2, device())
        exchange = ExchangeShape(FRAME, TOP_K, HIDDEN, LAYERS, wire, self.plane.pair_stride)
        self.exchange = StepExchange(exchange, self.routes, device())
        self._rng = torch.Generator().manual_seed(5)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.plane.close()
        for worker in self.workers:
            worker.close()

    def take(self) -> Taken:
        taken = self.plane.take(("e0", "e1"), len(LAYERS))
        assert taken is not None
        return taken

    def step(self, live: int = FRAME, limit_s: float = DEADLINE_S, ids: int | None = None):
        """Verdict, and what was to be and what was computed in each layer ``[live, hidden]``."""
        taken, exchange = self.take(), self.exchange
        stamp = (8, 2, time.monotonic_ns(), int(limit_s * 1e9), live, self.plane.abort_address)
        exchange.load(taken.fields, stamp, live)
        exchange.begin()
        wanted, got = [], []
        for number in range(len(LAYERS)):
            x = torch.randn(FRAME, HIDDEN, generator=self._rng)
            chosen = torch.rand(FRAME, EXPERTS, generator=self._rng).argsort(1)[:, :TOP_K].int()
            chosen = chosen.contiguous()
            if ids is not None:
                chosen.fill_(ids)
            weights = torch.rand(FRAME, TOP_K, generator=self._rng)
            exchange.dispatch(number, x, chosen, weights)
            got.append(exchange.combine(number)[:live])
            token = np.arange(FRAME, dtype=np.int32).repeat(TOP_K)
            sums = compute(
                x.to(self.plane.shape.wire), token, chosen.flatten().numpy(),
                weights.flatten().numpy(), exact=False,
            )  # fmt: skip
            wanted.append(sums[:live])
        verdict = Verdict.of(int(exchange.status))
        corrupt = verdict.lane if verdict.fault is Fault.CORRUPT else -1
        self.plane.give_back(taken, corrupt)
        return verdict, wanted, got

    def check(self, live: int = FRAME) -> None:
        """A step without fault."""
        verdict, wanted, got = self.step(live)
        assert verdict.fault is Fault.NONE
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end
            self.plane.wait(0.01)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_each_layer_gives_the_experts_sums_and_rows_that_fill_up_go_nowhere(tmp_path, wire):
    with World(tmp_path, wire) as world:
        for live in (FRAME, 1, 3):
            before = [len(worker.seen) for worker in world.workers]
            world.check(live)
            exchange = world.exchange
            assert exchange.counts[:, :, 1].sum(1).tolist() == [live * TOP_K] * len(LAYERS)
            assert (exchange.ids[:, live:] == -1).all()
            assert (exchange.ids[:, :live] >= 0).all()
            for lane, worker in enumerate(world.workers):
                seen = worker.seen[before[lane] :]
                sent = [n for n in exchange.counts[:, lane].tolist() if n[0]]
                assert [[a.x.shape[0], a.pair_slot.size] for a in seen] == sent
                assert {(a.step, a.epoch) for a in seen} == {(8, 2)}
                assert all((a.pair_slot == a.pair_expert + 10 * lane).all() for a in seen)
            assert world.plane.in_flight() == 0
        # The host's own way goes on over the same lanes.
        part = part_of(2)
        assert world.plane.try_send("e0", part) is not None
        world.until(world.plane.poll)


def test_a_stale_answer_ends_the_step_and_costs_nothing_else(tmp_path):
    with World(tmp_path) as world:
        one = world.workers[0]

        def refuse_the_second(arrival: Arrival) -> None:
            late = arrival.layer == LAYERS[1]
            one.answer(arrival, AnswerStatus.STALE if late else None)

        one.act = refuse_the_second
        verdict, wanted, got = world.step()
        assert verdict == (Fault.STALE, 0, 1)
        torch.testing.assert_close(got[0], wanted[0], rtol=0, atol=1e-4)
        world.until(lambda: not world.plane.poll() and world.plane.in_flight() == 0)
        assert LAYERS[2] not in {a.layer for worker in world.workers for a in worker.seen}
        one.act = one.answer
        world.check()


def test_a_lane_that_ends_ends_the_wait(tmp_path):
    with World(tmp_path) as world:
        gone = world.workers[0]
        gone.act = lambda arrival: gone.plane.close()
        verdict, *_ = world.step()
        assert verdict.fault is Fault.ABORTED
        assert [lost.peer for lost in world.plane.lost()] == ["e0"]
        assert world.plane.take(("e0", "e1"), 1) is None
        world.until(lambda: not world.plane.poll() and world.plane.in_flight() == 0)
        taken = world.plane.take((None, "e1"), 1)
        assert taken is not None
        assert taken.fields[:, 0].tolist() == [0] * len(taken.fields)
        world.plane.give_back(taken)


def test_a_late_answer_keeps_its_slot_until_it_comes(tmp_path):
    with World(tmp_path) as world:
        late = world.workers[0]
        late.act = lambda arrival: None
        verdict, *_ = world.step(limit_s=0.02)
        assert verdict == (Fault.TIMED_OUT, 0, 0)
        world.until(lambda: not world.plane.poll() and len(late.seen) == 1)
        assert world.plane.in_flight() == 1
        first = late.seen[0].ring_slot
        late.act = late.answer
        world.check()
        assert {arrival.ring_slot for arrival in late.seen[1:]} == {1 - first}
        assert world.plane.in_flight() == 1
        late.answer(late.seen[0])
        answers = []
        world.until(lambda: answers.extend(world.plane.poll()) or answers)
        assert [answer.peer for answer in answers] == ["e0"]
        world.plane.release(answers[0])
        assert world.plane.in_flight() == 0
        world.check()


def test_without_a_free_slot_nothing_is_taken(tmp_path):
    with World(tmp_path) as world:
        world.workers[1].act = lambda arrival: None
        for _ in range(RING):
            assert world.plane.try_send("e1", part_of(1)) is not None
        assert world.plane.take(("e0", "e1"), 1) is None
        assert world.plane.in_flight() == RING


def test_an_answer_that_is_none_costs_its_lane(tmp_path):
    with World(tmp_path) as world:
        wrong = world.workers[1]

        def lie(arrival: Arrival) -> None:
            (lane,) = wrong.plane._lanes.values()
            slot = lane.memory.slots[arrival.ring_slot]
            rows = arrival.x.shape[0]
            slot.write_answer(arrival.sequence, AnswerStatus.OK, 7, 0, rows + 1)
            lane.memory.answer_flags[arrival.ring_slot] = arrival.sequence

        wrong.act = lie
        verdict, *_ = world.step()
        assert (verdict.fault, verdict.lane) == (Fault.CORRUPT, 1)
        assert world.plane.corrupt_lanes == 1
        assert list(world.plane.peers()) == ["e0"]


def test_an_expert_that_is_nowhere_is_found(tmp_path):
    with World(tmp_path) as world:
        verdict, *_ = world.step(ids=EXPERTS)
        assert verdict.fault is Fault.UNPLACED
        assert not any(worker.seen for worker in world.workers)
        world.check()


def test_routes_change_in_place_where_their_shape_allows_it(tmp_path):
    with World(tmp_path) as world:
        assert world.routes.replace([places(1)] * len(LAYERS), 2)
        world.check()
        ranks = [set((worker.seen[0].pair_expert % 2).tolist()) for worker in world.workers]
        assert ranks[0] <= {1, 0}
        for lane, worker in enumerate(world.workers):
            alone = {e for a in worker.seen for e in a.pair_expert.tolist() if e}
            assert {(e + 1) % 2 for e in alone} == {lane}
        one_more = Places(*(array.copy() for array in places()))
        one_more = Places(np.append(one_more.first[:-1], 8).astype(np.int32), one_more.rank[:-1],
                          one_more.slot[:-1])  # fmt: skip
        assert not world.routes.replace([one_more] * len(LAYERS), 2)


def test_a_worker_looks_for_parts_while_its_router_is_busy_and_sleeps_otherwise(tmp_path):
    path = str(tmp_path / "e0")
    expert = SymmExpertPlane("e0", 1, path, HIDDEN, DIGEST, device=device())
    shape = LaneShape(HIDDEN, TOP_K, FRAME, RING)
    router = SymmRouterPlane("r0", 1, shape, DIGEST, device())
    router.connect("e0", path, 1, DEADLINE_S)
    ends, _ = expert._ends
    bell = expert._doorbell

    def attends(give_up_s: float, timeout_s: float = DEADLINE_S) -> bool:
        return ends.attend(bell, bell.value(), spin_ns=0, timeout_s=timeout_s, give_up_s=give_up_s)

    try:
        assert not attends(DEADLINE_S)  # not busy: at once
        taken = router.take(("e0",), 1)
        assert taken is not None
        (entry,) = taken.lanes
        assert entry is not None
        lane, slot, first = entry

        def publish() -> None:
            slot.write_request(Request(first, 8, 1, 2, 0, 0, 7))
            lane.memory.request_flags[slot.index] = first

        threading.Timer(0.02, publish).start()
        assert attends(DEADLINE_S)  # nobody rang
        assert [arrival.sequence for arrival in expert.poll()] == [first]
        assert attends(DEADLINE_S, 0.01)  # its time was over
        assert not attends(0.01)  # given up after so long
        assert not attends(DEADLINE_S)
        lane.memory.answer_flags[slot.index] = first
        router.give_back(taken)
        assert lane.memory.busy[0] == 0
        taken = router.take(("e0",), 1)
        assert taken is not None
        assert not attends(0.01)  # believed again: it was waited for, then given up
        router.give_back(taken)
        assert not attends(DEADLINE_S)
    finally:
        router.close()
        expert.close()


def test_workers_in_processes_and_one_that_is_killed(tmp_path):
    peers = [
        Forked(run_expert, "symm", name, 1, tmp_path / name, HIDDEN, seed)
        for seed, name in enumerate(("p0", "p1"))
    ]
    try:
        for peer in peers:
            peer.told()
        with World(tmp_path) as world:
            for lane, name in enumerate(("e0", "e1")):
                world.plane.disconnect(name)
                world.plane.connect(f"p{lane}", str(tmp_path / f"p{lane}"), 1, DEADLINE_S)
            world.take = lambda: world.plane.take(("p0", "p1"), len(LAYERS))
            for live in (1, FRAME):
                world.check(live)
            peers[1].kill()
            world.until(lambda: len(world.plane.peers()) == 1)
            assert world.plane.take(("p0", "p1"), 1) is None
    finally:
        for peer in peers:
            peer.kill()


def test_a_part_that_a_sleeping_worker_has_not_seen_is_rung_for_at_the_end(tmp_path):
    path = str(tmp_path / "e0")
    expert = SymmExpertPlane("e0", 1, path, HIDDEN, DIGEST, device=device())
    router = SymmRouterPlane("r0", 1, LaneShape(HIDDEN, TOP_K, FRAME, RING), DIGEST, device())
    router.connect("e0", path, 1, DEADLINE_S)
    try:
        taken = router.take(("e0",), 1)
        assert taken is not None
        assert expert.poll() == []
        (entry,) = taken.lanes
        assert entry is not None
        lane, slot, first = entry
        slot.write_request(Request(first, 8, 1, 2, 0, 0, 7))
        lane.memory.request_flags[slot.index] = first
        seen = expert._doorbell.value()
        router.give_back(taken)
        assert expert._doorbell.value() != seen
        assert [arrival.sequence for arrival in expert.poll()] == [first]
    finally:
        router.close()
        expert.close()
