from __future__ import annotations

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moe_model.architecture import RopeSpec, YarnSpec
from moe_model.rope import Rope, inverse_frequencies, pair_order


def test_rotation_depends_on_distance_only() -> None:
    rope = Rope(RopeSpec(dim=8, theta=100.0, interleaved=True), 64)
    q, k = torch.randn(2, 1, 8)

    def score(at_q: int, at_k: int) -> float:
        turn_q, turn_k = (rope.at(torch.tensor([p])) for p in (at_q, at_k))
        turned_q = q.view(torch.complex64) * turn_q
        turned_k = k.view(torch.complex64) * turn_k
        return (turned_q.view(torch.float32) * turned_k.view(torch.float32)).sum().item()

    assert score(5, 2) == pytest.approx(score(50, 47), abs=1e-4)
    assert score(0, 0) == pytest.approx((q * k).sum().item(), abs=1e-5)


def test_pair_order_brings_halves_together() -> None:
    assert pair_order(6).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("factor", [4.0, 40.0])
def test_yarn_frequencies_equal_transformers(factor: float, truncate: bool) -> None:
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": factor,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": truncate,
    }
    config = transformers.DeepseekV3Config(
        qk_rope_head_dim=64, rope_parameters=parameters, max_position_embeddings=163_840
    )
    theirs, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    yarn = YarnSpec(
        factor=factor,
        original_context=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        attention_factor=attention_factor,
        truncate=truncate,
    )
    ours = inverse_frequencies(RopeSpec(dim=64, theta=10_000.0, interleaved=True, yarn=yarn))
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)
