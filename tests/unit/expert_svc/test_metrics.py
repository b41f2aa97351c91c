from __future__ import annotations

from prometheus_client import CollectorRegistry

from expert_svc.metrics import ExpertCollector
from expert_svc.slots import SlotTable
from expert_svc.worker import Worker


class CorruptPlane:
    """Stands where a plane does that has dropped three lanes."""

    corrupt_lanes = 3


def test_dropped_lanes_and_idle_counters_are_shown() -> None:
    table = SlotTable((), 0, lambda _slots: None, lambda _layer, _expert: None)
    registry = CollectorRegistry()
    registry.register(ExpertCollector(Worker(CorruptPlane(), table), table))
    assert registry.get_sample_value("moemesh_expert_corrupt_lanes_total") == 3
    assert registry.get_sample_value("moemesh_expert_parts_total") == 0
