from __future__ import annotations

from types import SimpleNamespace

from prometheus_client import CollectorRegistry

from expert_svc.metrics import ExpertCollector
from expert_svc.slots import SlotTable
from expert_svc.worker import Worker
from tests.support.experts import Reads, apply, new_table


class CorruptPlane:
    """Stands where a plane does that has dropped three lanes."""

    corrupt_lanes = 3


def test_dropped_lanes_and_idle_counters_are_shown() -> None:
    table = SlotTable((), 0, lambda _slots: None, lambda _layer, _expert: None)
    registry = CollectorRegistry()
    bundles = SimpleNamespace(sent_bytes=7)
    registry.register(ExpertCollector(Worker(CorruptPlane(), table), table, bundles))
    assert registry.get_sample_value("moemesh_expert_corrupt_lanes_total") == 3
    assert registry.get_sample_value("moemesh_expert_parts_total") == 0


def test_loads_are_counted_by_source_and_faults_by_kind() -> None:
    read = Reads()
    read.broken[1, 3] = OSError("input/output error")
    table = new_table(read)
    apply(table, [0, 3], [1])
    registry = CollectorRegistry()
    bundles = SimpleNamespace(sent_bytes=7)
    registry.register(ExpertCollector(Worker(CorruptPlane(), table), table, bundles))
    value = registry.get_sample_value
    assert value("moemesh_expert_slots_loaded_total", {"source": "checkpoint"}) == 2
    assert value("moemesh_expert_loaded_bytes_total", {"source": "checkpoint"}) == 2 * 1536
    assert value("moemesh_expert_load_faults_total", {"kind": "unreadable"}) == 1
    assert value("moemesh_expert_bundle_bytes_sent_total") == 7
    assert value("moemesh_expert_slots", {"state": "filled"}) == 2
    assert value("moemesh_expert_slots", {"state": "loading"}) == 0
    assert value("moemesh_expert_slots", {"state": "empty"}) == 1
    assert value("moemesh_expert_weights_bytes") == 2 * 1536
