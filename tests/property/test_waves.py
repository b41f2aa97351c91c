"""The way from any layout to any target: always ends, never loses an expert, never overfills."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.placement import EMPTY
from planner_svc.waves import (
    Layout,
    StuckError,
    Wants,
    after,
    missing,
    next_step,
    resized,
    wants_of,
    with_loads,
)

SEEDS = st.integers(0, 2**32 - 1)
"""For what is drawn in plain Python: Hypothesis takes longer over many small values than what is
tested does."""


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, tuple[tuple[int, ...], ...]], Wants, int, int]:
    """A layout and a target over the same ranks, experts, and the most loads in a wave."""
    experts = draw(st.integers(1, 7))
    ranks = [f"e{number}" for number in range(draw(st.integers(1, 4)))]
    layers = draw(st.integers(1, 3))
    chance = random.Random(draw(SEEDS))
    layout: dict[str, list[list[int]]] = {rank: [[] for _ in range(layers)] for rank in ranks}
    wants = {rank: [set() for _ in range(layers)] for rank in ranks}
    for layer in range(layers):
        for expert in range(experts):
            for rank in chance.sample(ranks, chance.randint(1, len(ranks))):
                layout[rank][layer].append(expert)
            for rank in chance.sample(ranks, chance.randint(1, len(ranks))):
                wants[rank][layer].add(expert)
    result: dict[str, tuple[tuple[int, ...], ...]] = {}
    for rank in ranks:
        needed = [len(row) for row in (*layout[rank], *wants[rank])]
        slots = max(1, *needed) + draw(st.sampled_from([0, 0, 1, 1, 2]))
        rows = []
        for row in layout[rank]:
            spare = slots - len(row)
            twins = [chance.randrange(experts) for _ in range(chance.randint(0, spare))]
            slotted = [*row, *twins, *[EMPTY] * (spare - len(twins))]
            chance.shuffle(slotted)
            rows.append(tuple(slotted))
        result[rank] = tuple(rows)
    frozen = {rank: tuple(map(frozenset, rows)) for rank, rows in wants.items()}
    return result, frozen, experts, draw(st.integers(1, 6))


def surplus(layout: Layout, wants: Wants) -> int:
    held = sum(expert != EMPTY for slots in layout.values() for row in slots for expert in row)
    return held - (sum(len(e) for rows in wants.values() for e in rows) - missing(layout, wants))


@settings(max_examples=400, deadline=None)
@given(problem=problems(), seed=SEEDS)
def test_every_move_ends_at_its_target_through_sound_steps(
    problem: tuple[Layout, Wants, int, int], seed: int
) -> None:
    layout, wants, experts, limit = problem
    chance = random.Random(seed)
    waves, bound = 0, 3 * surplus(layout, wants) + missing(layout, wants)
    while True:
        try:
            step = next_step(layout, wants, limit)
        except StuckError:
            # Only where some rank has no slot beyond what it is to hold.
            assert any(
                len(layout[rank][layer]) == len(row)
                for rank, rows in wants.items()
                for layer, row in enumerate(rows)
            )
            break
        if step is None:
            assert wants_of(layout) == wants
            assert surplus(layout, wants) == 0
            break
        waves += 1
        assert waves <= bound
        assert len(step.loads) <= limit
        for load in step.loads:
            assert layout[load.rank][load.layer][load.slot] == EMPTY
            assert load.expert in wants[load.rank][load.layer]
        # Some loads fail: what is left is sound all the same.
        done = [load for load in step.loads if chance.random() < 0.9]
        bound += len(step.loads) - len(done)
        result = after(layout, done, wants) if step.loads else step.layout
        for layer in range(len(next(iter(layout.values())))):
            copies = Counter(e for slots in result.values() for e in slots[layer])
            assert set(range(experts)) <= copies.keys()
        for rank, slots in result.items():
            for row, old in zip(slots, with_loads(layout, done)[rank], strict=True):
                assert all(new in (EMPTY, was) for new, was in zip(row, old, strict=True)), (
                    "an expert that stays on its rank stays in its slot"
                )
        layout = result


@settings(max_examples=200, deadline=None)
@given(problem=problems())
def test_with_a_spare_slot_on_each_rank_nothing_is_ever_stuck(
    problem: tuple[Layout, Wants, int, int],
) -> None:
    layout, wants, _, limit = problem
    room = {rank: max(len(layout[rank][0]), 1 + max(map(len, wants[rank]))) for rank in layout}
    layout = {rank: resized(slots, room[rank]) for rank, slots in layout.items()}
    waves = 0
    least = sum(len(e) for rows in wants.values() for e in rows)  # loads, if nothing were in place
    while (step := next_step(layout, wants, limit)) is not None:
        waves += 1
        layout = after(layout, step.loads, wants) if step.loads else step.layout
        assert waves <= 3 * least + 20
    assert wants_of(layout) == wants
