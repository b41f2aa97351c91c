from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

from moe_model.layers import SwiGlu, make_norm


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_norm_equals_the_definition(eps: float, exact: bool) -> None:
    weight = torch.randn(48)
    x = torch.cat([torch.randn(5, 48) * 3, torch.randn(1, 48) * 1e-4, torch.zeros(1, 48)])
    got = make_norm(weight, eps, exact=exact)(x)
    assert torch.allclose(got, rms_norm(x, [48], weight, eps), rtol=1e-5, atol=1e-6)


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
