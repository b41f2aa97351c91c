from __future__ import annotations

import torch
from ep_kernels.routing import Counts

from mesh.messages import Placement
from router_svc.routing import RouteTable, no_routes


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


def table(placed: Placement, serving, coming=(), before=None) -> RouteTable:
    return RouteTable(
        placed,
        serving,
        coming,
        counts=Counts(len(placed.moe_layers), placed.num_experts),
        capacity_tokens=64,
        choice="water-fill",
        before=before,
    )


def choices(routes: RouteTable, layer: int, *experts: int) -> list[tuple[str, int] | None]:
    """Rank and slot of single-expert tokens, None for those that go nowhere."""
    ids = torch.tensor(experts, dtype=torch.int32)[:, None]
    found: list[tuple[str, int] | None] = [None] * len(experts)
    messages, _ = routes.route(layer, ids, torch.ones(ids.shape))
    for message in messages:
        for pair, slot in zip(message.pairs, message.block.pair_slot, strict=True):
            found[pair] = (routes.ranks[message.rank], slot)
    return found


def test_each_expert_is_found_at_its_rank_and_local_slot() -> None:
    routes = table(placement({"a": [2, 0], "b": [-1, 1, 3]}, 4), {"a", "b"})
    assert choices(routes, 3, 0, 1, 2, 3, 0) == [
        ("a", 1),
        ("b", 1),
        ("a", 0),
        ("b", 2),
        ("a", 1),
    ]
    assert routes.unserved == {}


def test_experts_of_ranks_that_do_not_serve_go_nowhere() -> None:
    routes = table(placement({"a": [0, 1], "b": [2, 1]}, 3, layers=(3, 4)), {"a"})
    assert choices(routes, 4, 0, 1, 2) == [("a", 0), ("a", 1), None]
    assert routes.unserved == {3: (2,), 4: (2,)}


def test_before_a_placement_everything_goes_nowhere() -> None:
    routes = no_routes((3, 5), Counts(2, 2), 64)
    assert choices(routes, 5, 1, 0) == [None, None]
    assert routes.unserved == {3: (0, 1), 5: (0, 1)}


def test_experts_of_ranks_that_are_about_to_serve_will_be_served() -> None:
    routes = table(placement({"a": [0], "b": [1, 2], "c": [2]}, 4), {"a"}, {"b"})
    assert routes.unserved == {3: (1, 2, 3)}
    assert routes.will_serve(3, (1, 2))
    assert not routes.will_serve(3, (1, 3))


def test_two_replicas_on_one_rank_count_as_one() -> None:
    routes = table(placement({"a": [0, 0], "b": [1]}, 2), {"a", "b"})
    assert choices(routes, 3, 0, 0, 0) == [("a", 0)] * 3


def test_what_ranks_were_sent_counts_on_under_the_next_placement() -> None:
    before = table(placement({"a": [0], "b": [1]}, 2), {"a", "b"})
    choices(before, 3, 0, 0, 0, 1)
    after = table(placement({"c": [0], "b": [1, 0], "a": [0, 1]}, 2), {"a", "b"}, before=before)
    assert [choices(after, 3, 0)[0][0] for _ in range(4)] == ["b", "b", "b", "a"]
