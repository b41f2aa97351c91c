from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear, silu

from moe_model.checkpoint import Checkpoint
from moe_model.experts import LocalExperts, combine_rows, read_expert
from moe_model.spec import load_spec

from .conftest import DEMO, Oracle


def dense_moe(layer: int, x, ids, weights) -> torch.Tensor:
    spec = load_spec(DEMO)
    out = torch.zeros_like(x)
    with Checkpoint(DEMO) as checkpoint:
        for token in range(x.shape[0]):
            for k in range(ids.shape[1]):
                gate, up, down = (
                    t.float() for t in read_expert(checkpoint, spec, layer, int(ids[token, k]))
                )
                row = linear(silu(linear(x[token], gate)) * linear(x[token], up), down)
                out[token] += weights[token, k] * row
    return out


def test_local_experts_equal_one_expert_at_a_time() -> None:
    spec = load_spec(DEMO)
    seen: list[float] = []
    both = [LocalExperts.load(DEMO, exact=exact, progress=seen.append) for exact in (False, True)]
    assert seen[-1] == 1.0
    generator = torch.Generator().manual_seed(0)
    for tokens in (0, 1, 2, 9):
        x = torch.randn(tokens, spec.hidden_size, generator=generator)
        ids = torch.rand(tokens, spec.num_experts, generator=generator).topk(4)[1]
        weights = torch.rand(tokens, 4, generator=generator)
        want = dense_moe(2, x, ids, weights)
        for experts in both:
            with torch.inference_mode():
                ticket = experts.dispatch(2, x, ids, weights)
            assert ticket.done
            assert torch.allclose(ticket.result(), want, atol=1e-4)


def test_combine_adds_in_top_k_order() -> None:
    rows, weights = torch.randn(5, 3, 7), torch.randn(5, 3)
    want = rows[:, 0] * weights[:, :1]
    want = want + rows[:, 1] * weights[:, 1:2]
    want = want + rows[:, 2] * weights[:, 2:]
    assert torch.equal(combine_rows(rows, weights), want)
    alone = torch.cat([combine_rows(rows[i : i + 1], weights[i : i + 1]) for i in range(5)])
    assert torch.equal(alone, want)


def test_mixtral_experts_are_read_as_gate_up_down(oracle: Callable[[str], Oracle]) -> None:
    pair = oracle("mixtral")
    with Checkpoint(pair.path) as checkpoint:
        gate, up, down = read_expert(checkpoint, pair.ours.model.spec, 1, 3)
    experts = pair.theirs.model.layers[1].mlp.experts
    assert torch.equal(torch.cat([gate, up]), experts.gate_up_proj[3])
    assert torch.equal(down, experts.down_proj[3])
