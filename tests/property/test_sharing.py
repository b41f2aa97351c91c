"""Homes after deaths, shares after joins and drains: nothing lost, nobody overfull, few moves."""

from __future__ import annotations

from collections import Counter

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mesh.placement import EMPTY
from planner_svc.policies.problem import PlanError
from planner_svc.policies.uniform import slots_per_rank
from planner_svc.sharing import repaired, shared
from planner_svc.waves import Layout, missing, wants_of

RANKS = ("e0", "e1", "e2", "e3")


@st.composite
def layouts(draw: st.DrawFn, experts: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Some ranks with any experts, none twice on a rank."""
    ranks = draw(st.lists(st.sampled_from(RANKS), unique=True, min_size=1))
    layers = draw(st.integers(1, 2))
    layout = {}
    for rank in ranks:
        slots = draw(st.integers(0, experts + 1))
        rows = []
        for _ in range(layers):
            held = draw(st.sets(st.integers(0, experts - 1), max_size=slots))
            free = [EMPTY] * (slots - len(held))
            rows.append(tuple(draw(st.permutations([*held, *free]))))
        layout[rank] = tuple(rows)
    return layout


@settings(max_examples=300, deadline=None)
@given(data=st.data(), experts=st.integers(1, 6))
def test_a_repair_finds_a_home_for_every_expert_or_there_is_none(
    data: st.DataObject, experts: int
) -> None:
    layout: Layout = data.draw(layouts(experts))
    layers = len(next(iter(layout.values())))
    room = {
        rank: max(
            data.draw(st.integers(0, experts)),
            *(len(row) - row.count(EMPTY) for row in layout.get(rank, ((),))),
        )
        for rank in data.draw(st.sets(st.sampled_from(RANKS), min_size=1))
    }
    already = {
        (layer, expert): data.draw(st.sampled_from(RANKS))
        for layer in range(layers)
        for expert in data.draw(st.sets(st.integers(0, experts - 1)))
    }
    try:
        wants = repaired(layout, layout, room, experts, layers, last={"e1": 3}, already=already)
    except PlanError:
        # Fewer slots than experts, as replicas give way.
        others = [slots for rank, slots in layout.items() if rank not in room]
        homeless = [
            set(range(experts)).difference(*(slots[layer] for slots in others))
            for layer in range(layers)
        ]
        assert any(sum(room.values()) < len(few) for few in homeless)
        return
    before = wants_of(layout)
    for layer in range(layers):
        copies = Counter(expert for rows in wants.values() for expert in rows[layer])
        assert copies.keys() == set(range(experts))
        for rank, rows in wants.items():
            held = before[rank][layer] if rank in before else frozenset()
            gained, given_up = rows[layer] - held, held - rows[layer]
            if rank not in room:
                assert not gained | given_up
            else:
                assert len(rows[layer]) <= room[rank]
            for expert in gained:
                assert not any(expert in had[layer] for had in before.values())
                if already.get((layer, expert)) in room and not given_up:
                    home = already[layer, expert]
                    assert home == rank or len(wants[home][layer]) == room[home]
            assert not given_up or len(rows[layer]) == room[rank], "only where nothing was free"


@settings(max_examples=300, deadline=None)
@given(data=st.data(), experts=st.integers(1, 6), redundant=st.integers(0, 4))
def test_shares_are_even_and_whole_and_only_what_is_too_much_moves(
    data: st.DataObject, experts: int, redundant: int
) -> None:
    layout: Layout = data.draw(layouts(experts))
    layers = len(next(iter(layout.values())))
    room = {
        rank: data.draw(st.integers(1, experts))
        for rank in data.draw(st.sets(st.sampled_from(RANKS), min_size=1))
    }
    assume(sum(room.values()) >= experts)
    wants = shared(layout, room, experts, redundant)
    assert wants.keys() == room.keys()
    sizes = sorted(slots_per_rank(experts, redundant, list(room.values())))
    for layer in range(layers):
        copies = Counter(expert for rows in wants.values() for expert in rows[layer])
        assert copies.keys() == set(range(experts))
        assert all(len(rows[layer]) <= room[rank] for rank, rows in wants.items())
        assert sorted(len(rows[layer]) for rows in wants.values()) == sizes
    assert shared(
        {rank: tuple(map(tuple, map(sorted, rows))) for rank, rows in wants.items()},
        room, experts, redundant,
    ) == wants, "shares of shares move nothing"  # fmt: skip
    single = all(
        Counter(e for slots in layout.values() for e in slots[layer] if e != EMPTY)
        == Counter(range(experts))
        for layer in range(layers)
    )
    if single and redundant == 0 and layout.keys() <= room.keys():
        # A move for each expert that is on a rank beyond its share, and no other.
        assert missing(layout, wants) == sum(
            max(0, len(row) - row.count(EMPTY) - len(wants[rank][layer]))
            for rank, slots in layout.items()
            for layer, row in enumerate(slots)
        )
