from __future__ import annotations

import pytest
import torch
from ep_kernels.fp8 import quantise_weight
from ep_kernels.triton.arguments import KernelArgumentError
from ep_kernels.triton.grouped_gemm import (
    Regime,
    SlotWeights,
    block_m_of,
    expert_ffn,
    grouped_ffn,
    reference_ffn,
    regime_of,
)
from ep_kernels.triton.permute import permute, plan

# tokens, k, slots: few and many rows a slot
SHAPES = [(0, 2, 3), (1, 1, 1), (1, 2, 4), (9, 2, 5), (41, 2, 2)]


def drawn_weights(
    rng: torch.Generator, slots: int, hidden: int, inter: int, dtype: torch.dtype
) -> SlotWeights:
    gate_up = torch.randn(slots, 2 * inter, hidden, generator=rng) * hidden**-0.5
    down = torch.randn(slots, hidden, inter, generator=rng) * inter**-0.5
    if dtype is not torch.float8_e4m3fn:
        return SlotWeights(gate_up.to(dtype), down.to(dtype))
    (gate_up, gate_up_scale), (down, down_scale) = quantise_weight(gate_up), quantise_weight(down)
    return SlotWeights(gate_up, down, gate_up_scale, down_scale)


def check(
    rng: torch.Generator, weights: SlotWeights, slots: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    pair_weights = torch.rand(slots.shape, generator=rng)
    got = expert_ffn(x, slots, pair_weights, weights)
    wanted = reference_ffn(x, slots, pair_weights, weights)
    assert got.shape == wanted.shape
    assert got.dtype == torch.float32
    # Sums in another order may be rounded to a neighbour, between the products and behind them: a
    # few of many terms differ by a bit of bf16, or of e4m3.
    size = float(wanted.abs().max()) if wanted.numel() else 1.0
    torch.testing.assert_close(got, wanted, rtol=0, atol=2**-7 * size)
    return got


@pytest.mark.parametrize(("tokens", "k", "num_slots"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("hidden", "inter"), [(48, 24), (64, 64)])
def test_the_kernel_is_the_reference(
    tokens: int,
    k: int,
    num_slots: int,
    dtype: torch.dtype,
    hidden: int,
    inter: int,
    rng: torch.Generator,
) -> None:
    weights = drawn_weights(rng, num_slots, hidden, inter, dtype)
    slots = torch.randint(-1, num_slots, (tokens, k), generator=rng).int()
    check(rng, weights, slots, torch.randn(tokens, hidden, generator=rng).to(dtype))


@pytest.mark.parametrize(("tokens", "k", "num_slots"), SHAPES)
def test_with_fp8_the_kernel_is_the_reference(
    tokens: int, k: int, num_slots: int, rng: torch.Generator
) -> None:
    weights = drawn_weights(rng, num_slots, 256, 128, torch.float8_e4m3fn)
    slots = torch.randint(-1, num_slots, (tokens, k), generator=rng).int()
    x = torch.randn(tokens, 256, generator=rng)
    x[:, 128:] *= 50.0  # another scale
    check(rng, weights, slots, x.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("slot", [0, 3])
def test_all_tokens_may_go_to_one_expert(
    slot: int, dtype: torch.dtype, rng: torch.Generator
) -> None:
    weights = drawn_weights(rng, 4, 128, 128, dtype)
    slots = torch.full((40, 1), slot, dtype=torch.int32)
    got = check(rng, weights, slots, torch.randn(40, 128, generator=rng).bfloat16())
    assert got.abs().sum(1).min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_no_pair_here_makes_zeros(dtype: torch.dtype, rng: torch.Generator) -> None:
    weights = drawn_weights(rng, 2, 128, 128, dtype)
    slots = torch.full((3, 2), -1, dtype=torch.int32)
    got = check(rng, weights, slots, torch.randn(3, 128, generator=rng).bfloat16())
    assert (got == 0).all()


def test_a_nan_in_one_token_or_one_expert_stays_there(rng: torch.Generator) -> None:
    weights = drawn_weights(rng, 3, 64, 32, torch.bfloat16)
    weights.down[2] = float("nan")
    x = torch.randn(4, 64, generator=rng).bfloat16()
    x[1, 3] = float("nan")
    slots = torch.tensor([[0], [0], [1], [2]], dtype=torch.int32)
    got = expert_ffn(x, slots, torch.ones(4, 1), weights)
    assert got.isnan().all(1).tolist() == [False, True, False, True]
    assert not got[[0, 2]].isnan().any()


def test_more_tiles_than_share_weights_are_all_computed(rng: torch.Generator) -> None:
    weights = drawn_weights(rng, 13, 32, 16, torch.bfloat16)
    slots = torch.arange(26).reshape(26, 1).remainder(13).int()
    check(rng, weights, slots, torch.randn(26, 32, generator=rng).bfloat16())


@pytest.mark.parametrize("regime", ["decode", "prefill"])
def test_padding_is_left_as_it_is(regime: Regime, rng: torch.Generator) -> None:
    weights = drawn_weights(rng, 3, 64, 32, torch.bfloat16)
    slots = torch.tensor([[0], [2], [2]], dtype=torch.int32)
    made = plan(slots, 3, block_m_of(weights, regime))
    rows = permute(torch.randn(3, 64, generator=rng).bfloat16(), made)
    is_pair = torch.zeros(made.rows, dtype=torch.bool)
    is_pair[made.row_of_pair.flatten().long()] = True
    assert rows[~is_pair].isnan().all(), "what is allocated is full of NaN"
    y = grouped_ffn(rows, made, weights, regime)
    assert y[~is_pair].isnan().all()
    assert y[is_pair].isfinite().all()


def test_regimes_follow_the_rows_of_a_slot(rng: torch.Generator) -> None:
    assert regime_of(31, 1) == "decode"
    assert regime_of(64, 2) == "prefill"
    weights = drawn_weights(rng, 2, 32, 16, torch.bfloat16)
    assert block_m_of(weights, "decode") < block_m_of(weights, "prefill")


def test_what_the_kernel_cannot_run_is_refused_and_named(rng: torch.Generator) -> None:
    weights = drawn_weights(rng, 2, 32, 16, torch.bfloat16)
    slots = torch.zeros(3, 1, dtype=torch.int32)
    made = plan(slots, 2, block_m_of(weights, "decode"))
    rows = permute(torch.zeros(3, 32, dtype=torch.bfloat16), made)
    with pytest.raises(KernelArgumentError, match="x is torch"):
        grouped_ffn(rows.half(), made, weights, "decode")
    with pytest.raises(KernelArgumentError, match="x is of shape"):
        grouped_ffn(rows[:1], made, weights, "decode")
    with pytest.raises(KernelArgumentError, match="plan is made for tiles of"):
        grouped_ffn(rows, made, weights, "prefill")
    with pytest.raises(KernelArgumentError, match="x_scale is given"):
        grouped_ffn(rows, made, weights, "decode", torch.zeros(made.rows, 1))
    with pytest.raises(KernelArgumentError, match="x is torch"):
        expert_ffn(torch.zeros(3, 32), slots, torch.ones(3, 1), weights)
    with pytest.raises(KernelArgumentError, match="down is of shape"):
        SlotWeights(weights.gate_up, weights.down[:1])
    with pytest.raises(KernelArgumentError, match="gate_up is of 31 rows"):
        SlotWeights(weights.gate_up[:, :31].contiguous(), weights.down)
    fp8 = drawn_weights(rng, 1, 128, 128, torch.float8_e4m3fn)
    with pytest.raises(KernelArgumentError, match="gate_up_scale is missing"):
        SlotWeights(fp8.gate_up, fp8.down)
    with pytest.raises(KernelArgumentError, match="down_scale is of shape"):
        SlotWeights(fp8.gate_up, fp8.down, fp8.gate_up_scale, fp8.gate_up_scale)
    with pytest.raises(KernelArgumentError, match="none for"):
        SlotWeights(weights.gate_up, weights.down, torch.ones(1))
    with pytest.raises(KernelArgumentError, match="both divisible by 128"):
        SlotWeights(weights.gate_up.to(torch.float8_e4m3fn), weights.down.to(torch.float8_e4m3fn))
