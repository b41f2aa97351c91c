from __future__ import annotations

import pytest
import torch

from moe_model.architecture import GateSpec
from moe_model.gate import Gate


def gate(spec: GateSpec, weight: torch.Tensor, bias=None, top_k: int = 2, exact=False) -> Gate:
    return Gate(spec, top_k, weight, bias, exact=exact)


def chosen(gate: Gate, x: torch.Tensor) -> list[dict[int, float]]:
    ids, weights = gate(x)
    return [
        dict(zip(row.tolist(), w.tolist(), strict=True))
        for row, w in zip(ids, weights, strict=True)
    ]


def logits_gate(spec: GateSpec, experts: int, **kw) -> Gate:
    """Its input is the logits themselves."""
    return gate(spec, torch.eye(experts), **kw)


@pytest.mark.parametrize("exact", [False, True])
def test_group_score_is_the_sum_of_its_two_best(exact: bool) -> None:
    # Group 0 holds the single best expert, group 1 the better pair.
    spec = GateSpec(scoring="sigmoid", num_groups=2, topk_groups=1, normalise=False)
    x = torch.tensor([[4.0, -9.0, -9.0, -9.0, 2.0, 2.5, -9.0, -9.0]])
    got = chosen(logits_gate(spec, 8, bias=torch.zeros(8), exact=exact), x)[0]
    assert set(got) == {4, 5}
    assert got[5] == pytest.approx(torch.tensor(2.5).sigmoid().item())


def test_bias_chooses_but_does_not_weigh() -> None:
    spec = GateSpec(scoring="sigmoid", selection_bias=True, normalise=False)
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    got = chosen(logits_gate(spec, 4, bias=bias), torch.tensor([[3.0, 2.0, 1.0, -3.0]]))[0]
    assert set(got) == {0, 3}
    assert got[3] == pytest.approx(torch.tensor(-3.0).sigmoid().item())


def test_normalised_weights_sum_to_the_scaling_factor() -> None:
    spec = GateSpec(scoring="sigmoid", norm_epsilon=1e-20, scaling_factor=2.5)
    _, weights = logits_gate(spec, 16, top_k=4)(torch.randn(9, 16))
    assert torch.allclose(weights.sum(-1), torch.full((9,), 2.5))


def test_softmax_gate_renormalises_over_the_chosen() -> None:
    x = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    got = chosen(logits_gate(GateSpec(scoring="softmax"), 4), x)[0]
    want = torch.softmax(torch.tensor([3.0, 2.0]), 0)
    assert got == pytest.approx({1: want[0].item(), 2: want[1].item()})


@pytest.mark.parametrize("experts", [8, 33, 100])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.usefixtures("three_threads")
def test_exact_rows_do_not_depend_on_their_company(experts: int, scoring: str) -> None:
    spec = GateSpec(scoring=scoring, scaling_factor=1.7)
    one = gate(spec, torch.randn(experts, 48), torch.randn(experts), top_k=5, exact=True)
    x = torch.randn(1201, 48)
    ids, weights = one(x)
    for i in (0, 1, *range(398, 404), *range(798, 804), 1200):
        alone = one(x[i : i + 1])
        assert torch.equal(alone[0][0], ids[i])
        assert torch.equal(alone[1][0], weights[i])
