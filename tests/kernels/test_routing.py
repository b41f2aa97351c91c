"""The choice of replicas against an exact optimum, and messages against what they must carry."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from ep_kernels.routing import Counts, Message, PairRouter, Places


def places_of(homes: list[list[tuple[int, int]]]) -> Places:
    """From (rank, slot) of each expert's places."""
    flat = [at for home in homes for at in home]
    return Places(
        np.cumsum([0, *map(len, homes)]).astype(np.int32),
        np.array([rank for rank, _ in flat], dtype=np.int32),
        np.array([slot for _, slot in flat], dtype=np.int32),
    )


def random_homes(rng: np.random.Generator, experts: int, ranks: int, extra: int):
    """Every expert on one rank, ``extra`` more places at random."""
    chosen = [{int(rng.integers(ranks))} for _ in range(experts)]
    for _ in range(extra):
        chosen[rng.integers(experts)].add(int(rng.integers(ranks)))
    taken: Counter[int] = Counter()
    homes = []
    for ranks_of in chosen:
        homes.append([(rank, taken[rank]) for rank in sorted(ranks_of)])
        taken.update(ranks_of)
    return homes


def router(homes, *, ranks: int, capacity: int = 1 << 20, choice="water-fill") -> PairRouter:
    return PairRouter(
        [places_of(homes)],
        num_ranks=ranks,
        capacity_tokens=capacity,
        choice=choice,
        counts=Counts(1, len(homes)),
    )


def draw(rng: np.random.Generator, tokens: int, experts: int, top_k: int, skew: float = 1.0):
    """Experts ``[tokens, top_k]``, some hotter than others, none twice a token."""
    logits = rng.normal(0, skew, experts) + rng.gumbel(size=(tokens, experts))
    return torch.from_numpy(np.argsort(-logits, axis=1)[:, :top_k].astype(np.int32))


def send(table: PairRouter, ids: torch.Tensor, **kw):
    return table.route(0, ids, torch.rand(ids.shape), **kw)


def rank_loads(messages: list[Message], ranks: int) -> list[int]:
    loads = [0] * ranks
    for message in messages:
        loads[message.rank] += message.pairs.size
    return loads


def least_max_load(counts: np.ndarray, homes, ranks: int) -> int:
    """The least pairs that the fullest rank can have: the smallest height at which all fit, found
    by moving pairs along chains of replicas (augmenting paths).
    """

    def fits(height: int) -> bool:
        room = [height] * ranks
        on: dict[int, Counter[int]] = defaultdict(Counter)  # rank -> expert -> pairs

        def make_room(expert: int) -> bool:
            came: dict[int, tuple[int, int | None]] = {r: (expert, None) for r, _ in homes[expert]}
            queue = list(came)
            for rank in queue:
                if room[rank]:
                    room[rank] -= 1
                    at: int | None = rank
                    while at is not None:
                        moved, origin = came[at]
                        on[at][moved] += 1
                        if origin is not None:
                            on[origin][moved] -= 1
                        at = origin
                    return True
                for other in [e for e, n in on[rank].items() if n]:
                    for target, _ in homes[other]:
                        if target not in came:
                            came[target] = (other, rank)
                            queue.append(target)
            return False

        return all(make_room(e) for e, n in enumerate(counts) for _ in range(n if homes[e] else 0))

    low, high = 0, int(counts.sum())
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "ranks", "extra"),
    [
        (1, 8, 4, 3, 6),
        (7, 16, 4, 5, 10),
        (40, 32, 4, 8, 12),
        (64, 64, 8, 16, 24),
        (150, 64, 8, 32, 64),
        (100, 12, 2, 12, 60),
    ],
)
def test_water_filling_leaves_the_fullest_rank_as_little_as_any_split(
    tokens, experts, top_k, ranks, extra
) -> None:
    rng = np.random.default_rng(tokens)
    for _ in range(8):
        homes = random_homes(rng, experts, ranks, extra)
        ids = draw(rng, tokens, experts, top_k)
        messages, _ = send(router(homes, ranks=ranks), ids)
        counts = np.bincount(ids.reshape(-1), minlength=experts)
        assert max(rank_loads(messages, ranks)) == least_max_load(counts, homes, ranks)


def test_all_load_on_one_expert_is_shared_by_all_its_ranks() -> None:
    homes = [[(rank, 0) for rank in range(7)], [(3, 1)]]
    messages, _ = send(router(homes, ranks=7), torch.zeros(100, 1, dtype=torch.int32))
    assert sorted(rank_loads(messages, 7)) == [14] * 5 + [15] * 2


def test_a_chain_of_replicas_carries_load_from_one_end_to_the_other() -> None:
    # Expert i lies on ranks i and i + 1; all load is expert 0's, whose ranks are the first two.
    ranks = 12
    homes = [[(i, 0), (i + 1, 1)] for i in range(ranks - 1)]
    ids = torch.cat([torch.zeros(120, 1), torch.arange(1, ranks - 1).repeat(12)[:, None]]).int()
    messages, _ = send(router(homes, ranks=ranks), ids)
    assert max(rank_loads(messages, ranks)) == 60
    assert sum(rank_loads(messages, ranks)) == 240


