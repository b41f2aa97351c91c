from __future__ import annotations

import threading
import weakref

import pytest
import torch
from ep_kernels.grouped_ffn import ExpertBank
from ep_kernels.plane import AnswerStatus, Arrival

from expert_svc.slots import SlotTable
from expert_svc.worker import Worker
from tests.support.parts import (
    EXPERTS,
    HELD,
    HIDDEN,
    INTER,
    ListPlane,
    assert_right,
    expert,
    part,
)


def slots() -> SlotTable[ExpertBank]:
    table = SlotTable(
        (1, 3), EXPERTS, lambda slots: ExpertBank(slots, HIDDEN, INTER, kind="fp32"), expert
    )
    table.apply((1, 3), (HELD[1], HELD[3]), 1, superseded=threading.Event())
    return table


def serve(*batches: list[Arrival]) -> tuple[Worker, ListPlane]:
    plane = ListPlane(*batches)
    worker = plane.worker = Worker(plane, slots())
    worker.run()
    return worker, plane


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
def test_a_lone_part_is_answered_in_its_own_memory(
    tokens: int, wire: torch.dtype, exact: bool
) -> None:
    arrival = part(1, tokens, exact=exact, wire=wire)
    _, plane = serve([arrival])
    assert [(a, s) for a, s, _ in plane.answered] == [(arrival, AnswerStatus.OK)]
    assert_right(arrival)


@pytest.mark.parametrize("exact", [False, True])
def test_parts_of_one_layer_from_several_senders_share_one_call(exact: bool) -> None:
    parts = [
        part(1, tokens, peer=f"r{tokens}", exact=exact, seed=tokens) for tokens in (1, 0, 5, 2)
    ]
    worker, plane = serve(parts)
    assert worker.tally.calls == 1
    assert [a.peer for a, _, _ in plane.answered] == ["r1", "r0", "r5", "r2"]
    for arrival in parts:
        assert_right(arrival)


def test_the_layer_with_most_waiting_tokens_runs_first() -> None:
    parts = [part(1, 3), part(3, 2, seed=1), part(3, 2, seed=2), part(1, 0, seed=3)]
    worker, plane = serve(parts)
    assert [a.layer for a, _, _ in plane.answered] == [3, 3, 1, 1]
    assert worker.tally.calls == 2


def test_what_arrives_meanwhile_joins_its_layer() -> None:
    worker, plane = serve([part(1, 1), part(3, 9)], [part(1, 1, seed=1)])
    assert [a.layer for a, _, _ in plane.answered] == [3, 1, 1]
    assert worker.tally.calls == 2


def test_a_small_part_is_not_passed_over_for_ever() -> None:
    small = part(1, 1)
    _, plane = serve([small, part(3, 9)], *[[part(3, 9, seed=n)] for n in range(30)])
    position = next(i for i, (a, _, _) in enumerate(plane.answered) if a is small)
    assert 0 < position < 12
    assert len(plane.answered) == 32


def wrong_expert(arrival: Arrival) -> None:
    arrival.pair_expert[-1] = (arrival.pair_expert[-1] + 1) % EXPERTS


def slot_out_of_range(arrival: Arrival) -> None:
    arrival.pair_slot[0] = 99


def negative_slot(arrival: Arrival) -> None:
    arrival.pair_slot[0] = -3


def empty_slot(arrival: Arrival) -> None:
    arrival.pair_slot[0], arrival.pair_expert[0] = 1, -1


@pytest.mark.parametrize("spoil", [wrong_expert, slot_out_of_range, negative_slot, empty_slot])
@pytest.mark.parametrize("alone", [True, False])
def test_a_pair_that_names_what_its_slot_does_not_hold_is_answered_stale(
    spoil: object, alone: bool
) -> None:
    bad, good = part(3, 2), part(3, 2, seed=1)
    spoil(bad)  # type: ignore[operator]
    worker, plane = serve([bad] if alone else [bad, good])
    statuses = {id(a): s for a, s, _ in plane.answered}
    assert statuses[id(bad)] == AnswerStatus.STALE
    assert worker.tally.stale == 1
    if not alone:
        assert statuses[id(good)] == AnswerStatus.OK
        assert_right(good)


def test_a_layer_without_slots_is_answered_stale() -> None:
    unknown = part(7, 1)
    _, plane = serve([unknown])
    assert plane.answered == [(unknown, AnswerStatus.STALE, 0)]


def test_the_tally_counts_what_was_done() -> None:
    worker, plane = serve([part(1, 3), part(1, 2, seed=1)], [part(3, 4)])
    tally = worker.tally
    assert (tally.calls, tally.parts, tally.tokens, tally.pairs) == (2, 3, 9, 18)
    assert tally.ffn_ns == pytest.approx(sum(ns for _, _, ns in plane.answered), abs=3)
    assert tally.awake_ns >= tally.ffn_ns + tally.signal_ns


def test_an_idle_worker_keeps_no_lane_alive() -> None:
    """A part's arrays lie in its lane's memory, which is to go when the router does."""

    class Forgetful(ListPlane):
        def wait(self, timeout_s: float) -> None:
            self.answered.clear()
            super().wait(timeout_s)
            left.extend(ref for ref in held if ref() is not None)

    left: list[weakref.ref[torch.Tensor]] = []
    plane = Forgetful([part(1, 1)], [part(1, 2), part(3, 2)], [part(1, 1), part(1, 3)])
    held = [weakref.ref(a.out) for batch in plane.batches for a in batch]
    plane.worker = Worker(plane, slots())
    plane.worker.run()
    assert len(held) == 5
    assert not left


def test_stop_wakes_the_plane() -> None:
    plane = ListPlane()
    worker = plane.worker = Worker(plane, slots())
    worker.stop()
    worker.run()
    assert plane.woken == 1
