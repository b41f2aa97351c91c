from __future__ import annotations

import numpy as np
import pytest
import torch
from ep_kernels.bank import SlotEmptyError
from ep_kernels.grouped_ffn import ExpertBank, reference_rows, reference_sum
from ep_kernels.half import has_kernel

pytestmark = pytest.mark.skipif(not has_kernel(), reason="this CPU has no fp16 kernel")

HIDDEN, INNER, SLOTS = 320, 272, 6
MOST_ROWS = 128
"""That pass through an expert together."""


def an_expert(scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gate, up = torch.randn(2, INNER, HIDDEN).mul_(HIDDEN**-0.5)
    down = torch.randn(HIDDEN, INNER).mul_(INNER**-0.5 * scale)
    return gate.bfloat16(), up.bfloat16(), down.bfloat16()


def a_bank(experts, *, exact: bool = False, kind="fp16") -> ExpertBank:
    bank = ExpertBank(SLOTS, HIDDEN, INNER, kind=kind, exact=exact)
    for slot, expert in enumerate(experts):
        bank.load(slot, slot, *expert)
    return bank


def some_pairs(tokens: int, pairs: int, slots: int = SLOTS):
    token = np.random.randint(0, tokens, pairs).astype(np.int32)
    slot = np.random.randint(0, slots, pairs).astype(np.int32)
    return token, slot, np.random.rand(pairs).astype(np.float32)


@pytest.mark.parametrize(
    ("tokens", "pairs"),
    [(1, 0), (1, 1), (1, 4), (3, 9), (40, 100), (7, SLOTS * MOST_ROWS + 50), (900, 900)],
)
def test_sums_and_rows_equal_torchs(tokens: int, pairs: int) -> None:
    experts = [an_expert() for _ in range(SLOTS)]
    bank = a_bank(experts)
    halves = [tuple(matrix.half() for matrix in expert) for expert in experts]
    x, (token, slot, weight) = torch.randn(tokens, HIDDEN), some_pairs(tokens, pairs)
    out = torch.full((tokens, HIDDEN), float("nan"))
    bank.run(x, token, slot, weight, out)
    want = reference_sum(x, token, halves, slot, weight)
    torch.testing.assert_close(out, want, atol=2e-5 * max(1, pairs / tokens), rtol=1e-4)
    rows = torch.full((pairs, HIDDEN), float("nan"))
    bank.run_rows(x, token, slot, rows)
    torch.testing.assert_close(rows, reference_rows(x, token, halves, slot), atol=2e-5, rtol=1e-4)


def test_a_pairs_row_depends_on_nothing_else() -> None:
    bank = a_bank([an_expert() for _ in range(SLOTS)], exact=True)
    x, (token, slot, _) = torch.randn(60, HIDDEN), some_pairs(60, 400)
    rows = torch.empty(400, HIDDEN)
    bank.run_rows(x, token, slot, rows)
    for pair in range(0, 400, 37):
        alone = torch.empty(1, HIDDEN)
        bank.run_rows(
            x[token[pair]].unsqueeze(0), np.zeros(1, np.int32), slot[pair : pair + 1], alone
        )
        assert torch.equal(alone[0], rows[pair])


def test_experts_kept_otherwise_run_beside_fp16_ones() -> None:
    """A matrix out of fp16's range stays fp32."""
    experts = [an_expert() for _ in range(SLOTS - 1)] + [an_expert(scale=1e7)]
    bank = a_bank(experts)
    x, (token, slot, weight) = torch.randn(20, HIDDEN), some_pairs(20, 60)
    out = torch.empty(20, HIDDEN)
    bank.run(x, token, slot, weight, out)
    want = reference_sum(x, token, experts, slot, weight)
    torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-3 * want.abs().max().item())


def test_an_empty_slot_is_named_and_a_moved_expert_runs_where_it_is() -> None:
    experts = [an_expert() for _ in range(3)]
    bank = a_bank(experts)
    x, token = torch.randn(2, HIDDEN), np.array([0, 1], dtype=np.int32)
    weight, out = np.ones(2, dtype=np.float32), torch.empty(2, HIDDEN)
    with pytest.raises(SlotEmptyError, match="slot 4"):
        bank.run(x, token, np.array([1, 4], dtype=np.int32), weight, out)
    bank.resize(8)
    bank.load(7, 1, *experts[1])
    bank.clear(1)
    with pytest.raises(SlotEmptyError, match="slot 1"):
        bank.run(x, token, np.array([1, 7], dtype=np.int32), weight, out)
    bank.run(x, token, np.array([7, 7], dtype=np.int32), weight, out)
    want = reference_sum(x, token, experts, np.array([1, 1], dtype=np.int32), weight)
    torch.testing.assert_close(out, want, atol=1e-3, rtol=1e-3)
