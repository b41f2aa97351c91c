from __future__ import annotations

import json
from typing import Any

import pytest

from mesh.messages import Placement
from mesh.placement import fault, replicas, unserved
from mesh.settings import MeshSettings, PlannerSettings, Settings
from moe_model.shipped import checkpoint_dir
from moe_model.spec import load_spec
from planner_svc.formats import FormatError
from planner_svc.initial import initial_placement
from tests.support.planner import policy

SPEC = load_spec(checkpoint_dir(""))
LAYERS, EXPERTS = len(SPEC.moe_layers), SPEC.num_experts


def initial(source: Any, **planner: Any) -> Placement | None:
    text = source if isinstance(source, str) else json.dumps(source)
    settings = Settings(
        mesh=MeshSettings(experts=2),
        planner=PlannerSettings(initial_placement=text, **planner),
    )
    return initial_placement(settings, SPEC, policy(), 7)


def test_a_given_map_lies_on_the_workers_that_the_launcher_starts() -> None:
    rows = [list(reversed(range(EXPERTS)))] * LAYERS
    placement = initial({"physical_to_logical_map": rows})
    assert placement is not None
    assert placement.epoch == 7
    assert placement.ranks == ("expert-0", "expert-1")
    assert placement.slots_per_rank == (EXPERTS // 2, EXPERTS // 2)
    assert placement.physical_to_logical == tuple(map(tuple, rows))


def test_counts_are_planned_from() -> None:
    counts = [[1_000, *[1] * (EXPERTS - 1)]] * LAYERS
    placement = initial({"logical_count": counts}, redundant_slots=1)
    assert placement is not None
    assert not fault(placement)
    assert not unserved(placement, placement.ranks)
    assert sum(placement.slots_per_rank) == EXPERTS + 1
    assert all(len(homes[0]) == 2 for homes in replicas(placement)), "the hot one has two homes"


def test_trivial_means_evenly() -> None:
    assert initial("trivial") is None


def test_a_map_for_another_number_of_workers_is_refused() -> None:
    with pytest.raises(FormatError, match="do not divide among 2 ranks"):
        initial({"physical_to_logical_map": [[*range(EXPERTS), 0]] * LAYERS})
