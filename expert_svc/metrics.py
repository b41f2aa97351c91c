"""The expert worker's figures for Prometheus, read from its tallies when a page is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from ep_kernels.triton.device import Device
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from expert_svc.bundles import BundleServer
from expert_svc.loading import FaultKind
from expert_svc.slots import SlotTable
from expert_svc.worker import ComputeThread
from mesh.metrics import PREFIX
from mesh.placement import EMPTY

_SOURCES = ("peer", "checkpoint")
_COUNTERS = {
    "calls": "Grouped FFN calls.",
    "parts": "Parts answered.",
    "tokens": "Tokens computed.",
    "pairs": "(token, expert) pairs computed.",
    "stale": "Parts answered stale.",
}


class ExpertCollector(Collector):
    """Figures of one worker, its slots and bundles; no label per layer or expert. ``device``: where
    it computes, if not on the CPU.
    """

    def __init__(
        self,
        worker: ComputeThread[Any],
        table: SlotTable[Any],
        bundles: BundleServer,
        device: Device | None = None,
    ) -> None:
        self._device = device
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
        layers = CounterMetricFamily(
            f"{PREFIX}_expert_layer_seconds",
            "The time of `ffn` by group of layers.",
            labels=["layers"],
        )
        for label, ns in zip(self._worker.layers.labels, self._worker.layer_ffn_ns, strict=True):
            layers.add_metric([label], ns / 1e9)
        yield layers
        copied = CounterMetricFamily(
            f"{PREFIX}_expert_device_copied_bytes",
            "Rows and pairs copied between the host and the worker's device.",
            labels=["direction"],
        )
        for direction in ("up", "down"):
            count = 0 if self._device is None else getattr(self._device.copied, direction)
            copied.add_metric([direction], count)
        yield copied
        yield from self._loading()
        yield self._slots()
        yield GaugeMetricFamily(
            f"{PREFIX}_expert_weights_bytes", "Expert weights held.", value=table.resident_bytes()
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_expert_placement_epoch", "Epoch of the slots held.", value=table.epoch
        )

    def _slots(self) -> Metric:
        slots = [expert for layer in self._table.held() for expert in layer]
        filled = sum(expert != EMPTY for expert in slots)
        loading = min(self._table.to_load, len(slots) - filled)
        family = GaugeMetricFamily(
            f"{PREFIX}_expert_slots", "Slots of all layers by state.", labels=["state"]
        )
        family.add_metric(["filled"], filled)
        family.add_metric(["loading"], loading)
        family.add_metric(["empty"], len(slots) - filled - loading)
        return family

    def _loading(self) -> Iterable[Metric]:
        tally = self._table.tally
        for name, text, values in (
            ("slots_loaded", "Experts brought into memory.", tally.loaded),
            ("loaded_bytes", "Bytes of experts read or received.", tally.loaded_bytes),
        ):
            family = CounterMetricFamily(f"{PREFIX}_expert_{name}", text, labels=["source"])
            for source in _SOURCES:
                family.add_metric([source], values[source])
            yield family
        faults = CounterMetricFamily(
            f"{PREFIX}_expert_load_faults",
            "Attempts to load an expert that failed.",
            labels=["kind"],
        )
        for kind in get_args(FaultKind):
            faults.add_metric([kind], tally.faults[kind])
        yield faults
        yield CounterMetricFamily(
            f"{PREFIX}_expert_bundle_bytes_sent",
            "Bytes of experts handed out to peers.",
            value=self._bundles.sent_bytes,
        )
