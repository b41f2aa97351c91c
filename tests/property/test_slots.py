"""The slots of an expert worker under any sequence of whole, failing and interrupted assignments,
with peers that deliver, lie, or are gone.
"""

from __future__ import annotations

import threading
from typing import Literal

import pytest
import torch
from ep_kernels.bundle import pack_bundle
from ep_kernels.grouped_ffn import ExpertBank
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from expert_svc.loading import Fetched, PeerError, SupersededError
from expert_svc.slots import SlotTable
from mesh.messages import SlotFault, Source
from mesh.placement import EMPTY

HIDDEN, INTER, EXPERTS, LAYERS = 4, 2, 5, (0, 3)
ROW = st.lists(st.integers(-1, EXPERTS - 1), min_size=0, max_size=4)
ASSIGNMENT = st.tuples(ROW, ROW)
Peer = Literal["right", "flipped", "other expert", "other shadow", "empty", "gone"]
PEERS: tuple[Peer, ...] = ("right", "flipped", "other expert", "other shadow", "empty", "gone")
SOURCES = st.lists(
    st.builds(
        Source, st.sampled_from(LAYERS), st.integers(0, 4), st.just("p"), st.sampled_from(PEERS),
        st.just(0),
    ),
    max_size=6,
)  # fmt: skip


