"""A worker whose experts are on a device, with the interpreter for one: its thread, its slots."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from ep_kernels.bundle import pack_bundle
from ep_kernels.plane import AnswerStatus, Arrival
from ep_kernels.triton.bank import DeviceBank
from ep_kernels.triton.device import Device, open_device
from ep_kernels.triton.flights import DEPTH, Flight, Flights

from expert_svc.device_worker import DeviceWorker
from expert_svc.loading import Fetched
from expert_svc.slots import SlotTable
from mesh.messages import Source
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

LAYERS = (1, 3)
CLOSE = {"rtol": 2**-6, "atol": 0.5}
"""Values are sums of hundreds of products of the size of one, rounded to bf16 on their way."""


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("interpreter")


def new_table(device: Device, **options: object) -> SlotTable[DeviceBank]:
    loading = device.stream()

    def new_bank(slots: int) -> DeviceBank:
        return DeviceBank(slots, HIDDEN, INTER, top_k=2, device=device, loading=loading)

    return SlotTable(LAYERS, EXPERTS, new_bank, expert, **options)


def apply(table: SlotTable[DeviceBank], **options: object) -> object:
    slots = (HELD[1], HELD[3])
    return table.apply(LAYERS, slots, 1, superseded=threading.Event(), **options)


def serve(
    device: Device, *batches: list[Arrival], on_device: bool = False
) -> tuple[DeviceWorker, ListPlane]:
    plane, table = ListPlane(*batches, on_device=on_device), new_table(device)
    apply(table)
    worker = plane.worker = DeviceWorker(plane, table, device)
    worker.run()
    return worker, plane


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_a_lone_part_is_answered(tokens: int, wire: torch.dtype, device: Device) -> None:
    arrival = part(1, tokens, wire=wire)
    _, plane = serve(device, [arrival])
    assert [(a, s) for a, s, _ in plane.answered] == [(arrival, AnswerStatus.OK)]
    assert_right(arrival, **CLOSE)


def test_parts_whose_rows_lie_on_the_device_are_answered_there(device: Device) -> None:
    parts = [part(1, tokens, peer=f"r{tokens}", seed=tokens) for tokens in (3, 0, 5)]
    stale = part(7, 1)
    before = device.copied.down
    _, plane = serve(device, [*parts, stale], on_device=True)
    assert device.copied.down == before
    statuses = {id(a): s for a, s, _ in plane.answered}
    assert statuses[id(stale)] is AnswerStatus.STALE
    for arrival in parts:
        assert statuses[id(arrival)] is AnswerStatus.OK
        assert_right(arrival, **CLOSE)


def test_parts_of_one_layer_share_a_batch_and_layers_follow_one_another(device: Device) -> None:
    parts = [part(1, tokens, peer=f"r{tokens}", seed=tokens) for tokens in (1, 0, 5, 2)]
    others = [part(3, 3, seed=9), part(1, 1, seed=10)]
    worker, plane = serve(device, parts, [others[0]], [others[1]])
    assert [a.peer for a, _, _ in plane.answered][:4] == ["r1", "r0", "r5", "r2"]
    assert worker.tally.calls == 3
    assert (worker.tally.parts, worker.tally.tokens) == (6, 12)
    for arrival in (*parts, *others):
        assert_right(arrival, **CLOSE)


def test_a_group_too_large_for_a_batch_is_cut(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expert_svc.device_worker._MOST_TOKENS", 4)
    parts = [part(1, tokens, seed=tokens) for tokens in (3, 1, 9, 2)]
    worker, plane = serve(device, parts)
    assert worker.tally.calls == 3
    assert [a.x.shape[0] for a, _, _ in plane.answered] == [3, 1, 9, 2]
    for arrival in parts:
        assert_right(arrival, **CLOSE)


def test_more_batches_than_flights_are_all_answered(device: Device) -> None:
    parts = [part(layer, 2, seed=seed) for seed in range(DEPTH) for layer in LAYERS]
    _, plane = serve(device, *[[arrival] for arrival in parts])
    assert len(plane.answered) == len(parts)
    for arrival in parts:
        assert_right(arrival, **CLOSE)


def test_what_its_slots_do_not_hold_is_answered_stale(device: Device) -> None:
    wrong, exact, unknown, good = part(3, 2), part(3, 2, exact=True), part(7, 1), part(3, 2, seed=1)
    wrong.pair_expert[-1] = (wrong.pair_expert[-1] + 1) % EXPERTS
    _, plane = serve(device, [wrong, exact, unknown, good])
    statuses = {id(a): s for a, s, _ in plane.answered}
    assert [statuses[id(a)] for a in (wrong, exact, unknown)] == [AnswerStatus.STALE] * 3
    assert statuses[id(good)] == AnswerStatus.OK
    assert_right(good, **CLOSE)


def test_an_idle_worker_keeps_no_lane_alive(device: Device) -> None:
    class Forgetful(ListPlane):
        def wait(self, timeout_s: float) -> None:
            self.answered.clear()
            super().wait(timeout_s)
            left.extend(ref for ref in held if ref() is not None)

    left: list[weakref.ref[torch.Tensor]] = []
    plane, table = Forgetful([part(1, 1)], [part(1, 2), part(3, 2)]), new_table(device)
    apply(table)
    held = [weakref.ref(a.out) for batch in plane.batches for a in batch]
    plane.worker = DeviceWorker(plane, table, device)
    plane.worker.run()
    assert len(held) == 3
    assert not left


def test_kernels_are_compiled_for_each_number_of_slots_before_they_serve(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []

    class Watched(Flights):
        def begin(self, bank: DeviceBank, xs: list[torch.Tensor], *pairs: object) -> Flight:
            begun.append((bank.num_slots, xs[0].shape[0]))
            return super().begin(bank, xs, *pairs)

    monkeypatch.setattr("expert_svc.device_worker.Flights", Watched)
    monkeypatch.setattr("ep_kernels.triton.flights.PREFILL_ROWS", 4)
    monkeypatch.setattr(device, "compiles", True)
    table, told = new_table(device), []
    worker = DeviceWorker(ListPlane(), table, device)
    worker.warm_up(told.append)
    assert begun == []
    apply(table)
    worker.warm_up(told.append)
    worker.warm_up(told.append)  # both layers have three slots: once is enough
    assert begun == [(3, 1), (3, 6)]
    assert len(told) == 2
    table.apply(LAYERS, ([2], HELD[3]), 2, superseded=threading.Event())
    worker.warm_up(told.append)
    assert begun[2:] == [(1, 1), (1, 2)]


def test_an_expert_moves_from_one_device_to_another(device: Device) -> None:
    owner = new_table(device)
    apply(owner)

    def fetch(source: Source, wanted: int, _limit: int, _superseded: threading.Event) -> Fetched:
        held = owner.find(source.layer, source.peer_slot, wanted)
        assert held is not None
        bundle = pack_bundle(held.weights.kept(), source.layer, wanted)
        if wanted == 0:
            bundle[100] ^= 1
        return Fetched(bundle, held.checksum, held.shadow)

    faults = []
    taker = new_table(device, fetch=fetch)
    sources = [
        Source(layer, slot, "owner", "nowhere", slot)
        for layer in LAYERS
        for slot, held in enumerate(HELD[layer])
        if held >= 0
    ]
    applied = apply(taker, sources=sources, on_fault=faults.append)
    assert (applied.loaded, applied.from_peers) == (5, 4)
    assert [(fault.expert, fault.kind, fault.peer) for fault in faults] == [
        (0, "checksum", "owner")
    ]
    assert taker.held() == owner.held()
    assert taker.resident_bytes() == owner.resident_bytes() == 5 * 2 * 3 * HIDDEN * INTER
    plane = ListPlane([part(1, 4)])
    plane.worker = DeviceWorker(plane, taker, device)
    plane.worker.run()
    assert_right(plane.answered[0][0], **CLOSE)


def test_a_slot_whose_expert_moves_away_serves_it_no_more(device: Device) -> None:
    table = new_table(device)
    apply(table)
    before, after = part(1, 2), part(1, 2)
    table.apply(LAYERS, ([2, 0, 4], HELD[3]), 2, superseded=threading.Event())
    moved = [expert for expert in after.pair_expert if expert == 5]
    plane = ListPlane([before])
    plane.worker = DeviceWorker(plane, table, device)
    plane.worker.run()
    assert moved
    assert [status for _, status, _ in plane.answered] == [AnswerStatus.STALE]
