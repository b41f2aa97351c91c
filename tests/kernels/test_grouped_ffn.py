from __future__ import annotations

import numpy as np
import pytest
import torch
from ep_kernels.grouped_ffn import (
    ExpertBank,
    SlotEmptyError,
    reference_rows,
    reference_sum,
)

SLOTS = 6
SMALL = (192, 48)
ODD = (50, 37)
LARGE = (256, 320)
SHAPES = [SMALL, ODD, LARGE]


def make_experts(hidden, intermediate, count=SLOTS, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape):
        return torch.randn(*shape, generator=generator).mul_(0.1).bfloat16()

    return [
        (
            matrix(intermediate, hidden),
            matrix(intermediate, hidden),
            matrix(hidden, intermediate),
        )
        for _ in range(count)
    ]


def make_bank(shape, experts, **kwargs):
    bank = ExpertBank(len(experts), *shape, **kwargs)
    for slot, expert in enumerate(experts):
        bank.load(slot, 100 + slot, *expert)
    return bank


def make_pairs(tokens, layout, rng):
    if layout == "random":
        pair_token = np.repeat(np.arange(tokens, dtype=np.int32), 3)
        pair_slot = np.concatenate(
            [rng.permutation(SLOTS)[:3] for _ in range(tokens)] or [np.zeros(0)]
        ).astype(np.int32)
    elif layout == "one expert":
        pair_token = np.arange(tokens, dtype=np.int32)
        pair_slot = np.full(tokens, 2, np.int32)
    elif layout == "an expert and a token with none":
        pair_token = np.repeat(np.arange(max(0, tokens - 1), dtype=np.int32), 2)
        pair_slot = np.tile(np.array([5, 0], np.int32), max(0, tokens - 1))
    else:
        pair_token = rng.permutation(np.repeat(np.arange(tokens, dtype=np.int32), 2))
        pair_slot = rng.integers(0, SLOTS, 2 * tokens).astype(np.int32)
    return pair_token, pair_slot, rng.random(pair_slot.size).astype(np.float32)


LAYOUTS = ["random", "one expert", "an expert and a token with none", "shuffled"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 33, 130])
@pytest.mark.parametrize("exact", [False, True])
def test_sum_and_rows_equal_the_reference(shape, layout, tokens, exact):
    experts = make_experts(*shape)
    bank = make_bank(shape, experts, exact=exact)
    rng = np.random.default_rng(tokens)
    pair_token, pair_slot, weight = make_pairs(tokens, layout, rng)
    x = torch.from_numpy(rng.standard_normal((tokens, shape[0])).astype(np.float32))

    out = torch.full((tokens, shape[0]), float("nan"))
    bank.run(x, pair_token, pair_slot, weight, out)
    expected = reference_sum(x, pair_token, experts, pair_slot, weight)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)

    rows = torch.full((pair_slot.size, shape[0]), float("nan"))
    bank.run_rows(x, pair_token, pair_slot, rows)
    expected = reference_rows(x, pair_token, experts, pair_slot)
    torch.testing.assert_close(rows, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("pairs", [1, 2, 16, 17, 40])
def test_one_token_with_any_number_of_pairs(pairs):
    experts = make_experts(*SMALL)
    bank = make_bank(SMALL, experts)
    rng = np.random.default_rng(pairs)
    slots = rng.integers(0, SLOTS, pairs).astype(np.int32)
    weight = rng.random(pairs).astype(np.float32)
    x = torch.randn(1, SMALL[0])
    out = torch.full((1, SMALL[0]), float("nan"))
    bank.run(x, np.zeros(pairs, np.int32), slots, weight, out)
    expected = reference_sum(x, np.zeros(pairs, np.int32), experts, slots, weight)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["auto", "fp16"])
