from __future__ import annotations

import msgspec
import pytest

from mesh import placement as p
from mesh.messages import Placement

SOUND = Placement(
    epoch=1,
    moe_layers=(1, 4),
    num_experts=3,
    ranks=("e0", "e1", "e2"),
    slots_per_rank=(2, 0, 3),
    physical_to_logical=((0, 1, 2, 0, -1), (2, 2, 0, 1, 1)),
)


def test_a_sound_placement_has_no_fault() -> None:
    assert p.fault(SOUND) == ""


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"slots_per_rank": (5,)}, "3 ranks but slot counts for 1"),
        ({"ranks": ("e0", "e0", "e2")}, "named twice"),
        ({"slots_per_rank": (2, -1, 4)}, "fewer than 0"),
        ({"moe_layers": (1,)}, "1 MoE layers but 2 rows"),
        (
            {"physical_to_logical": ((0, 1, 2, 0, -1), (0,))},
            "layer 4 has 1 slots, the ranks have 5",
        ),
        ({"num_experts": 2}, "layer 1 slot 2 holds expert 2, expected -1 to 1"),
        ({"physical_to_logical": ((0, 1, 2, 0, -2), (2, 2, 0, 1, 1))}, "holds expert -2"),
    ],
)
def test_a_fault_is_named(change: dict, fault: str) -> None:
    assert fault in p.fault(msgspec.structs.replace(SOUND, **change))


def test_ranks_hold_consecutive_slots_of_uneven_number() -> None:
    assert p.rank_offsets(SOUND) == (0, 2, 2)
    assert p.local_slots(SOUND, "e0") == ((0, 1), (2, 2))
    assert p.local_slots(SOUND, "e1") == ((), ())
    assert p.local_slots(SOUND, "e2") == ((2, 0, -1), (0, 1, 1))
    with pytest.raises(KeyError):
        p.local_slots(SOUND, "e9")


def test_every_replica_is_found_once() -> None:
    assert p.replicas(SOUND) == (
        (((0, 0), (2, 1)), ((0, 1),), ((2, 0),)),
        (((2, 0),), ((2, 1), (2, 2)), ((0, 0), (0, 1))),
    )


def test_experts_without_a_live_home_are_listed_by_layer() -> None:
    assert p.unserved(SOUND, {"e0", "e2"}) == {}
    assert p.unserved(SOUND, {"e0"}) == {1: (2,), 4: (0, 1)}
    assert p.unserved(SOUND, ()) == {1: (0, 1, 2), 4: (0, 1, 2)}
