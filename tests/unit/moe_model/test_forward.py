"""The loop with experts that answer late."""

from __future__ import annotations

import pytest
import torch

from moe_model.forward import forward, run_to_end
from moe_model.plan import Chunk
from moe_model.reference import ReferenceModel

from .conftest import DEMO


class LateTicket:
    def __init__(self, ticket, events: list[str]) -> None:
        self.done = False
        self._ticket = ticket
        self._events = events

    def result(self) -> torch.Tensor:
        assert self.done
        self._events.append("combine")
        return self._ticket.result()

    def abandon(self) -> None:
        self._events.append("abandon")


class LateExperts:
    """Answers only when told to; may fail one dispatch."""

    def __init__(self, inner, events: list[str], fail_at: int = -1) -> None:
        self._inner = inner
        self.events = events
        self._fail_at = fail_at
        self.calls = 0

    def dispatch(self, layer, x, topk_ids, topk_weights) -> LateTicket:
        self.calls += 1
        self.events.append("dispatch")
        if self.calls == self._fail_at:
            raise ConnectionError("no expert")
        return LateTicket(self._inner.dispatch(layer, x, topk_ids, topk_weights), self.events)


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    return ReferenceModel(DEMO)


def test_two_micro_batches_ping_pong_to_the_same_result(reference: ReferenceModel) -> None:
    model, kv = reference.model, reference.model.new_kv_cache(8, 16)
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    with torch.inference_mode():
        plans = [model.plan([Chunk(p, 0, [i])], 16) for i, p in enumerate(prompts)]
        want = [run_to_end(forward(model, plan, kv, reference.experts)) for plan in plans]
        events: list[str] = []
        experts = LateExperts(reference.experts, events)
        loops = [forward(model, plan, kv, experts) for plan in plans]
        got: dict[int, torch.Tensor] = {}
        tickets = {i: next(loop) for i, loop in enumerate(loops)}
        assert events == ["dispatch", "dispatch"]
        while tickets:
            for i, ticket in list(tickets.items()):
                assert loops[i].send(None) is ticket  # not done: yields the same again
                ticket.done = True
                try:
                    tickets[i] = next(loops[i])
                except StopIteration as stop:
                    got[i] = stop.value
                    del tickets[i]
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert events.count("combine") == 2 * len(model.spec.moe_layers)


def test_errors_of_the_experts_reach_the_caller(reference: ReferenceModel) -> None:
    model, kv = reference.model, reference.model.new_kv_cache(2, 16)
    with torch.inference_mode():
        plan = model.plan([Chunk([5], 0, [0])], 16)
        loop = forward(model, plan, kv, LateExperts(reference.experts, [], fail_at=2))
        next(loop).done = True
        with pytest.raises(ConnectionError):
            next(loop)


def test_what_breaks_off_abandons_its_dispatch(reference: ReferenceModel) -> None:
    model, kv = reference.model, reference.model.new_kv_cache(2, 16)
    with torch.inference_mode():
        plan = model.plan([Chunk([5], 0, [0])], 16)
        events: list[str] = []
        loop = forward(model, plan, kv, LateExperts(reference.experts, events))
        next(loop)
        loop.close()
        assert events == ["dispatch", "abandon"]

        class Broken:
            spec = model.spec
            embed, attend, dense = model.embed, model.attend, model.dense
            gate = model.gate

            def shared(self, layer, x):
                raise ArithmeticError

        events = []
        with pytest.raises(ArithmeticError):
            next(forward(Broken(), plan, kv, LateExperts(reference.experts, events)))
        assert events == ["dispatch", "abandon"]
