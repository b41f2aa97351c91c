from __future__ import annotations

import pytest

from mesh.messages import Load, SlotsReady
from planner_svc.prices import DEFAULT_PAIR_S, Prices


def loaded(count: int, seconds: float) -> SlotsReady:
    return SlotsReady(
        id="e", incarnation=1, command=1, epoch=1, loaded=count, loaded_bytes=10 * count,
        seconds=seconds,
    )  # fmt: skip


def test_defaults_hold_until_something_was_measured() -> None:
    prices = Prices(expert_bytes=1_000, bytes_per_s=500)
    assert prices.slot_s == 2.0
    assert prices.pair_s == DEFAULT_PAIR_S
    prices.computed("e", 1, 1.0, Load(pairs=10, ffn_ns=10**9))
    assert prices.pair_s == DEFAULT_PAIR_S, "ten pairs tell nothing"
    prices.acknowledged(loaded(0, 5.0))
    assert prices.slot_s == 2.0


def test_a_pairs_price_is_that_of_a_worker_of_speed_one() -> None:
    prices = Prices(expert_bytes=1, bytes_per_s=0)
    prices.computed("slow", 1, 1.0, Load(pairs=1_000, ffn_ns=10**8))
    prices.computed("fast", 1, 2.0, Load(pairs=2_000, ffn_ns=10**8))
    assert prices.pair_s == pytest.approx(1e-4)
    # A new process of the same id counts from nothing; one that is gone counts no more.
    prices.computed("slow", 2, 1.0, Load(pairs=1, ffn_ns=10**12))
    prices.gone("slow")
    assert prices.pair_s == pytest.approx(1e-4)


def test_a_slots_price_follows_what_loading_took_lately() -> None:
    prices = Prices(expert_bytes=1, bytes_per_s=0)
    prices.acknowledged(loaded(4, 2.0))
    assert prices.slot_s == 0.5
    for _ in range(60):
        prices.acknowledged(loaded(4, 0.4))
    assert prices.slot_s == pytest.approx(0.1, rel=0.01)
    assert prices.loaded_bytes == 61 * 40
