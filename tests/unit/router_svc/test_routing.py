from __future__ import annotations

import numpy as np
import pytest

from mesh.messages import Placement
from router_svc.routing import NOWHERE, RouteTable, even_out, split


def placement(ranks: dict[str, list[int]], experts: int, layers: tuple[int, ...] = (3,)):
    flat = tuple(expert for held in ranks.values() for expert in held)
    return Placement(
        epoch=1,
        moe_layers=layers,
        num_experts=experts,
        ranks=tuple(ranks),
        slots_per_rank=tuple(len(held) for held in ranks.values()),
        physical_to_logical=(flat,) * len(layers),
    )


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, dtype=np.int64)


def test_each_expert_is_found_at_its_rank_and_local_slot() -> None:
    table = RouteTable(placement({"a": [2, 0], "b": [-1, 1, 3]}, 4), {"a", "b"})
    rank, slot = table.choose(3, ids(0, 1, 2, 3, 0))
    assert rank.tolist() == [0, 1, 0, 1, 0]
    assert slot.tolist() == [1, 1, 0, 2, 1]
    assert table.unserved == {}


def test_experts_of_ranks_that_do_not_serve_go_nowhere() -> None:
    table = RouteTable(placement({"a": [0, 1], "b": [2, 1]}, 3, layers=(3, 4)), {"a"})
    rank, _ = table.choose(4, ids(0, 1, 2))
    assert rank.tolist() == [0, 0, NOWHERE]
    assert table.unserved == {3: (2,), 4: (2,)}


def test_a_replicated_expert_is_divided_so_that_ranks_even_out() -> None:
    table = RouteTable(placement({"a": [0, 1], "b": [1, 2]}, 3), {"a", "b"})
    experts = ids(*[0] * 6, *[1] * 10, *[2] * 2)
    rank, slot = table.choose(3, experts)
    assert np.bincount(rank).tolist() == [9, 9]
    for chosen, at, expert in zip(rank.tolist(), slot.tolist(), experts.tolist(), strict=True):
        assert (chosen, at, expert) in {(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 2)}


def test_single_tokens_alternate_between_replicas_and_repeat_the_same_way() -> None:
    both = placement({"a": [0], "b": [0]}, 1)
    runs = []
    for _ in range(2):
        table = RouteTable(both, {"a", "b"})
        runs.append([int(table.choose(3, ids(0))[0][0]) for _ in range(6)])
    assert runs[0] == runs[1] == [0, 1, 0, 1, 0, 1]


def test_two_replicas_on_one_rank_count_as_one() -> None:
    table = RouteTable(placement({"a": [0, 0], "b": [1]}, 2), {"a", "b"})
    rank, slot = table.choose(3, ids(0, 0, 0))
    assert rank.tolist() == [0, 0, 0]
    assert slot.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("loads", "count", "expected"),
    [
        ([0.0, 0.0], 5, [3, 2]),
        ([4.0, 0.0], 2, [0, 2]),
        ([4.0, 0.0], 10, [3, 7]),
        ([1.0, 5.0, 3.0], 6, [4, 0, 2]),
        ([0.5, 0.25, 7.0], 0, [0, 0, 0]),
        ([2.0], 3, [3]),
    ],
)
def test_even_out(loads: list[float], count: int, expected: list[int]) -> None:
    assert even_out(loads, count) == expected


def check_split(rank: np.ndarray, token: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Every pair that goes somewhere is in one message, of its rank, beside its token's row."""
    shares = split(rank, token, capacity)
    seen = []
    for share in shares:
        assert 0 < share.rows.size <= capacity
        assert (np.diff(share.rows) > 0).all()
        assert set(share.pair_token.tolist()) == set(range(share.rows.size))
        assert (rank[share.chosen] == share.rank).all()
        assert (share.rows[share.pair_token] == token[share.chosen]).all()
        assert share.pair_token.dtype == np.int32
        seen.append(share.chosen)
    together = np.concatenate(seen) if seen else np.zeros(0, np.int64)
    assert sorted(together.tolist()) == np.flatnonzero(rank >= 0).tolist()
    return seen


@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("capacity", [1, 3, 64])
def test_split_sends_each_token_once_to_each_rank(tokens: int, capacity: int) -> None:
    rng = np.random.default_rng(tokens * 100 + capacity)
    token = np.arange(tokens * 4) // 4
    check_split(rng.integers(-1, 3, tokens * 4), token, capacity)
    check_split(np.zeros(tokens * 4, dtype=np.int64), token, capacity)
    some = np.sort(rng.choice(tokens * 4, tokens, replace=False))
    check_split(rng.integers(0, 2, tokens), token[some], capacity)


def test_pairs_that_go_nowhere_are_left_out() -> None:
    assert split(ids(NOWHERE, NOWHERE), ids(0, 0), 8) == []
