from __future__ import annotations

import threading

import pytest
import torch
from ep_kernels.grouped_ffn import ExpertBank

from expert_svc.slots import SlotError, SlotTable, SupersededError

HIDDEN, INTER = 16, 8
LAYERS = (1, 3)


class Weights:
    """Deterministic random experts that remember who was read."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    def __call__(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.read.append((layer, expert))
        random = torch.Generator().manual_seed(layer * 1000 + expert)
        gate, up = torch.randn(2, INTER, HIDDEN, generator=random)
        return gate, up, torch.randn(HIDDEN, INTER, generator=random)


def table(weights: Weights, max_slots: int = 0) -> SlotTable:
    return SlotTable(
        LAYERS, 6, lambda slots: ExpertBank(slots, HIDDEN, INTER), weights, max_slots=max_slots
    )


def apply(slots: SlotTable, first: list[int], second: list[int], epoch: int = 1) -> int:
    return slots.apply(
        LAYERS, (first, second), epoch, progress=lambda _share: None, superseded=lambda: False
    )


def test_holds_what_it_is_told_and_reads_nothing_else() -> None:
    weights = Weights()
    slots = table(weights)
    assert slots.held() == ((), ())
    assert apply(slots, [2, 0], [5, -1], epoch=4) == 3
    assert slots.held() == ((2, 0), (5, -1))
    assert slots.epoch == 4
    assert weights.read == [(1, 2), (1, 0), (3, 5)]
    assert slots.resident_bytes() == 3 * 3 * HIDDEN * INTER * 4


def test_the_same_assignment_again_reads_nothing() -> None:
    weights = Weights()
    slots = table(weights)
    apply(slots, [0, 1], [2, 3])
    weights.read.clear()
    assert apply(slots, [0, 1], [2, 3], epoch=2) == 0
    assert weights.read == []
    assert slots.epoch == 2


def test_a_change_loads_only_what_is_missing_and_frees_what_is_gone() -> None:
    weights = Weights()
    slots = table(weights)
    apply(slots, [0, 1], [2, 3])
    weights.read.clear()
    assert apply(slots, [0, 4], [-1, 3]) == 1
    assert weights.read == [(1, 4)]
    assert slots.held() == ((0, 4), (-1, 3))
    assert slots.resident_bytes() == 3 * 3 * HIDDEN * INTER * 4


def test_a_bank_of_another_size_serves_the_old_slots_until_the_new_ones_are_filled() -> None:
    weights = Weights()
    slots = table(weights)
    apply(slots, [0], [1])
    seen: list[tuple[int, ...]] = []
    slots.apply(
        LAYERS,
        ((0, 2), (1,)),
        2,
        progress=lambda _share: seen.append(slots.held()[0]),
        superseded=lambda: False,
    )
    assert set(seen) == {(0,), (0, 2)}
    assert slots.held() == ((0, 2), (1,))


def test_progress_rises_to_one_and_counts_what_is_there_already() -> None:
    slots = table(Weights())
    shares: list[float] = []
    slots.apply(LAYERS, ((0, 1), (2, -1)), 1, progress=shares.append, superseded=lambda: False)
    assert shares == [0.0, 1 / 3, 2 / 3, 1.0]
    shares.clear()
    slots.apply(LAYERS, ((0, 1), (2, 3)), 2, progress=shares.append, superseded=lambda: False)
    assert shares == [0.75, 1.0]


def test_nothing_to_hold_is_done_at_once() -> None:
    slots = table(Weights())
    assert apply(slots, [], []) == 0
    assert slots.held() == ((), ())


def test_a_newer_assignment_stops_an_older_one_and_keeps_what_was_loaded() -> None:
    weights = Weights()
    slots = table(weights)
    answers = iter([False, True])
    with pytest.raises(SupersededError):
        slots.apply(
            LAYERS,
            ((0, 1), (2, 3)),
            1,
            progress=lambda _share: None,
            superseded=lambda: next(answers),
        )
    assert slots.held() == ((0, -1), ())
    assert slots.epoch == 0
    assert apply(slots, [0, 1], [2, 3]) == 3


@pytest.mark.parametrize(
    ("layers", "slots", "text"),
    [
        ((1, 2), ((0,), (1,)), "MoE layers"),
        ((1, 3), ((0,),), "MoE layers"),
        ((1, 3), ((0,), (6,)), "experts \\[6\\] in layer 3"),
        ((1, 3), ((-2,), (0,)), "experts \\[-2\\] in layer 1"),
        ((1, 3), ((0, 1, 2), (0,)), "3 slots in layer 1, this worker offers 2"),
    ],
)
def test_what_the_model_lacks_is_refused_before_anything_changes(
    layers: tuple[int, ...], slots: tuple[tuple[int, ...], ...], text: str
) -> None:
    held = table(Weights(), max_slots=2)
    apply(held, [4, 5], [4, 5])
    with pytest.raises(SlotError, match=text):
        held.apply(layers, slots, 2, progress=lambda _share: None, superseded=lambda: False)
    assert held.held() == ((4, 5), (4, 5))


def test_a_slot_is_never_changed_while_its_bank_is_in_use() -> None:
    slots = table(Weights())
    apply(slots, [0], [1])
    with slots.lock:
        loader = threading.Thread(target=apply, args=(slots, [2], [1]))
        loader.start()
        loader.join(0.05)
        assert loader.is_alive()
        assert slots.banks[1].holds.tolist() == [0]
    loader.join(10)
    assert slots.held() == ((2,), (1,))
