from __future__ import annotations

import numpy as np
import pytest
import torch
from ep_kernels.routing import Counts, PairRouter, Places
from ep_kernels.triton import replicas
from ep_kernels.triton.arguments import KernelArgumentError
from ep_kernels.triton.replicas import ReplicaSplit, Sent, reference_split

RANKS = 4


def drawn_places(rng: torch.Generator, num_experts: int, *, lacking: bool) -> Places:
    """Each expert on one to all ranks, and with ``lacking`` some on none."""
    first, rank = [0], list[int]()
    for _ in range(num_experts):
        copies = int(torch.randint(0 if lacking else 1, RANKS + 1, (1,), generator=rng))
        rank += sorted(torch.randperm(RANKS, generator=rng)[:copies].tolist())
        first.append(len(rank))
    arrays = (np.array(values, dtype=np.int32) for values in (first, rank, range(len(rank))))
    return Places(*arrays)


def physical_of(places: Places) -> np.ndarray:
    return 100 + np.arange(places.rank.size, dtype=np.int32)


@pytest.mark.parametrize("lacking", [False, True], ids=["all-placed", "some-lacking"])
@pytest.mark.parametrize(("tokens", "k", "num_experts"), [(1, 1, 1), (1, 3, 5), (29, 2, 6)])
def test_splits_are_the_reference_and_counts_are_those_of_the_cpu(
    tokens: int, k: int, num_experts: int, lacking: bool, rng: torch.Generator
) -> None:
    places = drawn_places(rng, num_experts, lacking=lacking)
    sent, reference_sent = Sent.nothing(RANKS, "cpu"), Sent.nothing(RANKS, "cpu")
    split = ReplicaSplit(places, physical_of(places), sent)
    native = PairRouter(
        [places],
        num_ranks=RANKS,
        capacity_tokens=tokens,
        choice="even",
        counts=Counts(1, num_experts),
    )
    for _ in range(3):  # what was sent decides the next batch's ties
        experts = torch.randint(0, num_experts, (tokens, k), generator=rng).int()
        slots = split(experts)
        wanted = reference_split(experts, places, physical_of(places), reference_sent)
        assert torch.equal(slots, wanted)
        assert torch.equal(sent.recent, reference_sent.recent)
        messages, _ = native.route(0, experts, torch.ones(tokens, k))
        on_cpu = np.zeros(places.rank.size, dtype=int)
        for message in messages:
            for expert in message.block.pair_expert:
                own = slice(places.first[expert], places.first[expert + 1])
                on_cpu[places.first[expert] + list(places.rank[own]).index(message.rank)] += 1
        here = slots[slots >= 0].long() - 100
        assert np.array_equal(np.bincount(here, minlength=places.rank.size), on_cpu)
        assert np.array_equal(sent.recent.numpy(), native.recent)


def test_every_pair_goes_to_a_place_of_its_expert(rng: torch.Generator) -> None:
    places = drawn_places(rng, 6, lacking=True)
    experts = torch.randint(0, 6, (23, 2), generator=rng).int()
    slots = ReplicaSplit(places, physical_of(places), Sent.nothing(RANKS, "cpu"))(experts)
    for expert, slot in zip(experts.flatten().tolist(), slots.flatten().tolist(), strict=True):
        own = range(100 + places.first[expert], 100 + places.first[expert + 1])
        assert slot in own or (slot == -1 and not own)


def test_the_most_wanted_expert_gives_its_odd_pairs_first_and_equal_ones_by_number() -> None:
    numbers = ([0, 2, 4, 6], [0, 1, 0, 1, 0, 1], [0] * 6)
    places = Places(*(np.array(values, dtype=np.int32) for values in numbers))
    split = ReplicaSplit(places, np.arange(6, dtype=np.int32), Sent.nothing(RANKS, "cpu"))
    slots = split(torch.tensor([[0], [1], [1], [1], [2]], dtype=torch.int32))
    # Expert 1 has three pairs: two for rank 0. Then 0's goes to rank 1, and 2's to rank 0.
    assert slots.flatten().tolist() == [1, 2, 2, 3, 4]


def test_what_was_sent_is_half_forgotten_after_some_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(*(np.array(values, dtype=np.int32) for values in ([0, 2], [0, 1], [0, 0])))
    sent = Sent.nothing(RANKS, "cpu")
    sent.since_forgetting.fill_(replicas.FORGET_AFTER - 3)
    split = ReplicaSplit(places, physical_of(places), sent)
    split(torch.zeros(2, 1, dtype=torch.int32))
    assert sent.recent.tolist() == [1.0, 1.0, 0.0, 0.0]
    split(torch.zeros(1, 1, dtype=torch.int32))
    assert sent.recent.tolist() == [1.0, 0.5, 0.0, 0.0]
    assert sent.since_forgetting.item() == 0


def test_no_token_and_no_place_launch_nothing() -> None:
    sent = Sent.nothing(RANKS, "cpu")
    nowhere = Places(*(np.array(values, dtype=np.int32) for values in ([0, 0, 0], [], [])))
    split = ReplicaSplit(nowhere, physical_of(nowhere), sent)
    assert split(torch.zeros(0, 2, dtype=torch.int32)).shape == (0, 2)
    assert split(torch.ones(2, 2, dtype=torch.int32)).tolist() == [[-1, -1], [-1, -1]]
    assert sent.recent.tolist() == [0.0] * RANKS


def test_what_does_not_belong_together_is_refused_and_named(rng: torch.Generator) -> None:
    places = drawn_places(rng, 3, lacking=False)
    sent = Sent.nothing(RANKS, "cpu")
    with pytest.raises(KernelArgumentError, match="physical is for"):
        ReplicaSplit(places, physical_of(places)[1:], sent)
    far = Places(*(np.array(values, dtype=np.int32) for values in ([0, 1], [RANKS], [0])))
    with pytest.raises(KernelArgumentError, match="ranks 0 to 3"):
        ReplicaSplit(far, physical_of(far), sent)
    with pytest.raises(KernelArgumentError, match="experts is torch"):
        ReplicaSplit(places, physical_of(places), sent)(torch.zeros(1, 1))
