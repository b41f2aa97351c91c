from __future__ import annotations

import pytest
import torch
from ep_kernels.rows import LatentRows, RmsNorm
from torch.nn.functional import rms_norm


@pytest.mark.parametrize("width", [1, 15, 16, 48, 1000])
@pytest.mark.parametrize("rows", [0, 1, 2, 33])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-2])
def test_the_norm_is_torchs(width: int, rows: int, epsilon: float) -> None:
    weight = torch.randn(width)
    x = torch.randn(rows, width) * torch.logspace(-4, 2, rows)[:, None]
    got = RmsNorm(weight, epsilon)(x)
    torch.testing.assert_close(got, rms_norm(x, [width], weight, epsilon), rtol=1e-5, atol=1e-6)


def test_rows_of_zeros_stay_zeros_and_nan_stays_in_its_row() -> None:
    x = torch.zeros(3, 20)
    x[1, 7] = float("nan")
    out = RmsNorm(torch.ones(20), 1e-6)(x)
    assert torch.equal(out[[0, 2]], torch.zeros(2, 20))
    assert out[1].isnan().all()


def test_a_slice_of_columns_is_read_in_place_and_rows_stand_alone() -> None:
    norm, wide = RmsNorm(torch.randn(40), 1e-6), torch.randn(17, 100)
    out = norm(wide[:, 30:70])
    assert torch.equal(out, norm(wide[:, 30:70].contiguous()))
    for i in range(17):
        assert torch.equal(norm(wide[i : i + 1, 30:70])[0], out[i])


def test_another_width_is_refused() -> None:
    norm = RmsNorm(torch.ones(8), 1e-6)
    for x in (torch.ones(2, 7), torch.ones(8, 2).t()):
        with pytest.raises(ValueError, match="rows of 8 values"):
            norm(x)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 33])
def test_latent_rows_are_normed_turned_and_written_where_they_belong(
    rows: int, normed: bool
) -> None:
    heads, query, latent, rotary = 3, 30, 20, 6
    weights = torch.randn(query), torch.randn(latent)
    split = LatentRows(
        weights[0] if normed else None, weights[1], 1e-6, query=query, heads=heads, rotary=rotary
    )
    x = torch.randn(rows, query + latent + rotary)
    query_turn, key_turn = (
        torch.randn(rows, *shape, dtype=torch.complex64) for shape in ((1, 5), (3,))
    )
    cache = torch.zeros(40, 32)[:, : latent + rotary]
    at = torch.randperm(40)[:rows]
    got = split(x, query_turn, key_turn, cache, at)
    q, c, key = x.split_with_sizes([query, latent, rotary], 1)
    by_head = q.reshape(rows, heads, query // heads).view(torch.complex64)
    turned = (by_head * query_turn).view(torch.float32)
    want = rms_norm(q, [query], weights[0], 1e-6) if normed else turned.flatten(1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    key = (key.contiguous().view(torch.complex64) * key_turn).view(torch.float32)
    kept = torch.zeros(40, latent + rotary)
    kept[at] = torch.cat((rms_norm(c, [latent], weights[1], 1e-6), key), 1)
    torch.testing.assert_close(cache, kept, rtol=1e-5, atol=1e-6)

    alone = torch.zeros(40, latent + rotary)
    for i in range(rows):
        one = slice(i, i + 1)
        row = split(x[one], query_turn[one], key_turn[one], alone, at[one])
        assert torch.equal(row, got[one])
    assert torch.equal(alone, cache)
    q = q.contiguous()
    split.turn(q, query_turn)
    torch.testing.assert_close(q, turned.flatten(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row", [-1, 4])
def test_a_row_that_the_cache_does_not_have_is_refused(row: int) -> None:
    split = LatentRows(None, torch.ones(2), 1e-6, query=2, heads=1, rotary=2)
    turn = torch.ones(1, 1, 1, dtype=torch.complex64)
    with pytest.raises(IndexError, match=f"row {row} is not in 0 to 3"):
        split(torch.ones(1, 6), turn, turn[0], torch.zeros(4, 4), torch.tensor([row]))