def tensors(layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    up = torch.full((INTER, HIDDEN), float(1 + 10 * layer + expert))
    return up, up, up.t()


class Interrupted(threading.Event):
    """Set when it is asked for the ``after``-th time."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def wait(self, timeout: float | None = None) -> bool:
        self.left -= 1
        return self.left < 0


class SlotsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[int, int]] = []
        self.fetched: list[tuple[int, int]] = []
        self.broken: set[tuple[int, int]] = set()
        self.epoch = 0
        self.table = SlotTable(
            LAYERS,
            EXPERTS,
            lambda slots: ExpertBank(slots, HIDDEN, INTER),
            self.read,
            fetch=self.fetch,
        )
        self.peer = SlotTable(
            LAYERS, EXPERTS, lambda slots: ExpertBank(slots, HIDDEN, INTER), tensors
        )
        everything = tuple(range(EXPERTS))
        self.peer.apply(LAYERS, (everything, everything), 1, superseded=threading.Event())

    def read(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.reads.append((layer, expert))
        if (layer, expert) in self.broken:
            raise OSError("input/output error")
        return tensors(layer, expert)

    def fetch(self, source: Source, expert: int, limit: int, _stop: threading.Event) -> Fetched:
        what: Peer = source.address  # type: ignore[assignment]
        if what in {"empty", "gone"}:
            raise PeerError(what, gone=what == "gone")
        sent = (expert + 1) % EXPERTS if what == "other expert" else expert
        held = self.peer.find(source.layer, sent, sent)
        assert held is not None
        bundle = pack_bundle(held.weights.kept(), source.layer, sent)
        shadow = held.shadow
        if what == "flipped":
            bundle[expert * 37 % bundle.numel()] ^= 4
        elif what == "other shadow":
            shadow = shadow * 1.01
        elif what == "right":
            self.fetched.append((source.layer, expert))
        return Fetched(bundle, held.checksum, shadow)

    def assigned(
        self, slots: tuple[list[int], list[int]], sources: list[Source], superseded: threading.Event
    ) -> None:
        before = self.table.held()
        self.reads.clear()
        self.fetched.clear()
        self.epoch += 1
        shares: list[float] = []
        applied = self.table.apply(
            LAYERS,
            slots,
            self.epoch,
            superseded=superseded,
            progress=shares.append,
            sources=sources,
        )
        assert self.table.epoch == self.epoch
        failed = {(fault.layer, fault.slot) for fault in applied.faults}
        for layer, row, held in zip(LAYERS, slots, self.table.held(), strict=True):
            assert held == tuple(
                EMPTY if (layer, slot) in failed else expert for slot, expert in enumerate(row)
            )
        assert all(self.is_hopeless(fault, before) for fault in applied.faults)
        assert shares[-1] == 1.0
        assert shares == sorted(shares)
        assert applied.loaded_bytes >= 3 * HIDDEN * INTER * 4 * applied.loaded
        wanted = {
            (layer, expert)
            for layer, row, held in zip(LAYERS, slots, before, strict=True)
            for expert in row
            if expert != EMPTY and expert not in held
        }
        # What is loaded is wanted and loaded once; only what fails is tried for each of its slots.
        loaded = [*self.fetched, *(key for key in self.reads if key not in self.broken)]
        assert len(set(loaded)) == len(loaded) == applied.loaded
        assert applied.from_peers == len(self.fetched)
        assert set(loaded) | {(fault.layer, fault.expert) for fault in applied.faults} == wanted

    def is_hopeless(self, fault: SlotFault, before: tuple[tuple[int, ...], ...]) -> bool:
        held = before[LAYERS.index(fault.layer)]
        return (fault.layer, fault.expert) in self.broken and fault.expert not in held

    @rule(slots=ASSIGNMENT, sources=SOURCES)
    def assign(self, slots: tuple[list[int], list[int]], sources: list[Source]) -> None:
        self.assigned(slots, sources, threading.Event())

    @rule(slots=ASSIGNMENT, sources=SOURCES, after=st.integers(0, 3))
    def assign_and_interrupt(
        self, slots: tuple[list[int], list[int]], sources: list[Source], after: int
    ) -> None:
        epoch = self.table.epoch
        try:
            self.assigned(slots, sources, Interrupted(after))
        except SupersededError:
            assert self.table.epoch == epoch

    @rule(layer=st.sampled_from(LAYERS), expert=st.integers(0, EXPERTS - 1))
    def break_or_mend(self, layer: int, expert: int) -> None:
        self.broken ^= {(layer, expert)}

    @precondition(lambda self: any(expert != EMPTY for row in self.table.held() for expert in row))
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        layer, slot, expert = data.draw(
            st.sampled_from(
                [
                    (layer, slot, expert)
                    for layer, row in zip(LAYERS, self.table.held(), strict=True)
                    for slot, expert in enumerate(row)
                    if expert != EMPTY
                ]
            )
        )
        held = self.table.find(layer, slot, expert)
        assert held is not None
        self.table.discard(layer, expert, held)
        assert expert not in self.table.held()[LAYERS.index(layer)]

    @rule(slots=ASSIGNMENT)
    def assign_what_does_not_exist(self, slots: tuple[list[int], list[int]]) -> None:
        before = self.table.held()
        with pytest.raises(Exception, match="experts"):
            self.table.apply(
                LAYERS, (slots[0], [*slots[1], EXPERTS]), 99, superseded=threading.Event()
            )
        assert self.table.held() == before

    @invariant()
    def a_slot_computes_the_expert_it_claims_to_hold(self) -> None:
        for layer, bank in self.table.banks.items():
            for slot, expert in enumerate(bank.holds.tolist()):
                if expert == EMPTY:
                    continue
                out = torch.empty(1, HIDDEN)
                token = torch.zeros(1, dtype=torch.int32).numpy()
                bank.run_rows(torch.ones(1, HIDDEN), token, token + slot, out)
                weight = float(1 + 10 * layer + expert)
                inner = torch.nn.functional.silu(torch.tensor(HIDDEN * weight)) * HIDDEN * weight
                assert torch.allclose(out, torch.full((1, HIDDEN), INTER * weight) * inner)

    @invariant()
    def memory_is_held_for_what_slots_hold_and_no_more(self) -> None:
        distinct = sum(len(set(row) - {EMPTY}) for row in self.table.held())
        assert self.table.resident_bytes() == distinct * 3 * HIDDEN * INTER * 4
        for layer, row in zip(LAYERS, self.table.held(), strict=True):
            for slot, expert in enumerate(row):
                assert (self.table.find(layer, slot, expert) is not None) == (expert != EMPTY)


SlotsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
TestSlots = SlotsMachine.TestCase
