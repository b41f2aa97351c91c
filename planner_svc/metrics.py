"""The planner's figures for Prometheus, read from the coordinator when a page is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mesh.metrics import PREFIX
from planner_svc.coordinator import Coordinator


class PlannerCollector(Collector):
    """Few series whatever the size of the mesh: no label per member, layer or expert."""

    def __init__(self, coordinator: Coordinator, clock: Callable[[], float]) -> None:
        self._coordinator = coordinator
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        coordinator, now = self._coordinator, self._clock()
        status = coordinator.status(now)
        members = GaugeMetricFamily(
            f"{PREFIX}_planner_members", "Members by role and state.", labels=["role", "state"]
        )
        for (role, state), count in sorted(coordinator.members_by_state().items()):
            members.add_metric([role, state], count)
        yield members
        yield GaugeMetricFamily(
            f"{PREFIX}_mesh_ready", "1 when the mesh can run a token.", value=float(status.ready)
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_placement_epoch", "Epoch of the placement in force.", value=status.epoch
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_balancedness_ratio",
            "Mean over ranks / max over ranks of real tokens, mean over MoE layers.",
            value=status.balancedness,
        )
        yield CounterMetricFamily(
            f"{PREFIX}_routed_tokens", "Tokens that routers reported.", value=status.tokens
        )
        yield CounterMetricFamily(
            f"{PREFIX}_load_reports_dropped",
            "Load reports that did not fit the model.",
            value=coordinator.dropped_reports,
        )