def test_even_divides_equally_and_least_loaded_gives_all_to_one() -> None:
    homes = [[(0, 0), (1, 0), (2, 0)], [(0, 1)], [(1, 1)]]
    ids = torch.tensor([0] * 9 + [1] * 20 + [2], dtype=torch.int32)[:, None]
    assert rank_loads(send(router(homes, ranks=3, choice="even"), ids)[0], 3) == [23, 4, 3]
    table = router(homes, ranks=3, choice="least-loaded")
    assert rank_loads(send(table, ids)[0], 3) == [20, 1, 9]
    assert rank_loads(send(table, ids[:9])[0], 3) == [0, 9, 0]
    assert rank_loads(send(router(homes, ranks=3), ids)[0], 3) == [20, 5, 5]


@pytest.mark.parametrize("choice", ["water-fill", "even", "least-loaded"])
def test_single_tokens_take_turns_and_the_same_history_gives_the_same_choice(choice) -> None:
    homes = [[(0, 0), (1, 0), (2, 0)]]
    one = torch.zeros(1, 1, dtype=torch.int32)
    histories = []
    for _ in range(2):
        table = router(homes, ranks=3, choice=choice)
        histories.append([send(table, one)[0][0].rank for _ in range(6)])
    assert histories[0] == histories[1] == [0, 1, 2, 0, 1, 2]


def test_a_rank_that_was_sent_more_lately_gets_less() -> None:
    homes = [[(0, 0)], [(0, 1), (1, 0)]]
    table = router(homes, ranks=2)
    send(table, torch.zeros(5, 1, dtype=torch.int32))
    sent = [send(table, torch.ones(1, 1, dtype=torch.int32))[0][0].rank for _ in range(6)]
    assert sent == [1] * 5 + [0]


def test_a_tokens_pairs_go_to_ranks_that_it_is_sent_to_anyway() -> None:
    # Experts 0 and 1 have one home each; half of expert 2's tokens have the one, half the other.
    homes = [[(0, 0)], [(1, 0)], [(0, 1), (1, 1)]]
    ids = torch.tensor([[0, 2], [1, 2]] * 8, dtype=torch.int32)
    messages, _ = send(router(homes, ranks=2), ids)
    assert [message.block.rows.size for message in messages] == [8, 8]


@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 40, 300])
@pytest.mark.parametrize("capacity", [1, 3, 64])
@pytest.mark.parametrize("choice", ["water-fill", "even", "least-loaded"])
def test_every_pair_is_in_one_message_at_a_place_of_its_expert(tokens, capacity, choice) -> None:
    rng = np.random.default_rng(tokens * 100 + capacity)
    homes = random_homes(rng, 16, 5, 12)
    homes[3], homes[11] = [], []
    table = router(homes, ranks=5, capacity=capacity, choice=choice)
    ids, weights = draw(rng, tokens, 16, 4), torch.rand(tokens, 4)
    for pairs in (None, np.flatnonzero(rng.random(tokens * 4) < 0.3).astype(np.int32)):
        messages, nowhere = table.route(0, ids, weights, pairs=pairs)
        asked = np.arange(tokens * 4) if pairs is None else pairs
        seen = [] if nowhere is None else nowhere.tolist()
        assert {int(ids.reshape(-1)[pair]) for pair in seen} <= {3, 11}
        on_rank: dict[int, list[int]] = defaultdict(list)
        for message in messages:
            block = message.block
            assert 0 < block.rows.size <= capacity
            assert (block.rows[block.pair_token] == message.pairs // 4).all()
            assert set(block.pair_token.tolist()) == set(range(block.rows.size))
            assert (np.diff(message.pairs) > 0).all()
            assert block.pair_expert.tolist() == ids.reshape(-1)[message.pairs].tolist()
            assert block.pair_weight.tolist() == weights.reshape(-1)[message.pairs].tolist()
            for expert, slot in zip(block.pair_expert, block.pair_slot, strict=True):
                assert (message.rank, slot) in homes[expert]
            on_rank[message.rank] += block.rows.tolist()
            seen += message.pairs.tolist()
        assert sorted(seen) == asked.tolist()
        for rows in on_rank.values():
            assert (np.diff(rows) > 0).all()  # each token once, ascending over the messages
        assert [m.rank for m in messages] == sorted(m.rank for m in messages)


def test_tokens_are_counted_once_and_decodes_apart() -> None:
    counts = Counts(2, 3)
    layers = [places_of([[(0, 0)], [(0, 1)], []])] * 2
    table = PairRouter(layers, num_ranks=1, capacity_tokens=8, choice="water-fill", counts=counts)
    ids = torch.tensor([[0, 1], [2, 1], [1, 0]], dtype=torch.int32)
    table.route(1, ids, torch.ones(3, 2), decodes=b"\1\0\1")
    table.route(1, ids, torch.ones(3, 2), pairs=np.array([1, 2], dtype=np.int32))  # sent again
    assert counts.tokens.tolist() == [[0, 0, 0], [2, 3, 1]]
    assert counts.decodes.tolist() == [[0, 0, 0], [2, 2, 0]]


def test_an_expert_that_does_not_exist_is_an_error() -> None:
    table = router([[(0, 0)]], ranks=1)
    for expert in (-1, 1):
        with pytest.raises(ValueError, match="there are 0 to 0"):
            send(table, torch.full((1, 1), expert, dtype=torch.int32))