def test_exact_rows_do_not_depend_on_company_order_or_slot(shape, kind):
    experts = make_experts(*shape)
    bank = make_bank(shape, experts, exact=True, kind=kind)
    elsewhere = make_bank(shape, experts[::-1], exact=True, kind=kind)
    rng = np.random.default_rng(0)
    pair_token, pair_slot, _ = make_pairs(130, "shuffled", rng)
    x = torch.randn(130, shape[0])
    rows = torch.empty(pair_slot.size, shape[0])
    bank.run_rows(x, pair_token, pair_slot, rows)

    moved = torch.empty_like(rows)
    elsewhere.run_rows(x, pair_token, (SLOTS - 1 - pair_slot).astype(np.int32), moved)
    assert torch.equal(rows, moved)

    for count in (1, 2, 5, 31):
        subset = rng.permutation(pair_slot.size)[:count]
        some = torch.empty(count, shape[0])
        bank.run_rows(x, pair_token[subset], pair_slot[subset], some)
        assert torch.equal(some, rows[torch.from_numpy(subset)])


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 9])
def test_input_in_a_wire_dtype_is_computed_in_fp32(wire, tokens):
    experts = make_experts(*SMALL)
    bank = make_bank(SMALL, experts)
    pair_token, pair_slot, weight = make_pairs(tokens, "random", np.random.default_rng(1))
    x = torch.randn(tokens, SMALL[0]).to(wire)
    out = torch.empty(tokens, SMALL[0])
    bank.run(x, pair_token, pair_slot, weight, out)
    expected = reference_sum(x, pair_token, experts, pair_slot, weight)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)


def test_a_slot_follows_install_and_clear():
    experts = make_experts(*SMALL)
    bank = ExpertBank(2, *SMALL)
    assert bank.holds.tolist() == [-1, -1]
    assert bank.nbytes == 0
    bank.install(1, 7, bank.prepare(*experts[0]))
    assert bank.holds.tolist() == [-1, 7]
    assert bank.nbytes == 3 * 4 * SMALL[0] * SMALL[1]
    bank.load(1, 8, *experts[1])
    assert bank.holds.tolist() == [-1, 8]
    x, out = torch.randn(1, SMALL[0]), torch.empty(1, SMALL[0])
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    bank.run(x, zero, one, np.ones(1, np.float32), out)
    expected = reference_rows(x, zero, experts[:2], one)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
    bank.clear(1)
    assert bank.holds.tolist() == [-1, -1]
    assert bank.nbytes == 0


def test_resizing_keeps_the_slots_that_stay():
    experts = make_experts(*SMALL)
    bank = make_bank(SMALL, experts[:3])
    bank.resize(5)
    assert bank.holds.tolist() == [100, 101, 102, -1, -1]
    bank.load(4, 9, *experts[4])
    bank.resize(2)
    assert bank.holds.tolist() == [100, 101]
    assert bank.nbytes == 2 * 3 * 4 * SMALL[0] * SMALL[1]
    assert not bank.matches(np.array([4], np.int32), np.array([9], np.int32))
    bank.resize(0)
    assert bank.num_slots == 0
    bank.resize(1)
    assert bank.holds.tolist() == [-1]
    bank.load(0, 7, *experts[0])
    x, zero = torch.randn(1, SMALL[0]), np.zeros(1, np.int32)
    out = torch.empty(1, SMALL[0])
    bank.run_rows(x, zero, zero, out)
    torch.testing.assert_close(out, reference_rows(x, zero, experts, zero), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("tokens", [1, 20])
def test_an_empty_slot_is_named(shape, tokens):
    bank = ExpertBank(3, *shape)
    pair_slot = np.full(tokens, 2, np.int32)
    x = torch.zeros(tokens, shape[0])
    with pytest.raises(SlotEmptyError, match="slot 2"):
        bank.run(
            x, np.arange(tokens, dtype=np.int32), pair_slot, np.ones(tokens, np.float32), x.clone()
        )


def test_matches_refuses_wrong_experts_and_wild_numbers():
    bank = make_bank(SMALL, make_experts(*SMALL))

    def matches(slots, experts):
        return bank.matches(np.array(slots, np.int32), np.array(experts, np.int32))

    assert matches([], [])
    assert matches([0, 5, 0], [100, 105, 100])
    assert not matches([0, 5], [100, 104])
    assert not matches([6], [106])
    assert not matches([-1], [105])
    bank.clear(2)
    assert not matches([2], [102])
    assert not matches([2], [-1])


def test_wrong_shapes_and_foreign_layouts_are_refused():
    bank = ExpertBank(1, *SMALL)
    gate, up, down = make_experts(*SMALL)[0]
    with pytest.raises(ValueError, match=r"down has shape \[48, 192\], expected \[192, 48\]"):
        bank.prepare(gate, up, down.t())
    with pytest.raises(ValueError, match="another layout"):
        bank.install(0, 0, ExpertBank(1, *LARGE).prepare(*make_experts(*LARGE)[0]))
    with pytest.raises(ValueError, match="counted from 0"):
        bank.load(0, -1, gate, up, down)
    with pytest.raises(ValueError, match="positive sizes"):
        ExpertBank(1, 0, 4)
