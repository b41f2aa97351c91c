from __future__ import annotations

import pytest
import torch
from ep_kernels.grouped_ffn import ExpertBank
from ep_kernels.shadow import checkpoint_row, shadow_fault, shadow_row, shadow_token


def test_the_token_is_pinned_and_another_for_each_expert():
    token = shadow_token(3, 7, 512)
    assert token.shape == (1, 512)
    assert (token[0, :6] * 64).tolist() == [47, 25, 3, -51, 117, -67]
    assert torch.equal(token, token.half().float()), "exact in every type that travels"
    assert 0.8 < token.std().item() < 1.4
    others = [shadow_token(3, 8, 512), shadow_token(4, 7, 512), shadow_token(7, 3, 512)]
    assert not any(torch.equal(token, other) for other in others)


@pytest.mark.parametrize("shape", [(192, 48), (50, 37), (256, 320)])
@pytest.mark.parametrize(
    ("kind", "exact"), [("auto", False), ("fp32", False), ("fp16", False), ("fp16", True)]
)
def test_a_packed_expert_answers_as_the_checkpoint_says(shape, kind, exact):
    hidden, inter = shape
    random = torch.Generator().manual_seed(0)
    tensors = tuple(
        torch.randn(*size, generator=random) for size in [(inter, hidden)] * 2 + [(hidden, inter)]
    )
    bank = ExpertBank(1, hidden, inter, kind=kind, exact=exact)
    row = shadow_row(bank.prepare(*tensors), 3, 7, hidden)
    expected = checkpoint_row(tensors, 3, 7)
    assert shadow_fault(row, expected, rounded=kind == "fp16") == ""

    another = (tensors[1], tensors[0], tensors[2])
    row = shadow_row(bank.prepare(*another), 3, 7, hidden)
    assert "differs by" in shadow_fault(row, expected, rounded=True)


def test_what_may_differ_and_what_may_not():
    row = torch.linspace(-1, 1, 50)
    near, far = row * (1 + 1e-6), row + 1e-3
    assert shadow_fault(near, row) == ""
    assert "allowed is none" in shadow_fault(near, row, exact=True)
    assert shadow_fault(row.clone(), row, exact=True) == ""
    assert "allowed is 0.0001" in shadow_fault(far, row)
    assert shadow_fault(far, row, rounded=True) == ""
    assert shadow_fault(torch.zeros(3), torch.zeros(3)) == ""
    assert "differs" in shadow_fault(torch.full((3,), 1e-20), torch.zeros(3))
    assert "50 values, ours has 3" in shadow_fault(torch.zeros(3), row)
    for wrong in (torch.nan, torch.inf):
        assert "not finite" in shadow_fault(torch.full((50,), wrong), row)
        assert "not finite" in shadow_fault(row, torch.full((50,), wrong))
        same = torch.full((50,), wrong)
        assert "not finite" in shadow_fault(same, same)
