from __future__ import annotations

import pytest
import torch
from ep_kernels.fp8 import dequantise, quantise_rows, quantise_weight
from ep_kernels.triton.arguments import KernelArgumentError
from ep_kernels.triton.quantise import quantise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "groups"), [(0, 1), (1, 1), (3, 2), (9, 4)])
def test_the_kernel_is_the_reference(
    rows: int, groups: int, dtype: torch.dtype, rng: torch.Generator
) -> None:
    x = torch.randn(rows, groups, 128, generator=rng)
    x *= 10.0 ** torch.randint(-3, 4, (rows, groups, 1), generator=rng)
    x = x.reshape(rows, groups * 128).to(dtype)
    values, scales = quantise(x)
    wanted, wanted_scales = quantise_rows(x)
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-6, atol=0)
    # The interpreter may round a tie, or a value on the edge of two, to the neighbour.
    bits, wanted_bits = values.view(torch.uint8).int(), wanted.view(torch.uint8).int()
    assert ((bits - wanted_bits).abs() <= 1).all()
    error = (dequantise(values, scales) - x.float()).abs()
    assert (error <= 2**-4 * x.float().abs() + 2**-9 * scales.repeat_interleave(128, 1)).all()


def test_a_groups_scale_depends_on_nothing_else(rng: torch.Generator) -> None:
    x = torch.randn(2, 256, generator=rng)
    values, scales = quantise(x)
    x[0, 128:] *= 1e6
    other, other_scales = quantise(x)
    assert torch.equal(values[0, :128].float(), other[0, :128].float())
    assert torch.equal(scales[1], other_scales[1])
    assert scales[0, 0] == other_scales[0, 0]


def test_zeros_and_tiny_values_stay_finite_and_nan_shows() -> None:
    x = torch.zeros(3, 128)
    x[1] = 1e-38
    x[2, 5] = float("nan")
    values, scales = quantise(x)
    assert scales[:2].isfinite().all()
    assert (dequantise(values, scales)[0] == 0).all()
    assert (dequantise(values, scales)[1] <= 1e-37).all()
    assert values[2].float().isnan().any()


def test_a_weight_has_a_scale_for_each_block(rng: torch.Generator) -> None:
    weight = torch.randn(2, 256, 384, generator=rng)
    weight[1, 128:, :128] *= 1000.0
    values, scales = quantise_weight(weight)
    assert values.shape == weight.shape
    assert scales.shape == (2, 2, 3)
    blocks = weight[1, 128:, :128].abs().max() / 448.0
    torch.testing.assert_close(scales[1, 1, 0], blocks)
    torch.testing.assert_close(dequantise(values, scales), weight, rtol=2**-3, atol=2e-2)
    error = (dequantise(values, scales) - weight).abs()[0]
    assert error.max() <= weight[0].abs().max() * 2**-4


def test_what_the_kernel_cannot_run_is_refused_and_named() -> None:
    with pytest.raises(KernelArgumentError, match="x is 100 wide"):
        quantise(torch.zeros(2, 100))
    with pytest.raises(KernelArgumentError, match="x is torch"):
        quantise(torch.zeros(2, 128, dtype=torch.int32))
    with pytest.raises(ValueError, match="weight is of shape"):
        quantise_weight(torch.zeros(2, 128, 100))
