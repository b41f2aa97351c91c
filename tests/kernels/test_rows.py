from __future__ import annotations

import pytest
import torch
from ep_kernels.rows import RmsNorm
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
