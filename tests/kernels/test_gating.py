from __future__ import annotations

import itertools

import pytest
import torch
from ep_kernels.gating import GateKernel, GateRule, reference_gate

RULES = [
    GateRule(8, 2, "softmax"),
    GateRule(5, 5, "softmax", normalise=False),
    GateRule(32, 4, "sigmoid", 4, 2, epsilon=1e-20, scale=2.0),
    GateRule(256, 8, "sigmoid", 8, 4, epsilon=1e-20, scale=2.5),
    GateRule(100, 6, "sigmoid", normalise=False, scale=16.0),
    GateRule(6, 2, "softmax", 6, 3),
    GateRule(1, 1, "sigmoid"),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 33])
def test_the_kernel_is_the_reference(rule: GateRule, biased: bool, rows: int) -> None:
    bias = torch.randn(rule.num_experts) if biased else None
    logits = 3 * torch.randn(rows, rule.num_experts + 3)  # the last columns are padding
    experts, weights = GateKernel(rule, bias)(logits)
    wanted, wanted_weights = reference_gate(rule, bias, logits)
    assert experts.dtype == torch.int32
    assert torch.equal(experts, wanted)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-6, atol=1e-6)


def test_extreme_logits_score_as_torch_scores_them() -> None:
    values = [-1e30, -200.0, -87.5, -1e-30, 0.0, 1e-3, 20.0, 88.0, 300.0, 1e30, float("inf")]
    for scoring in ("sigmoid", "softmax"):
        rule = GateRule(len(values) - 1, 3, scoring, normalise=False)
        for row in itertools.combinations(values, len(values) - 1):
            if scoring == "softmax" and float("inf") in row:
                continue  # no number
            logits = torch.tensor([row])
            got, wanted = GateKernel(rule, None)(logits)[1], reference_gate(rule, None, logits)[1]
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-37)


def test_of_equal_experts_and_groups_the_lower_numbers_are_chosen() -> None:
    rule = GateRule(12, 3, "sigmoid", 4, 2)
    experts, _ = GateKernel(rule, None)(torch.zeros(2, 12))
    assert experts.tolist() == [[0, 1, 2]] * 2
    tied = torch.zeros(1, 12).index_fill_(1, torch.tensor([4, 5, 7, 8, 10, 11]), 2.0)
    experts, _ = GateKernel(rule, None)(tied)
    assert experts.tolist() == [[4, 5, 7]]


@pytest.mark.parametrize("rule", RULES[:4], ids=str)
def test_a_row_does_not_depend_on_its_company(rule: GateRule) -> None:
    kernel = GateKernel(rule, torch.randn(rule.num_experts))
    logits = torch.randn(65, rule.num_experts)
    experts, weights = kernel(logits)
    for i in range(65):
        alone = kernel(logits[i : i + 1])
        assert torch.equal(alone[0][0], experts[i])
        assert torch.equal(alone[1][0], weights[i])


@pytest.mark.parametrize("rule", RULES[:4], ids=str)
def test_nan_shows_in_the_weights_of_its_row_alone(rule: GateRule) -> None:
    kernel = GateKernel(rule, None)
    logits = torch.randn(3, rule.num_experts)
    clean = kernel(logits)[1]
    logits[1, 0] = float("nan")
    experts, weights = kernel(logits)
    assert weights[1].isnan().any()
    assert torch.equal(weights[[0, 2]], clean[[0, 2]])
    assert ((experts >= 0) & (experts < rule.num_experts)).all()
    logits[1] = float("nan")
    experts, weights = kernel(logits)
    assert weights[1].isnan().all()
    assert len(set(experts[1].tolist())) == rule.top_k


@pytest.mark.parametrize(
    "numbers", [(8, 2, 3, 1), (8, 5, 4, 2), (8, 9, 1, 1), (8, 0, 1, 1), (8, 1, 4, 5), (8, 1, 0, 0)]
)
def test_a_rule_that_cannot_choose_is_refused(numbers: tuple[int, int, int, int]) -> None:
    experts, top_k, groups, chosen = numbers
    with pytest.raises(ValueError, match="groups"):
        GateRule(experts, top_k, "sigmoid", groups, chosen)
