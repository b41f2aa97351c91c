"""The slots of an expert worker under any sequence of whole and interrupted assignments."""

from __future__ import annotations

import itertools

import pytest
import torch
from ep_kernels.grouped_ffn import ExpertBank
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from expert_svc.slots import SlotTable, SupersededError

HIDDEN, INTER, EXPERTS, LAYERS = 4, 2, 5, (0, 3)
ROW = st.lists(st.integers(-1, EXPERTS - 1), min_size=0, max_size=4)
ASSIGNMENT = st.tuples(ROW, ROW)


class SlotsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[int, int]] = []
        self.epoch = 0
        self.table = SlotTable(
            LAYERS, EXPERTS, lambda slots: ExpertBank(slots, HIDDEN, INTER), self.read
        )

    def read(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.reads.append((layer, expert))
        up = torch.full((INTER, HIDDEN), float(10 * layer + expert))
        return up, up, up.t()

    @rule(slots=ASSIGNMENT)
    def assign(self, slots: tuple[list[int], list[int]]) -> None:
        before = self.table.held()
        self.reads.clear()
        self.epoch += 1
        shares: list[float] = []
        loaded = self.table.apply(
            LAYERS, slots, self.epoch, progress=shares.append, superseded=lambda: False
        )
        assert self.table.held() == tuple(tuple(row) for row in slots)
        assert self.table.epoch == self.epoch
        assert loaded == len(self.reads)
        assert shares[-1] == 1.0
        assert shares == sorted(shares)
        for layer, old, new in zip(LAYERS, before, slots, strict=True):
            kept = sum(a == b != -1 for a, b in zip(old, new, strict=len(old) == len(new)))
            read = sum(where == layer for where, _ in self.reads)
            filled = sum(expert != -1 for expert in new)
            assert read == (filled - kept if len(old) == len(new) else filled)

    @rule(slots=ASSIGNMENT, after=st.integers(0, 3))
    def assign_and_interrupt(self, slots: tuple[list[int], list[int]], after: int) -> None:
        count = itertools.count()
        epoch = self.table.epoch
        try:
            self.table.apply(
                LAYERS,
                slots,
                self.epoch,
                progress=lambda _share: None,
                superseded=lambda: next(count) >= after,
            )
        except SupersededError:
            assert self.table.epoch == epoch
        else:
            assert self.table.held() == tuple(tuple(row) for row in slots)

    @rule(slots=ASSIGNMENT)
    def assign_what_does_not_exist(self, slots: tuple[list[int], list[int]]) -> None:
        before = self.table.held()
        with pytest.raises(Exception, match="experts"):
            self.table.apply(
                LAYERS,
                (slots[0], [*slots[1], EXPERTS]),
                99,
                progress=lambda _share: None,
                superseded=lambda: False,
            )
        assert self.table.held() == before

    @invariant()
    def a_slot_computes_the_expert_it_claims_to_hold(self) -> None:
        for layer, bank in self.table.banks.items():
            for slot, expert in enumerate(bank.holds.tolist()):
                if expert == -1:
                    continue
                out = torch.empty(1, HIDDEN)
                token = torch.zeros(1, dtype=torch.int32).numpy()
                bank.run_rows(torch.ones(1, HIDDEN), token, token + slot, out)
                weight = float(10 * layer + expert)
                inner = torch.nn.functional.silu(torch.tensor(HIDDEN * weight)) * HIDDEN * weight
                torch.testing.assert_close(out, torch.full((1, HIDDEN), INTER * weight) * inner)


SlotsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
TestSlots = SlotsMachine.TestCase
