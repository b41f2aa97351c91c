"""Parts that a worker answers by one call, and those that it leaves for later untouched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ep_kernels.grouped_ffn import ExpertBank, reference_sum
from ep_kernels.half import has_kernel
from ep_kernels.plane import AnswerStatus, LaneShape, PairBlock, Part
from ep_kernels.serve import ServedBanks
from ep_kernels.shm import ShmExpertPlane, ShmRouterPlane

SMALL, FP16 = (12, 5), (320, 272)
"""Hidden and inner."""
needs_kernel = pytest.mark.skipif(not has_kernel(), reason="this CPU has no fp16 kernel")
KINDS = [pytest.param(SMALL, id="small"), pytest.param(FP16, id="fp16", marks=needs_kernel)]


@pytest.fixture(params=KINDS)
def end(request, tmp_path):
    end = End(tmp_path, request.param)
    yield end
    end.close()


def test_a_lone_part_is_computed_and_answered(end):
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


def test_a_ring_goes_round_by_either_way(end):
    for turn in range(8):
        end.send([0], [7])
        if turn % 3:
            assert end.serve() is not None
        else:
            (arrival,) = end.expert.poll()
            end.expert.answer(arrival, AnswerStatus.OK, 1, 1)
        end.router.release(end.answer())


def test_a_token_without_pairs_gets_zeros(end):
    end.send([], [])
    assert end.serve() is not None
    assert not end.answer().out.any()


def test_two_parts_are_left_for_one_grouped_call(end):
    end.send([0], [7])
    end.send([1], [8])
    assert end.serve() is None
    assert len(end.expert.poll()) == 2


@pytest.mark.parametrize(
    ("slots", "experts"),
    [([0, 1], [7, 7]), ([3], [10]), ([4], [7]), ([-1], [7]), ([0, 3], [7, -1])],
)
def test_what_a_slot_does_not_hold_is_not_served(end, slots, experts):
    end.send(slots, experts)
    assert end.serve() is None
    (arrival,) = end.expert.poll()
    assert not end.bank.matches(arrival.pair_slot, arrival.pair_expert)


def test_a_layer_without_a_bank_and_many_pairs_are_left(end):
    end.send([0], [7], layer=2)
    assert end.serve() is None
    assert len(end.expert.poll()) == 1
    end.send([0], [7], layer=99)
    assert end.serve() is None
    assert len(end.expert.poll()) == 1


def test_a_slot_that_was_emptied_or_added_counts_at_once(end):
    end.bank.clear(1)
    end.send([1], [8])
    assert end.serve() is None
    end.expert.poll()
    end.bank.resize(6)
    end.bank.load(5, 8, *end.held[1])
    end.send([5], [8])
    assert end.serve() is not None


def test_nonsense_is_left_for_whoever_drops_the_lane(end):
    end.send([0], [7])
    end.ring_slot().pair_token[0] = 2
    assert end.serve() is None
    assert end.expert.poll() == []
    assert end.expert.corrupt_lanes == 1


def test_what_is_written_before_its_answer_is_left_too(end):
    end.send([0], [7])
    assert len(end.expert.poll()) == 1
    slot = end.ring_slot()
    slot.write_request(slot.read_request()._replace(sequence=2))
    end.router._lanes["e0"].memory.request_flags[slot.index] = 2
    assert end.serve() is None
    assert end.expert.poll() == []
    assert end.expert.corrupt_lanes == 1


@pytest.mark.parametrize("sizes", KINDS)
def test_exact_lanes_are_left(sizes, tmp_path):
    end = End(tmp_path, sizes, exact=True)
    end.send([0], [7])
    assert end.serve() is None
    assert len(end.expert.poll()) == 1
    end.close()


@needs_kernel
def test_an_expert_kept_otherwise_is_left(tmp_path):
    """A matrix out of fp16's range stays fp32, which is no call into C."""
    end = End(tmp_path, FP16)
    gate, up, down = end.held[1]
    end.bank.load(1, 8, gate, up, down * 1e7)
    end.send([0, 1], [7, 8])
    assert end.serve() is None
    assert len(end.expert.poll()) == 1
    end.send([0, 2], [7, 9])
    assert end.serve() is not None
    end.close()


@needs_kernel
def test_both_ways_give_the_same_bits(tmp_path):
    end = End(tmp_path, FP16)
    end.send([0, 2, 1, 0], [7, 9, 8, 7])
    (arrival,) = end.expert.poll()
    pairs = (arrival.pair_token, arrival.pair_slot, arrival.pair_weight)
    by_hand = torch.empty(arrival.out.shape)
    end.bank.run(arrival.x, *pairs, by_hand)
    end.expert.answer(arrival, AnswerStatus.OK, 1, 1)
    end.router.release(end.answer())
    end.again()
    assert end.serve() is not None
    assert torch.equal(end.answer().out, by_hand)
    end.close()


class End:
    """An expert worker with experts 7, 8 and 9 in slots 0, 1 and 2 of four, and a router."""

    def __init__(self, directory, sizes, *, exact=False):
        self.hidden, inner = sizes
        hidden, kind = self.hidden, "fp32" if sizes is SMALL else "fp16"
        self.expert = ShmExpertPlane("e0", 1, str(directory / "e0"), hidden, "m")
        self.router = ShmRouterPlane("r0", 1, LaneShape(hidden, 3, 8, 3, exact=exact), "m")
        self.router.connect("e0", str(directory / "e0"), 1, 10.0)
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        self.held = [
            tuple((torch.randn(shape) * shape[1] ** -0.5).half().float() for shape in shapes)
            for _ in range(3)
        ]
        self.bank = ExpertBank(4, hidden, inner, kind=kind)
        for slot, expert in enumerate(self.held):
            self.bank.load(slot, 7 + slot, *expert)
        self.banks = ServedBanks(5)
        assert self.bank.served is not None
        self.banks.set(3, self.bank.served)

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
        self.part = Part(1, layer, 1, torch.randn(tokens, self.hidden), block)
        self.again()
        return self.part

    def again(self):
        assert self.router.try_send("e0", self.part) is not None

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
