from __future__ import annotations

import pytest
import torch
from ep_kernels.triton.arguments import KernelArgumentError
from ep_kernels.triton.permute import (
    most_tiles,
    permute,
    plan,
    reference_plan,
    reference_unpermute,
    unpermute,
)

# tokens, k, slots, rows of a tile
SHAPES = [(0, 2, 3, 4), (1, 1, 1, 2), (1, 4, 6, 4), (13, 2, 5, 4), (19, 3, 16, 8), (40, 1, 2, 1)]


def poisoned(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def assert_same_plan(slots: torch.Tensor, num_slots: int, block_m: int) -> None:
    got, wanted = plan(slots, num_slots, block_m), reference_plan(slots, num_slots, block_m)
    assert torch.equal(got.row_of_pair, wanted.row_of_pair)
    assert torch.equal(got.tile_slot, wanted.tile_slot)
    assert torch.equal(got.tile_rows, wanted.tile_rows)
    assert torch.equal(got.totals[:num_slots], wanted.totals)


@pytest.mark.parametrize(("tokens", "k", "num_slots", "block_m"), SHAPES)
def test_a_plan_is_the_reference(
    tokens: int, k: int, num_slots: int, block_m: int, rng: torch.Generator
) -> None:
    slots = torch.randint(-1, num_slots + 1, (tokens, k), generator=rng).int()
    assert_same_plan(slots, num_slots, block_m)


@pytest.mark.parametrize("slot", [-1, 0, 4])
def test_all_pairs_may_go_to_one_slot_or_to_none(slot: int) -> None:
    assert_same_plan(torch.full((21, 2), slot, dtype=torch.int32), 5, 4)


def test_rows_of_a_slot_are_in_the_order_of_the_pairs_and_begin_at_a_tile() -> None:
    slots = torch.tensor([[2, 0], [2, -1], [2, 0]], dtype=torch.int32)
    made = plan(slots, 3, 2)
    assert made.row_of_pair.tolist() == [[2, 0], [3, -1], [4, 1]]
    assert made.tile_slot.tolist()[:3] == [0, 2, 2]
    assert made.tile_rows.tolist()[:3] == [2, 2, 1]


def test_there_are_tiles_for_every_choice_of_slots(rng: torch.Generator) -> None:
    for _ in range(200):
        pairs, num_slots, block_m = (
            int(torch.randint(1, top, (1,), generator=rng)) for top in (40, 9, 6)
        )
        counts = torch.bincount(torch.randint(num_slots, (pairs,), generator=rng))
        needed = int(((counts + block_m - 1) // block_m).sum())
        assert needed <= most_tiles(pairs, num_slots, block_m)
    spread = most_tiles(7, 5, 3)
    assert spread == 5, "five slots of one or two rows each: no more tiles are ever needed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("tokens", "k", "num_slots", "block_m"), SHAPES)
def test_each_pair_finds_its_tokens_row(
    dtype: torch.dtype, tokens: int, k: int, num_slots: int, block_m: int, rng: torch.Generator
) -> None:
    x = torch.randn(tokens, 70, generator=rng).to(dtype)
    slots = torch.randint(-1, num_slots, (tokens, k), generator=rng).int()
    made = plan(slots, num_slots, block_m)
    rows = permute(x, made)
    assert rows.shape == (made.rows, 70)
    for token in range(tokens):
        for row in made.row_of_pair[token].tolist():
            assert row < 0 or torch.equal(rows[row].float(), x[token].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "k", "num_slots", "block_m"), SHAPES)
def test_weighted_sums_are_the_references_and_padding_does_not_leak(
    dtype: torch.dtype, tokens: int, k: int, num_slots: int, block_m: int, rng: torch.Generator
) -> None:
    slots = torch.randint(-1, num_slots, (tokens, k), generator=rng).int()
    weights = torch.rand(tokens, k, generator=rng)
    weights[slots < 0] = float("nan")  # of pairs that are elsewhere
    made = plan(slots, num_slots, block_m)
    y = poisoned((made.rows, 70), dtype)
    used = made.row_of_pair[made.row_of_pair >= 0].long()
    y[used] = torch.randn(used.numel(), 70, generator=rng).to(dtype)
    wanted = reference_unpermute(y, weights, made)
    assert not wanted.isnan().any()
    torch.testing.assert_close(unpermute(y, weights, made), wanted, rtol=1e-6, atol=1e-6)
    narrow = unpermute(y, weights, made, torch.bfloat16)
    torch.testing.assert_close(narrow.float(), wanted, rtol=2**-8, atol=1e-6)


def test_there_and_back_is_the_weighted_token(rng: torch.Generator) -> None:
    x = torch.randn(11, 40, generator=rng)
    slots = torch.randint(0, 6, (11, 3), generator=rng).int()
    weights = torch.rand(11, 3, generator=rng)
    made = plan(slots, 6, 4)
    back = unpermute(permute(x, made), weights, made)
    torch.testing.assert_close(back, x * weights.sum(1, keepdim=True), rtol=1e-5, atol=1e-6)


def test_what_the_kernels_cannot_run_is_refused_and_named() -> None:
    slots = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match=r"slots is torch.int64"):
        plan(slots.long(), 2, 4)
    with pytest.raises(KernelArgumentError, match="num_slots is 0"):
        plan(slots, 0, 4)
    with pytest.raises(KernelArgumentError, match="block_m is 3"):
        plan(slots, 2, 3)
    made = plan(slots, 2, 4)
    with pytest.raises(KernelArgumentError, match=r"x is of shape \[3, 8\], expected \[2, any\]"):
        permute(torch.zeros(3, 8), made)
    with pytest.raises(KernelArgumentError, match="y is of shape"):
        unpermute(torch.zeros(1, 8), torch.zeros(2, 2), made)
    with pytest.raises(KernelArgumentError, match="weights is of shape"):
        unpermute(torch.zeros(made.rows, 8), torch.zeros(2, 3), made)
    with pytest.raises(KernelArgumentError, match="dtype is torch"):
        unpermute(torch.zeros(made.rows, 8), torch.zeros(2, 2), made, torch.int8)
