from __future__ import annotations

import numpy as np
import pytest
import torch
from ep_kernels.attend import VisibleKeys
from ep_kernels.few import FewDense, FewFfn, FewGate, FewLatent
from ep_kernels.gating import GateKernel, GateRule, reference_gate
from ep_kernels.grouped_ffn import reference_sum
from torch.nn.functional import linear, rms_norm, silu


@pytest.mark.parametrize("shape", [(192, 48), (50, 37), (1, 1), (3, 130)])
@pytest.mark.parametrize(("tokens", "pairs"), [(0, 0), (1, 0), (1, 1), (1, 4), (5, 3), (7, 40)])
def test_the_ffn_is_the_references(shape: tuple[int, int], tokens: int, pairs: int) -> None:
    hidden, inner = shape
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    experts = [tuple(torch.randn(shape) / shape[1] ** 0.5 for shape in shapes) for _ in range(5)]
    kept = [(torch.cat([g, u]).t().contiguous(), d.t().contiguous()) for g, u, d in experts]
    ffn = FewFfn(hidden, inner, 2)
    ffn.resize(5)
    for slot, (gate_up, down) in enumerate(kept):
        ffn.put(slot, gate_up, down)
    rng = np.random.default_rng()
    token = rng.integers(0, max(1, tokens), pairs).astype(np.int32)
    slots = rng.integers(0, 5, pairs).astype(np.int32)
    weight = rng.random(pairs).astype(np.float32)
    x, out = torch.randn(tokens, hidden), torch.full((tokens, hidden), float("nan"))
    assert ffn(x, token, slots, weight, out) is None
    expected = reference_sum(x, token, experts, slots, weight)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_the_first_pair_without_an_expert_is_named() -> None:
    ffn = FewFfn(4, 2, 3)
    gate_up, down = torch.randn(4, 4), torch.randn(2, 4)
    for slot in range(3):
        ffn.put(slot, gate_up, down)
    ffn.clear(1)
    x, out = torch.randn(1, 4), torch.empty(1, 4)

    def run(*slots: int) -> int | None:
        count = len(slots)
        zeros, ones = np.zeros(count, np.int32), np.ones(count, np.float32)
        return ffn(x, zeros, np.array(slots, np.int32), ones, out)

    assert run(0, 2) is None
    assert run(0, 1) == 1
    assert run(3) == 0
    assert run(-1) == 0
    ffn.resize(2)
    assert run(0, 2) == 1


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("has_latent", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_attention_of_a_few_tokens_is_what_torch_computes(
    rows: int, *, has_latent: bool, add: bool
) -> None:
    hidden, heads, latent, rotary, block = 48, 3, 20, 6, 4
    width = latent + rotary
    source = 18 if has_latent else heads * width
    norm, latent_norm = torch.randn(hidden), torch.randn(latent)
    first, out = torch.randn(source + width, hidden), torch.randn(hidden, heads * latent)
    source_norm, query = torch.randn(source), torch.randn(heads * width, source)
    attention = FewLatent(
        norm=norm,
        first=first,
        source_norm=source_norm if has_latent else None,
        query=query if has_latent else None,
        latent_norm=latent_norm,
        out=out,
        epsilon=1e-5,
        latent_epsilon=1e-6,
        heads=heads,
    )
    each = 80  # blocks a sequence, anywhere
    blocks = torch.randperm(rows * each)
    skip = torch.tensor([0, 0, 3, 1])[:rows]
    keys = torch.tensor([1, 300, 33, 2])[:rows]
    last = skip + keys - 1
    at = blocks.view(rows, each)[torch.arange(rows), last // block] * block + last % block
    visible = VisibleKeys(blocks, torch.arange(rows) * each, skip, keys)
    cache = torch.randn(rows * each * block, 32)[:, :width]
    before = cache.clone()
    cache[at] = float("nan")  # to be written
    h = torch.randn(rows, hidden)
    query_turn = torch.randn(rows, 1, width // 2, dtype=torch.complex64) / width
    key_turn = torch.randn(rows, rotary // 2, dtype=torch.complex64)
    got = attention(h, query_turn, key_turn, cache, at, block, visible, add=add)

    y = rms_norm(h, [hidden], norm, 1e-5) @ first.t()
    q, c, key = y.split_with_sizes([source, latent, rotary], 1)
    if has_latent:
        q = rms_norm(q, [source], source_norm, 1e-6) @ query.t()
    by_head = torch.view_as_complex(q.reshape(rows, heads, width // 2, 2)) * query_turn
    q = torch.view_as_real(by_head).reshape(rows, heads, width)
    turned = torch.view_as_real(torch.view_as_complex(key.reshape(rows, rotary // 2, 2)) * key_turn)
    before[at] = torch.cat([rms_norm(c, [latent], latent_norm, 1e-6), turned.flatten(1)], 1)
    torch.testing.assert_close(cache, before, atol=1e-5, rtol=1e-4)
    assert got.shape == (rows, hidden)
    for i in range(rows):
        places = torch.arange(int(skip[i]), int(skip[i] + keys[i]))
        own = blocks.view(rows, each)[i]
        seen = before[own[places // block] * block + places % block]
        found = torch.softmax(q[i] @ seen.t(), -1) @ seen[:, :latent]
        expected = found.reshape(1, -1) @ out.t() + (h[i : i + 1] if add else 0)
        torch.testing.assert_close(got[i : i + 1], expected, atol=1e-3, rtol=1e-3)
    if rows:
        at[-1] = cache.shape[0]
        with pytest.raises(IndexError, match=f"cache row {cache.shape[0]} is not in 0 to"):
            attention(h, query_turn, key_turn, cache, at, block, visible, add=add)


def test_a_query_latent_is_whole_or_not_there() -> None:
    with pytest.raises(ValueError, match="both a norm and a matrix"):
        FewLatent(
            norm=torch.ones(4),
            first=torch.ones(8, 4),
            source_norm=torch.ones(2),
            query=None,
            latent_norm=torch.ones(2),
            out=torch.ones(4, 2),
            epsilon=1e-6,
            latent_epsilon=1e-6,
            heads=1,
        )


@pytest.mark.parametrize("shape", [(192, 48), (50, 37), (1, 1), (3, 130)])
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_a_dense_ffn_is_the_references(shape: tuple[int, int], tokens: int) -> None:
    hidden, inner = shape
    gate, up = torch.randn(2, inner, hidden) / hidden**0.5
    down = torch.randn(hidden, inner) / inner**0.5
    x = torch.randn(tokens, hidden)
    expected = linear(silu(linear(x, gate)) * linear(x, up), down)
    torch.testing.assert_close(
        FewDense(torch.cat([gate, up]), down)(x), expected, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("tokens", [0, 1, 4])
@pytest.mark.parametrize("has_bias", [True, False])
def test_norm_and_gate_are_what_torch_computes(tokens: int, *, has_bias: bool) -> None:
    hidden, experts = 50, 16
    rule = GateRule(experts, 4, "sigmoid", 4, 2, epsilon=1e-20, scale=2.5)
    norm, weight = torch.randn(hidden), torch.randn(experts, hidden) / hidden**0.5
    bias = torch.randn(experts) if has_bias else None
    h = 10 * torch.randn(tokens, hidden)
    x, ids, weights = FewGate(norm, 1e-5, weight, GateKernel(rule, bias))(h)
    expected = rms_norm(h, (hidden,), norm, 1e-5)
    torch.testing.assert_close(x, expected, atol=1e-5, rtol=1e-5)
    wanted = reference_gate(rule, bias, linear(x, weight))
    assert ids.tolist() == wanted[0].tolist()
    torch.testing.assert_close(weights, wanted[1])
