from __future__ import annotations

import pytest
import torch
from ep_kernels.gating import GateKernel, GateRule, reference_gate
from ep_kernels.triton.arguments import KernelArgumentError
from ep_kernels.triton.gate import gate

RULES = {
    "deepseek-v3": GateRule(256, 8, "sigmoid", 8, 4, epsilon=1e-20, scale=2.5),
    "mixtral": GateRule(8, 2, "softmax"),
    "qwen3": GateRule(128, 8, "softmax"),
    "llama-4": GateRule(16, 1, "sigmoid", normalise=False),
    "no-power-of-two": GateRule(60, 6, "sigmoid", 5, 3, normalise=False, scale=16.0),
    "groups-of-one": GateRule(6, 2, "softmax", 6, 3),
    "all-chosen": GateRule(5, 5, "softmax", normalise=False),
    "one": GateRule(1, 1, "sigmoid"),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_the_kernel_chooses_as_the_reference_and_as_c(
    rule: GateRule, biased: bool, rows: int, rng: torch.Generator
) -> None:
    bias = torch.randn(rule.num_experts, generator=rng) if biased else None
    logits = 3 * torch.randn(rows, rule.num_experts + 3, generator=rng)  # the last are padding
    experts, weights = gate(logits, rule, bias)
    wanted, wanted_weights = reference_gate(rule, bias, logits)
    assert experts.dtype == torch.int32
    assert torch.equal(experts, wanted)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-6, atol=1e-6)
    native, native_weights = GateKernel(rule, bias)(logits)
    assert torch.equal(experts, native)
    torch.testing.assert_close(weights, native_weights, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_of_16_bits_are_widened(dtype: torch.dtype, rng: torch.Generator) -> None:
    rule = RULES["qwen3"]
    logits = (torch.randn(5, 128, generator=rng) * 3).to(dtype)
    experts, weights = gate(logits, rule)
    wanted, wanted_weights = reference_gate(rule, None, logits.float())
    assert torch.equal(experts, wanted)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-6, atol=1e-6)


def test_of_equal_experts_and_groups_the_lower_numbers_are_chosen() -> None:
    rule = GateRule(12, 3, "sigmoid", 4, 2)
    tied = torch.zeros(2, 12)
    tied[1].index_fill_(0, torch.tensor([4, 5, 7, 8, 10, 11]), 2.0)
    experts, _ = gate(tied, rule)
    assert experts.tolist() == [[0, 1, 2], [4, 5, 7]]
    assert experts.tolist() == GateKernel(rule, None)(tied)[0].tolist()


def test_few_distinct_logits_make_ties_that_break_as_in_c(rng: torch.Generator) -> None:
    rule = GateRule(32, 5, "sigmoid", 8, 3)
    logits = torch.randint(-1, 2, (9, 32), generator=rng).float()
    assert torch.equal(gate(logits, rule)[0], GateKernel(rule, None)(logits)[0])


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3"])
def test_nan_shows_in_the_weights_of_its_row_alone(name: str, rng: torch.Generator) -> None:
    rule = RULES[name]
    logits = torch.randn(3, rule.num_experts, generator=rng)
    clean = gate(logits, rule)[1]
    logits[1, 0] = float("nan")
    experts, weights = gate(logits, rule)
    assert weights[1].isnan().any()
    assert torch.equal(weights[[0, 2]], clean[[0, 2]])
    assert ((experts >= 0) & (experts < rule.num_experts)).all()
    logits[1] = float("nan")
    experts, weights = gate(logits, rule)
    assert weights[1].isnan().all()
    assert len(set(experts[1].tolist())) == rule.top_k


def test_extreme_logits_score_as_torch_scores_them() -> None:
    values = torch.tensor([[-1e30, -200.0, -87.5, -1e-30, 0.0, 1e-3, 20.0, 88.0, 300.0, 1e30]])
    for scoring in ("sigmoid", "softmax"):
        rule = GateRule(10, 3, scoring, normalise=False)
        got, wanted = gate(values, rule)[1], reference_gate(rule, None, values)[1]
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-37)


def test_what_the_kernel_cannot_run_is_refused_and_named() -> None:
    rule = RULES["mixtral"]
    with pytest.raises(KernelArgumentError, match=r"logits is of shape \[8\]"):
        gate(torch.zeros(8), rule)
    with pytest.raises(KernelArgumentError, match="at least 8 columns"):
        gate(torch.zeros(1, 7), rule)
    with pytest.raises(KernelArgumentError, match=r"logits is torch.float64"):
        gate(torch.zeros(1, 8, dtype=torch.float64), rule)
    with pytest.raises(KernelArgumentError, match="contiguous"):
        gate(torch.zeros(8, 8).t(), rule)
    with pytest.raises(KernelArgumentError, match=r"bias is of shape \[9\], expected \[8\]"):
        gate(torch.zeros(1, 8), rule, torch.zeros(9))
