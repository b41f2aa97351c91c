import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.messages import Placement
from mesh.placement_json import PlacementDocument, PlacementJsonError, proposal, sglang_map


@st.composite
def placements(draw):
    """Each layer of a rank serves equally many experts, between spare slots anywhere."""
    experts = draw(st.integers(1, 6))
    serving = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(
        lambda counts: sum(counts) >= experts))  # fmt: skip
    spare = [draw(st.integers(0, 2)) for _ in serving]
    layers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(sorted))
    rows = []
    for _ in layers:
        copies = [draw(st.integers(0, experts - 1)) for _ in range(sum(serving) - experts)]
        row = draw(st.permutations([*range(experts), *copies]))
        slots = []
        for count, empty in zip(serving, spare, strict=True):
            slots += draw(st.permutations(row[:count] + [-1] * empty))
            row = row[count:]
        rows.append(tuple(slots))
    return Placement(
        epoch=3,
        moe_layers=tuple(layers),
        num_experts=experts,
        ranks=tuple(f"expert-{rank}" for rank in range(len(serving))),
        slots_per_rank=tuple(a + b for a, b in zip(serving, spare, strict=True)),
        physical_to_logical=tuple(rows),
    )


def experts_of_ranks(rows, slots):
    """``[layers][ranks]`` the experts that each rank serves, in order."""
    held = []
    for row in rows:
        left, layer = list(row), []
        for count in slots:
            layer.append([expert for expert in left[:count] if expert >= 0])
            left = left[count:]
        held.append(layer)
    return held


@given(placements())
def test_both_formats_ask_for_what_they_were_made_of(placement):
    wanted = experts_of_ranks(placement.physical_to_logical, placement.slots_per_rank)
    for text in (msgspec.json.encode(placement), msgspec.json.encode(sglang_map(placement))):
        document = msgspec.json.decode(text, type=PlacementDocument)
        asked = proposal(document, placement, placement.ranks)
        assert asked.ranks == placement.ranks
        assert experts_of_ranks(asked.physical_to_logical, asked.slots_per_rank) == wanted
        assert all(-1 not in row for row in asked.physical_to_logical)


def test_a_placement_within_a_move_has_no_sglang_form_but_ours():
    placement = Placement(
        epoch=3, moe_layers=(0, 1), num_experts=2, ranks=("a", "b"), slots_per_rank=(2, 1),
        physical_to_logical=((0, 1, 1), (0, -1, 1)),
    )  # fmt: skip
    with pytest.raises(PlacementJsonError, match="wait for the move to end"):
        sglang_map(placement)
    document = msgspec.json.decode(msgspec.json.encode(placement), type=PlacementDocument)
    asked = proposal(document, placement, placement.ranks)
    assert asked.slots_per_rank == (2, 1)
    assert asked.physical_to_logical == placement.physical_to_logical
