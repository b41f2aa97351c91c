from __future__ import annotations

import numpy as np
import pytest
import torch
from ep_kernels.few import FewBanks, FewDense, FewFfn, FewGate, FewLatent
from ep_kernels.gating import GateKernel, GateRule, reference_gate
from ep_kernels.grouped_ffn import ExpertBank, reference_sum
from ep_kernels.plane import AnswerStatus, LaneShape, PairBlock, Part
from ep_kernels.shm import ShmExpertPlane, ShmRouterPlane
from torch.nn.functional import linear, rms_norm, silu


@pytest.mark.parametrize("shape", [(192, 48), (50, 37), (1, 1), (3, 130)])
@pytest.mark.parametrize(("tokens", "pairs"), [(0, 0), (1, 0), (1, 1), (1, 4), (5, 3), (7, 40)])
def test_the_ffn_is_the_references(shape: tuple[int, int], tokens: int, pairs: int) -> None:
    hidden, inner = shape
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    experts = [tuple(torch.randn(shape) / shape[1] ** 0.5 for shape in shapes) for _ in range(5)]
    kept = [(torch.cat([g, u]).t().contiguous(), d.t().contiguous()) for g, u, d in experts]
    ffn = FewFfn(hidden, inner, np.zeros(2, np.int32))
    ffn.resize(np.zeros(5, np.int32))
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
    ffn = FewFfn(4, 2, np.zeros(3, np.int32))
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
    ffn.resize(np.zeros(2, np.int32))
    assert run(0, 2) == 1


