"""The expert worker's figures for Prometheus, read from its tallies when a page is asked for."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from expert_svc.bundles import BundleServer
from expert_svc.slots import SlotTable
from expert_svc.worker import Worker
from mesh.metrics import PREFIX

_COUNTERS = {
    "calls": "Grouped FFN calls.",
    "parts": "Parts answered.",
    "tokens": "Tokens computed.",
    "pairs": "(token, expert) pairs computed.",
    "stale": "Parts answered stale.",
}


class ExpertCollector(Collector):
    """Figures of one ``Worker``, its slots and bundles; no label per layer or expert."""

    def __init__(self, worker: Worker, table: SlotTable, bundles: BundleServer) -> None:
        self._worker = worker
        self._table = table
        self._bundles = bundles

    def collect(self) -> Iterable[Metric]:
        tally, table = self._worker.tally, self._table
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}_expert_{name}", text, value=getattr(tally, name))
        yield CounterMetricFamily(
            f"{PREFIX}_expert_corrupt_lanes",
            "Lanes dropped because the router wrote nonsense.",
            value=self._worker.corrupt_lanes,
        )
        seconds = CounterMetricFamily(
            f"{PREFIX}_expert_thread_seconds",
            "Where the compute thread's time went.",
            labels=["activity"],
        )
        python_ns = tally.awake_ns - tally.ffn_ns - tally.signal_ns
        for activity, ns in (
            ("ffn", tally.ffn_ns),
            ("signal", tally.signal_ns),
            ("wait", tally.wait_ns),
            ("python", max(python_ns, 0)),
        ):
            seconds.add_metric([activity], ns / 1e9)
        yield seconds
        yield from self._loading()
        held = sum(expert >= 0 for layer in table.held() for expert in layer)
        yield GaugeMetricFamily(
            f"{PREFIX}_expert_slots_filled", "Slots that hold an expert, all layers.", value=held
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_expert_weights_bytes", "Expert weights held.", value=table.resident_bytes()
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_expert_placement_epoch", "Epoch of the slots held.", value=table.epoch
        )

    def _loading(self) -> Iterable[Metric]:
        tally = self._table.tally
        for name, text, label, values in (
            ("slots_loaded", "Experts brought into memory.", "source", tally.loaded),
            ("loaded_bytes", "Bytes of experts read or received.", "source", tally.loaded_bytes),
            ("load_faults", "Attempts to load an expert that failed.", "kind", tally.faults),
        ):
            family = CounterMetricFamily(f"{PREFIX}_expert_{name}", text, labels=[label])
            for value, count in tuple(values.items()):
                family.add_metric([value], count)
            yield family
        yield CounterMetricFamily(
            f"{PREFIX}_expert_bundle_bytes_sent",
            "Bytes of experts handed out to peers.",
            value=self._bundles.sent_bytes,
        )
