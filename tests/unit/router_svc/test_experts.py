from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from ep_kernels.crew import Crew
from ep_kernels.grouped_ffn import ExpertBank, reference_rows, reference_sum
from ep_kernels.plane import LaneShape

from mesh.messages import Placement
from moe_model.experts import combine_rows
from router_svc.experts import MeshExperts
from router_svc.profile import Times
from router_svc.tickets import ExpertsUnavailableError, MeshTicket

HIDDEN, INTERMEDIATE, TOP_K, LAYER = 32, 16, 4, 2
DEADLINE_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Mesh:
    """``MeshExperts`` with workers that hold what a map from rank to experts says."""

    def __init__(self, fleet, weights, *, exact=False, capacity=64, ring_slots=4, timeout_s=5.0):
        self.fleet = fleet
        self.weights = weights
        self.exact = exact
        self.clock = Clock()
        self.plane = fleet.plane(LaneShape(HIDDEN, TOP_K, capacity, ring_slots, exact))
        self.workers = {}
        self.epoch = 0
        self.experts = MeshExperts(
            self.plane,
            num_experts=len(weights),
            moe_layers=(LAYER,),
            capacity_tokens=capacity,
            replica_choice="water-fill",
            exact=exact,
            timeout_s=timeout_s,
            answer_timeout_s=2.0,
            clock=self.clock,
            times=Times(),
            crew=Crew(0),
        )

    def start(self, name: str, slots: list[int]) -> None:
        bank = ExpertBank(len(slots), HIDDEN, INTERMEDIATE, kind="fp32", exact=self.exact)
        for slot, expert in enumerate(slots):
            if expert >= 0:
                bank.load(slot, expert, *self.weights[expert])
        worker = self.workers[name] = self.fleet.worker(name, {LAYER: bank})
        self.plane.connect(name, worker.path, worker.incarnation, 5.0)

    def place(
        self,
        ranks: dict[str, list[int]],
        serving: set[str] | None = None,
        coming: set[str] = frozenset(),
    ) -> None:
        self.epoch += 1
        flat = tuple(expert for held in ranks.values() for expert in held)
        placement = Placement(
            epoch=self.epoch,
            moe_layers=(LAYER,),
            num_experts=len(self.weights),
            ranks=tuple(ranks),
            slots_per_rank=tuple(len(held) for held in ranks.values()),
            physical_to_logical=(flat,),
        )
        self.placement = placement
        self.experts.route_by(placement, set(ranks) if serving is None else serving, coming)

    def up(self, ranks: dict[str, list[int]]) -> None:
        for name, slots in ranks.items():
            self.start(name, slots)
        self.place(ranks)

    def pump_until(self, condition: Callable[[], bool]) -> None:
        """As the engine does, with what it would do about lost lanes."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "the mesh does not answer"
            lost = self.experts.pump()
            if lost:
                self.experts.route_by(self.placement, set(self.plane.peers()))
                for lane in lost:
                    self.experts.lane_lost(lane.peer)
            elif not condition():
                self.plane.wait(0.2)

    def dispatch(self, x, ids, w) -> MeshTicket:
        return self.experts.micro_batch(bytes(len(x))).dispatch(LAYER, x, ids, w)

    def finish(self, ticket: MeshTicket) -> torch.Tensor:
        self.pump_until(lambda: ticket.done)
        return ticket.result()


def batch(tokens: int, experts: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    ids = (
        torch.stack([torch.randperm(experts, generator=generator)[:TOP_K] for _ in range(tokens)])
        if tokens
        else torch.zeros(0, TOP_K, dtype=torch.long)
    )
    return x, ids.int(), torch.rand(tokens, TOP_K, generator=generator)


def expected(weights, x, ids, w) -> torch.Tensor:
    token = torch.arange(ids.numel()) // TOP_K
    slots = ids.reshape(-1).numpy()
    return reference_sum(x, token.numpy(), weights, slots, w.reshape(-1).numpy())


PLACEMENTS = [
    {"a": [0, 1, 2, 3, 4, 5, 6, 7]},
    {"a": [7, 3, 1, 5, -1], "b": [0, 2, 4, 6]},
    {"a": [0, 1], "b": [-1, 2, 3, 4], "c": [5, 6, 7]},
    {"a": [0, 1, 2, 3, 4], "b": [4, 5, 6, 7, 0], "c": [1, 2, 5]},
]


@pytest.mark.parametrize("ranks", PLACEMENTS, ids=str)
@pytest.mark.parametrize("exact", [False, True])
def test_the_mesh_gives_the_sum_over_experts(fleet, expert_weights, ranks, exact) -> None:
    weights = expert_weights(8)
    mesh = Mesh(fleet, weights, exact=exact)
    mesh.up(ranks)
    with torch.inference_mode():
        for tokens in (0, 1, 2, 5, 64):
            x, ids, w = batch(tokens, 8, tokens)
            out = mesh.finish(mesh.dispatch(x, ids, w))
            torch.testing.assert_close(out, expected(weights, x, ids, w), atol=1e-5, rtol=1e-5)
    assert mesh.plane.in_flight() == 0


def test_exact_sums_have_the_same_bits_under_every_placement(fleet, expert_weights) -> None:
    weights = expert_weights(8)
    x, ids, w = batch(9, 8)
    results = []
    with torch.inference_mode():
        for index, ranks in enumerate(PLACEMENTS):
            mesh = Mesh(fleet, weights, exact=True, capacity=4 + index)
            mesh.up({f"{name}{index}": slots for name, slots in ranks.items()})
            results.append(mesh.finish(mesh.dispatch(x, ids, w)))
    for other in results[1:]:
        assert torch.equal(other, results[0])
    token = (torch.arange(ids.numel()) // TOP_K).numpy()
    rows = reference_rows(x, token, weights, ids.reshape(-1).numpy())
    plain = combine_rows(rows.view(9, TOP_K, HIDDEN), w)
    torch.testing.assert_close(results[0], plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("exact", [False, True])
def test_more_tokens_than_lanes_hold_are_sent_in_turns(fleet, expert_weights, exact) -> None:
    weights = expert_weights(8)
    mesh = Mesh(fleet, weights, exact=exact, capacity=4, ring_slots=2)
    mesh.up(PLACEMENTS[1])
    x, ids, w = batch(61, 8)
    with torch.inference_mode():
        first = mesh.dispatch(x, ids, w)
        second = mesh.dispatch(-x, ids, w)
        torch.testing.assert_close(
            mesh.finish(second), expected(weights, -x, ids, w), atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(
            mesh.finish(first), expected(weights, x, ids, w), atol=1e-5, rtol=1e-5
        )
    assert mesh.plane.in_flight() == 0


def test_a_token_goes_to_a_rank_once(fleet, expert_weights) -> None:
    mesh = Mesh(fleet, expert_weights(8))
    mesh.up(PLACEMENTS[1])
    x, ids, w = batch(1, 8)
    with torch.inference_mode():
        mesh.finish(mesh.dispatch(x, ids, w))
    assert {worker.calls for worker in mesh.workers.values()} <= {0, 1}


def test_tokens_are_counted_once_per_expert_and_rank_also_when_sent_again(
    fleet, expert_weights
) -> None:
    mesh = Mesh(fleet, expert_weights(8))
    everything = [0, 1, 2, 3, 4, 5, 6, 7]
    mesh.up({"a": everything, "b": everything})
    x, ids, w = batch(16, 8)
    decodes = bytes([1] * 5 + [0] * 11)
    with torch.inference_mode():
        mesh.finish(mesh.experts.micro_batch(decodes).dispatch(LAYER, x, ids, w))
        assert mesh.experts.rank_pairs == {"a": [32], "b": [32]}
        mesh.workers["b"].held.clear()
        ticket = mesh.dispatch(x, ids, w)
        mesh.workers["b"].stop()
        mesh.finish(ticket)
    assert mesh.experts.tally.resent == 32
    counts = mesh.experts.counts
    per_expert = torch.bincount(ids.reshape(-1), minlength=8)
    assert counts.tokens.tolist() == [(2 * per_expert).tolist()]
    assert counts.decodes.tolist() == [torch.bincount(ids[:5].reshape(-1), minlength=8).tolist()]
    assert mesh.experts.rank_pairs == {"a": [96], "b": [32]}


def test_a_stale_part_goes_where_the_newer_placement_says(fleet, expert_weights) -> None:
    weights = expert_weights(8)
    mesh = Mesh(fleet, weights)
    truth = {"a": [7, 3, 1, 5], "b": [0, 2, 4, 6]}
    mesh.up(truth)
    mesh.place({"a": [3, 7, 1, 5], "b": [0, 2, 4, 6]})  # what the router wrongly believes
    x, ids, w = batch(12, 8)
    with torch.inference_mode():
        ticket = mesh.dispatch(x, ids, w)
        mesh.pump_until(lambda: mesh.experts.tally.stale > 0)
        assert not ticket.done
        mesh.place(truth)
        torch.testing.assert_close(
            mesh.finish(ticket), expected(weights, x, ids, w), atol=1e-5, rtol=1e-5
        )
    assert mesh.experts.tally.resent > 0


def test_a_stale_part_is_tried_again_at_a_worker_that_is_about_to_have_it(
    fleet, expert_weights
) -> None:
    weights = expert_weights(4)
    mesh = Mesh(fleet, weights)
    mesh.start("a", [0, 1, 2, -1])
    mesh.place({"a": [0, 1, 2, 3]})
    x, ids, w = batch(3, 4)
    with torch.inference_mode():
        ticket = mesh.dispatch(x, ids, w)
        mesh.pump_until(lambda: mesh.experts.tally.stale > 0)
        mesh.workers["a"].banks[LAYER].load(3, 3, *weights[3])
        mesh.clock.now += 0.1
        torch.testing.assert_close(
            mesh.finish(ticket), expected(weights, x, ids, w), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("exact", [False, True])
def test_what_a_lost_worker_had_goes_to_a_replica(fleet, expert_weights, exact) -> None:
    weights = expert_weights(8)
    mesh = Mesh(fleet, weights, exact=exact)
    mesh.up({"a": [0, 1, 2, 3, 4, 5, 6, 7], "b": [0, 1, 2, 3, 4, 5, 6, 7]})
    x, ids, w = batch(16, 8)
    with torch.inference_mode():
        mesh.workers["b"].held.clear()
        ticket = mesh.dispatch(x, ids, w)
        mesh.pump_until(lambda: mesh.workers["a"].calls > 0)
        mesh.workers["b"].stop()
        torch.testing.assert_close(
            mesh.finish(ticket), expected(weights, x, ids, w), atol=1e-5, rtol=1e-5
        )
    assert mesh.experts.tally.resent > 0
    assert mesh.plane.in_flight() == 0


def test_without_a_replica_the_tokens_wait_for_the_worker_to_come_back(
    fleet, expert_weights
) -> None:
    weights = expert_weights(8)
    mesh = Mesh(fleet, weights)
    ranks = {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}
    mesh.up(ranks)
    x, ids, w = batch(6, 8)
    with torch.inference_mode():
        mesh.workers["b"].held.clear()
        ticket = mesh.dispatch(x, ids, w)
        mesh.workers["b"].stop()
        mesh.pump_until(lambda: mesh.experts.parked)
        assert mesh.experts.unserved == {LAYER: (4, 5, 6, 7)}
        assert not ticket.done
        mesh.start("b", ranks["b"])
        mesh.place(ranks)
        torch.testing.assert_close(
            mesh.finish(ticket), expected(weights, x, ids, w), atol=1e-5, rtol=1e-5
        )


def test_experts_that_nobody_serves_fail_only_the_ticket_that_needs_them(
    fleet, expert_weights
) -> None:
    weights = expert_weights(8)
    mesh = Mesh(fleet, weights, timeout_s=3.0)
    mesh.start("a", [0, 1, 2, 3])
    mesh.place({"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}, serving={"a"})
    x, ids, w = batch(2, 4)
    with torch.inference_mode():
        doomed = mesh.dispatch(x, ids + torch.tensor([[4], [0]], dtype=torch.int32), w)
        fine = mesh.dispatch(x, ids, w)
        torch.testing.assert_close(
            mesh.finish(fine), expected(weights, x, ids, w), atol=1e-5, rtol=1e-5
        )
        assert not doomed.done
        assert 0 < mesh.experts.next_retry_s(60.0) <= 3.0
        mesh.clock.now += 3.1
        mesh.pump_until(lambda: doomed.done)
        with pytest.raises(ExpertsUnavailableError, match=r"experts \[4, 5, 6, 7\] of layer 2"):
            doomed.result()
    assert mesh.plane.in_flight() == 0


def test_a_worker_that_never_gets_what_it_should_hold_runs_into_the_time_out(
    fleet, expert_weights
) -> None:
    mesh = Mesh(fleet, expert_weights(4), timeout_s=1.0)
    mesh.start("a", [0, 1, 2, -1])
    mesh.place({"a": [0, 1, 2, 3]})
    x, ids, w = batch(3, 4)
    with torch.inference_mode():
        ticket = mesh.dispatch(x, ids, w)
        for stale in range(1, 4):
            mesh.pump_until(lambda stale=stale: mesh.experts.tally.stale >= stale)
            mesh.clock.now += 0.4
        mesh.pump_until(lambda: ticket.done)
        with pytest.raises(ExpertsUnavailableError):
            ticket.result()


def test_before_the_first_placement_everything_waits(fleet, expert_weights) -> None:
    weights = expert_weights(8)
    mesh = Mesh(fleet, weights)
    assert mesh.experts.unserved == {LAYER: tuple(range(8))}
    x, ids, w = batch(4, 8)
    with torch.inference_mode():
        ticket = mesh.dispatch(x, ids, w)
        assert not ticket.done
        mesh.up(PLACEMENTS[2])
        torch.testing.assert_close(
            mesh.finish(ticket), expected(weights, x, ids, w), atol=1e-5, rtol=1e-5
        )
    assert mesh.experts.epoch == 1


def test_a_worker_that_does_not_answer_is_overdue_and_its_part_goes_to_a_replica(
    fleet, expert_weights
) -> None:
    weights = expert_weights(8)
    mesh = Mesh(fleet, weights)
    everything = [0, 1, 2, 3, 4, 5, 6, 7]
    mesh.up({"a": everything, "b": everything})
    x, ids, w = batch(16, 8)
    with torch.inference_mode():
        mesh.workers["b"].held.clear()
        ticket = mesh.dispatch(x, ids, w)
        mesh.pump_until(lambda: ticket.missing == 1)
        assert mesh.experts.overdue() == ([], [])
        assert mesh.experts.next_retry_s(60.0) < 1.0  # it will be looked for in time
        mesh.clock.now += 2.0
        assert mesh.experts.overdue()[0] == ["b"]
        mesh.plane.disconnect("b")
        mesh.experts.route_by(mesh.placement, {"a"})
        mesh.experts.lane_lost("b")
        torch.testing.assert_close(
            mesh.finish(ticket), expected(weights, x, ids, w), atol=1e-5, rtol=1e-5
        )
    assert mesh.plane.in_flight() == 0


@pytest.mark.parametrize("exact", [False, True])
def test_a_slow_worker_is_gone_round_until_it_answers(fleet, expert_weights, exact) -> None:
    weights = expert_weights(8)
    mesh = Mesh(fleet, weights, exact=exact)
    everything = [0, 1, 2, 3, 4, 5, 6, 7]
    mesh.up({"a": everything, "b": everything})
    x, ids, w = batch(16, 8)
    calm = mesh.finish(mesh.dispatch(x, ids, w))
    with torch.inference_mode():
        mesh.workers["b"].held.clear()
        ticket = mesh.dispatch(x, ids, w)
        mesh.pump_until(lambda: ticket.missing == 1)
        mesh.clock.now += 0.9
        assert mesh.experts.overdue() == ([], [])
        mesh.clock.now += 0.2
        assert mesh.experts.overdue() == ([], ["b"])
        torch.testing.assert_close(mesh.finish(ticket), calm, atol=1e-5, rtol=1e-5)
        before = mesh.workers["b"].calls
        torch.testing.assert_close(
            mesh.finish(mesh.dispatch(x, ids, w)), calm, atol=1e-5, rtol=1e-5
        )
        assert mesh.workers["b"].calls == before
        assert mesh.plane.in_flight() == 1  # b's answer is still to come, and to be passed over
        mesh.workers["b"].held.set()
        mesh.pump_until(lambda: mesh.plane.in_flight() == 0)
        ticket = mesh.dispatch(x, ids, w)
        assert {piece.peer for piece in ticket.pieces} == {"a", "b"}
        torch.testing.assert_close(mesh.finish(ticket), calm, atol=1e-5, rtol=1e-5)


def test_what_only_a_silent_worker_had_goes_to_who_has_it_next(fleet, expert_weights) -> None:
    weights = expert_weights(8)
    mesh = Mesh(fleet, weights)
    mesh.up({"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]})
    x, ids, w = batch(16, 8)
    with torch.inference_mode():
        mesh.workers["b"].held.clear()
        ticket = mesh.dispatch(x, ids, w)
        mesh.pump_until(lambda: ticket.missing == 1)
        mesh.experts.route_by(mesh.placement, {"a", "b"}, silent={"b"})
        assert mesh.experts.overdue() == ([], ["b"])
        assert not ticket.done
        mesh.start("c", [4, 5, 6, 7])
        mesh.place({"a": [0, 1, 2, 3], "c": [4, 5, 6, 7]}, serving={"a", "b", "c"})
        torch.testing.assert_close(
            mesh.finish(ticket), expected(weights, x, ids, w), atol=1e-5, rtol=1e-5
        )
        mesh.workers["b"].held.set()
        mesh.pump_until(lambda: mesh.plane.in_flight() == 0)


def test_a_slow_worker_still_gets_what_nobody_else_serves_and_is_overdue_in_the_end(
    fleet, expert_weights
) -> None:
    weights = expert_weights(8)
    mesh = Mesh(fleet, weights)
    mesh.up({"a": [0, 1, 2, 3, 4, 5], "b": [4, 5, 6, 7]})
    x, ids, w = batch(16, 8)
    with torch.inference_mode():
        mesh.workers["b"].held.clear()
        alone = mesh.dispatch(x, ids, w)
        shared_ids = torch.tensor([[2, 3, 4, 5]], dtype=torch.int32)
        shared = mesh.dispatch(x[:1], shared_ids, w[:1])
        pieces = [*alone.pieces, *shared.pieces]
        mesh.pump_until(lambda: {p.peer for p in pieces if p.answer is None} == {"b"})
        mesh.clock.now += 1.1
        assert mesh.experts.overdue() == ([], ["b"])
        torch.testing.assert_close(
            mesh.finish(shared), expected(weights, x[:1], shared_ids, w[:1]), atol=1e-5, rtol=1e-5
        )
        assert not alone.done
        mesh.clock.now += 1.0
        assert mesh.experts.overdue() == (["b"], [])
        mesh.workers["b"].held.set()
        torch.testing.assert_close(
            mesh.finish(alone), expected(weights, x, ids, w), atol=1e-5, rtol=1e-5
        )
        mesh.pump_until(lambda: mesh.plane.in_flight() == 0)


def test_an_abandoned_ticket_frees_its_ring_slots_also_those_answered_later(
    fleet, expert_weights
) -> None:
    weights = expert_weights(8)
    mesh = Mesh(fleet, weights, capacity=4, ring_slots=2)
    mesh.up(PLACEMENTS[1])
    x, ids, w = batch(30, 8)
    with torch.inference_mode():
        mesh.workers["b"].held.clear()
        lost = mesh.dispatch(x, ids, w)
        mesh.pump_until(lambda: mesh.workers["a"].calls >= 4)
        lost.abandon()
        lost.abandon()
        mesh.workers["b"].held.set()
        mesh.pump_until(lambda: mesh.plane.in_flight() == 0)
        ticket = mesh.dispatch(x, ids, w)
        torch.testing.assert_close(
            mesh.finish(ticket), expected(weights, x, ids, w), atol=1e-5, rtol=1e-5
        )
    assert mesh.plane.in_flight() == 0


def test_an_abandoned_ticket_is_parked_no_longer(fleet, expert_weights) -> None:
    mesh = Mesh(fleet, expert_weights(8))
    mesh.place({"a": list(range(8))}, serving=set())
    x, ids, w = batch(3, 8)
    ticket = mesh.dispatch(x, ids, w)
    assert mesh.experts.parked
    ticket.abandon()
    mesh.experts.pump()
    assert not mesh.experts.parked


@pytest.mark.parametrize("exact", [False, True])
def test_answers_make_room_for_what_is_sent_again(fleet, expert_weights, exact) -> None:
    weights = expert_weights(8)
    mesh = Mesh(fleet, weights, exact=exact, capacity=16, ring_slots=2)
    everything = [0, 1, 2, 3, 4, 5, 6, 7]
    mesh.up({"a": everything, "b": everything})
    x, ids, w = batch(32, 8)
    with torch.inference_mode():
        mesh.workers["b"].held.clear()
        ticket = mesh.dispatch(x, ids, w)
        # All of a's ring is full of answers before b's parts have to go there.
        mesh.pump_until(lambda: ticket.missing == sum(p.peer == "b" for p in ticket.pieces))
        assert ticket.missing == 2
        assert len(ticket.pieces) == 4
        mesh.workers["b"].stop()
        torch.testing.assert_close(
            mesh.finish(ticket), expected(weights, x, ids, w), atol=1e-5, rtol=1e-5
        )
    assert mesh.plane.in_flight() == 0


def test_time_does_not_count_while_a_rank_is_about_to_serve(fleet, expert_weights) -> None:
    weights = expert_weights(8)
    mesh = Mesh(fleet, weights, timeout_s=3.0)
    ranks = {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}
    mesh.start("a", ranks["a"])
    mesh.place(ranks, serving={"a"}, coming={"b"})
    x, ids, w = batch(6, 8)
    with torch.inference_mode():
        ticket = mesh.dispatch(x, ids, w)
        for _ in range(4):
            mesh.clock.now += 2.9
            mesh.experts.pump()
        mesh.place(ranks, serving={"a"})  # it died; the time begins now
        mesh.clock.now += 2.9
        mesh.experts.pump()
        assert not ticket.done
        mesh.start("b", ranks["b"])
        mesh.place(ranks)
        torch.testing.assert_close(
            mesh.finish(ticket), expected(weights, x, ids, w), atol=1e-5, rtol=1e-5
        )


def test_experts_without_any_rank_fail_though_others_are_loading(fleet, expert_weights) -> None:
    mesh = Mesh(fleet, expert_weights(8), timeout_s=3.0)
    ranks = {"b": [0, 1, 2, 3], "c": [4, 5, 6, 7]}
    mesh.place(ranks, serving=set(), coming={"b"})
    x, ids, w = batch(6, 8)
    ticket = mesh.dispatch(x, ids, w)
    mesh.clock.now += 3.1
    mesh.experts.pump()
    with pytest.raises(ExpertsUnavailableError):
        ticket.result()
