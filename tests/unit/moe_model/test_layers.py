from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

from moe_model.layers import SwiGlu


@pytest.mark.parametrize("inner", [40, 48, 64])
@pytest.mark.usefixtures("three_threads")
def test_exact_swiglu_rows_do_not_depend_on_their_company(inner: int) -> None:
    gate, up, down = torch.randn(inner, 32), torch.randn(inner, 32), torch.randn(32, inner)
    mlp = SwiGlu(gate, up, down, kind="fp32", exact=True)
    x = torch.randn(1201, 32)
    want = linear(silu(linear(x, gate)) * linear(x, up), down)
    got = mlp(x)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-3)
    for i in (0, 399, *range(395, 410), *range(795, 810), 1200):
        assert torch.equal(mlp(x[i : i + 1])[0], got[i])
