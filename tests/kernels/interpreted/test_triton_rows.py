from __future__ import annotations

import pytest
import torch
from ep_kernels.triton.arguments import KernelArgumentError
from ep_kernels.triton.rows import (
    latent_rows,
    reference_rms_norm,
    reference_rotate,
    rms_norm,
    rotate,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Within the last place of the result."""
    return {"rtol": 2e-6 if dtype is torch.float32 else 1e-2, "atol": 1e-6}


def turns(rows: int, pairs: int, rng: torch.Generator) -> torch.Tensor:
    return torch.polar(torch.ones(rows, pairs), torch.randn(rows, pairs, generator=rng) * 9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 24), (2, 300)])
def test_rms_norm_and_its_residual(
    dtype: torch.dtype, rows: int, width: int, rng: torch.Generator
) -> None:
    x = (torch.randn(rows, width, generator=rng) * 5).to(dtype)
    weight = torch.randn(width, generator=rng)
    wanted = reference_rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).float(), wanted, **tolerance(dtype))

    residual = torch.randn(rows, width, generator=rng).to(dtype)
    total = residual.float() + x.float()
    out = rms_norm(x, weight, 1e-5, residual)
    torch.testing.assert_close(
        out.float(), reference_rms_norm(total, weight, 1e-5), **tolerance(dtype)
    )
    assert torch.equal(residual, total.to(dtype))


@pytest.mark.parametrize("normed", [False, True], ids=["query", "query's latent"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_latent_rows_reach_the_query_and_their_cache_rows(
    rows: int, dtype: torch.dtype, normed: bool, rng: torch.Generator
) -> None:
    query, latent, rotary = 20, 12, 6
    x = torch.randn(rows, query + latent + rotary, generator=rng).to(dtype)
    query_norm = torch.randn(query, generator=rng) if normed else None
    latent_norm = torch.randn(latent, generator=rng)
    turn = turns(rows, rotary // 2, rng)
    cache = torch.full((9, 20), 7.0, dtype=dtype)
    slots = torch.randperm(9, generator=rng)[:rows]
    out = latent_rows(x, query_norm, latent_norm, 1e-6, turn, slots, cache)

    front = x[:, :query].float()
    wanted = front if query_norm is None else reference_rms_norm(front, query_norm, 1e-6)
    torch.testing.assert_close(out.float(), wanted, **tolerance(dtype))
    middle = reference_rms_norm(x[:, query:-rotary], latent_norm, 1e-6)
    rotated = reference_rotate(x[:, -rotary:], turn)
    torch.testing.assert_close(
        cache[slots, : latent + rotary].float(), torch.cat([middle, rotated], 1), **tolerance(dtype)
    )
    cache[slots, : latent + rotary] = 7.0
    assert (cache == 7.0).all(), "nothing else was written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "heads", "width"), [(0, 3, 4), (1, 1, 2), (3, 6, 10), (2, 4, 64)])
def test_heads_are_turned_in_place(
    rows: int, heads: int, width: int, dtype: torch.dtype, rng: torch.Generator
) -> None:
    x = torch.randn(rows, heads, width, generator=rng).to(dtype)
    turn = turns(rows, width // 2, rng) * 0.25
    wanted = reference_rotate(x, turn.unsqueeze(1)).to(dtype)
    rotate(x, turn)
    torch.testing.assert_close(x.float(), wanted.float(), **tolerance(dtype))


def test_bf16_is_rounded_to_the_nearest_and_nan_stays() -> None:
    x = torch.tensor([[1.0, 1.00390625, 1.01171875, float("nan")]])
    out = x.bfloat16()
    residual = torch.zeros(1, 4, dtype=torch.bfloat16)
    rms_norm(x, torch.ones(4), 1e-5, residual)
    assert torch.equal(residual[:, :3], out[:, :3])
    assert residual[0, 3].isnan()


def test_what_the_kernels_cannot_run_is_refused_and_named(rng: torch.Generator) -> None:
    x = torch.randn(2, 20, generator=rng)
    with pytest.raises(KernelArgumentError, match=r"weight is of shape \[3\], expected \[20\]"):
        rms_norm(x, torch.ones(3), 1e-5)
    with pytest.raises(KernelArgumentError, match="residual is of shape"):
        rms_norm(x, torch.ones(20), 1e-5, torch.zeros(1, 20))
    with pytest.raises(KernelArgumentError, match=r"x is 20 wide, expected more than 16 \+ 4"):
        latent_rows(
            x, None, torch.ones(16), 1e-5, turns(2, 2, rng), torch.arange(2), torch.zeros(9, 20)
        )
    with pytest.raises(KernelArgumentError, match=r"cache is of shape .* expected \[slots, 12\]"):
        latent_rows(
            x, None, torch.ones(8), 1e-5, turns(2, 2, rng), torch.arange(2), torch.zeros(9, 11)
        )
    with pytest.raises(KernelArgumentError, match="pairs of values"):
        rotate(torch.zeros(1, 1, 3), turns(1, 1, rng))
    with pytest.raises(KernelArgumentError, match="turn is of shape"):
        rotate(torch.zeros(1, 1, 4), turns(1, 1, rng))