@pytest.mark.parametrize("keys", [1, 2, 33, 300])
@pytest.mark.parametrize("has_latent", [True, False])
def test_one_tokens_attention_is_what_torch_computes(keys: int, *, has_latent: bool) -> None:
    hidden, heads, latent, rotary = 48, 3, 20, 6
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
    cache = torch.randn(keys + 4, 32)
    rows = cache[2 : 2 + keys, :width]
    before = cache.clone()
    rows[-1] = float("nan")  # to be written
    h = torch.randn(1, hidden)
    query_turn = torch.randn(1, 1, width // 2, dtype=torch.complex64) / width
    key_turn = torch.randn(1, rotary // 2, dtype=torch.complex64)
    got = attention(h, query_turn, key_turn, rows)

    y = rms_norm(h, [hidden], norm, 1e-5) @ first.t()
    q, c, key = y.split_with_sizes([source, latent, rotary], 1)
    if has_latent:
        q = rms_norm(q, [source], source_norm, 1e-6) @ query.t()
    by_head = torch.view_as_complex(q.reshape(heads, width // 2, 2)) * query_turn[0]
    q = torch.view_as_real(by_head).reshape(heads, width)
    turned = torch.view_as_real(torch.view_as_complex(key.reshape(-1, 2)) * key_turn[0]).flatten()
    before[1 + keys, :width] = torch.cat([rms_norm(c, [latent], latent_norm, 1e-6)[0], turned])
    torch.testing.assert_close(cache, before, atol=1e-5, rtol=1e-4)
    seen = before[2 : 2 + keys, :width]
    found = torch.softmax(q @ seen.t(), -1) @ seen[:, :latent]
    torch.testing.assert_close(got, h + found.reshape(1, -1) @ out.t(), atol=1e-3, rtol=1e-3)


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


class TestServe:
    """Parts that a worker answers by one call, and those that it leaves for later untouched."""

    @pytest.fixture
    def end(self, tmp_path):
        end = End(tmp_path)
        yield end
        end.close()

    def test_a_lone_part_is_computed_and_answered(self, end):
        part = end.send([0, 2, 2, 1], [7, 9, 9, 8])
        served = end.serve()
        assert served is not None
        assert (served.layer, served.tokens, served.pairs) == (3, 2, 4)
        answer = end.answer()
        assert (answer.status, answer.began_ns) == (AnswerStatus.OK, served.began_ns)
        block = part.block
        pairs = block.pair_token, end.held, block.pair_slot, block.pair_weight
        torch.testing.assert_close(answer.out, reference_sum(part.x, *pairs), atol=1e-4, rtol=1e-4)
        assert end.serve() is None
        assert end.expert.poll() == []

    def test_a_ring_goes_round_by_either_way(self, end):
        for turn in range(8):
            end.send([0], [7])
            if turn % 3:
                assert end.serve() is not None
            else:
                (arrival,) = end.expert.poll()
                end.expert.answer(arrival, AnswerStatus.OK, 1, 1)
            end.router.release(end.answer())

    def test_a_token_without_pairs_gets_zeros(self, end):
        end.send([], [])
        assert end.serve() is not None
        assert not end.answer().out.any()

    def test_two_parts_are_left_for_one_grouped_call(self, end):
        end.send([0], [7])
        end.send([1], [8])
        assert end.serve() is None
        assert len(end.expert.poll()) == 2

    @pytest.mark.parametrize(
        ("slots", "experts"),
        [([0, 1], [7, 7]), ([3], [10]), ([4], [7]), ([-1], [7]), ([0, 3], [7, -1])],
    )
    def test_what_a_slot_does_not_hold_is_not_served(self, end, slots, experts):
        end.send(slots, experts)
        assert end.serve() is None
        (arrival,) = end.expert.poll()
        assert not end.bank.matches(arrival.pair_slot, arrival.pair_expert)

    def test_a_layer_without_a_bank_and_many_pairs_are_left(self, end):
        end.send([0], [7], layer=2)
        assert end.serve() is None
        assert len(end.expert.poll()) == 1
        end.send([0], [7], layer=99)
        assert end.serve() is None
        assert len(end.expert.poll()) == 1

    def test_a_slot_that_was_emptied_or_added_counts_at_once(self, end):
        end.bank.clear(1)
        end.send([1], [8])
        assert end.serve() is None
        end.expert.poll()
        end.bank.resize(6)
        end.bank.load(5, 8, *end.held[1])
        end.send([5], [8])
        assert end.serve() is not None

    def test_nonsense_is_left_for_whoever_drops_the_lane(self, end):
        end.send([0], [7])
        end.ring_slot().pair_token[0] = 2
        assert end.serve() is None
        assert end.expert.poll() == []
        assert end.expert.corrupt_lanes == 1

    def test_what_is_written_before_its_answer_is_left_too(self, end):
        end.send([0], [7])
        assert len(end.expert.poll()) == 1
        slot = end.ring_slot()
        slot.write_request(slot.read_request()._replace(sequence=2))
        end.router._lanes["e0"].memory.request_flags[slot.index] = 2
        assert end.serve() is None
        assert end.expert.poll() == []
        assert end.expert.corrupt_lanes == 1

    def test_exact_lanes_are_left(self, tmp_path):
        end = End(tmp_path, exact=True)
        end.send([0], [7])
        assert end.serve() is None
        assert len(end.expert.poll()) == 1
        end.close()


class End:
    """An expert worker with experts 7, 8 and 9 in slots 0, 1 and 2 of four, and a router."""

    def __init__(self, directory, *, exact=False):
        self.expert = ShmExpertPlane("e0", 1, str(directory / "e0"), 12, "m")
        self.router = ShmRouterPlane("r0", 1, LaneShape(12, 3, 8, 3, exact=exact), "m")
        self.router.connect("e0", str(directory / "e0"), 1, 10.0)
        shapes = ((5, 12), (5, 12), (12, 5))
        self.held = [tuple(torch.randn(shape) for shape in shapes) for _ in range(3)]
        self.bank = ExpertBank(4, 12, 5)
        for slot, expert in enumerate(self.held):
            self.bank.load(slot, 7 + slot, *expert)
        self.banks = FewBanks(5)
        assert self.bank.few is not None
        self.banks.set(3, self.bank.few)

    def send(self, slots, experts, layer=3, tokens=2):
        rng = np.random.default_rng()
        count = len(slots)
        block = PairBlock.of(
            np.arange(tokens, dtype=np.int32),
            rng.integers(0, tokens, count).astype(np.int32),
            np.array(slots, np.int32),
            np.array(experts, np.int32),
            rng.random(count).astype(np.float32),
        )
        part = Part(1, layer, 1, torch.randn(tokens, 12), block)
        assert self.router.try_send("e0", part) is not None
        return part

    def serve(self):
        return self.expert.serve(self.banks)

    def answer(self):
        (answer,) = self.router.poll()
        return answer

    def ring_slot(self):
        return self.router._lanes["e0"].in_flight[0].slot

    def close(self):
        self.router.close()
        self.expert.close()
