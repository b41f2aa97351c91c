"""The planner's figures for Prometheus, read from the coordinator when a page is asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from mesh.messages import MemberState, Mode, Role
from mesh.metrics import PREFIX
from planner_svc.coordinator import Coordinator
from planner_svc.worth import Verdict

_ROLES = tuple(role for role in get_args(Role) if role != "admin")
_PHASES = ("idle", "loading", "committing", "draining")


class PlannerCollector(Collector):
    """Few series whatever the size of the mesh: no label per member, layer or expert."""

    def __init__(self, coordinator: Coordinator, clock: Callable[[], float]) -> None:
        self._coordinator = coordinator
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        coordinator, now = self._coordinator, self._clock()
        status, tallies = coordinator.status(now), coordinator.tallies
        members = GaugeMetricFamily(
            f"{PREFIX}_planner_members",
            "Members by role and state.",
            labels=["member_role", "state"],
        )
        counts = coordinator.members_by_state()
        for role, state in itertools.product(_ROLES, get_args(MemberState)):
            members.add_metric([role, state], counts[role, state])
        yield members
        yield _one_of(
            "planner_mode", "1 for what the planner does with its plans.", "mode",
            get_args(Mode), status.mode,
        )  # fmt: skip
        yield _one_of(
            "rollout_phase", "1 for what the roll-out under way is doing.", "phase",
            _PHASES, status.phase or "idle",
        )  # fmt: skip
        plans = CounterMetricFamily(
            f"{PREFIX}_plans", "Plans by what became of them.", labels=["verdict"]
        )
        for verdict in get_args(Verdict):
            plans.add_metric([verdict], coordinator.plans_by_verdict[verdict])
        yield plans
        yield SummaryMetricFamily(
            f"{PREFIX}_plan_seconds",
            "Time that making plans took.",
            count_value=tallies.plans,
            sum_value=tallies.plan_s,
        )
        for name, text, value in (
            ("mesh_ready", "1 when the mesh can run a token.", float(status.ready)),
            ("placement_epoch", "Epoch of the placement in force.", status.epoch),
            (
                "balancedness_ratio",
                "Mean over ranks / max over ranks of real tokens in the window, mean over layers.",
                status.balancedness,
            ),
            (
                "balancedness_worst_ratio",
                "The same of the layer with the least.",
                coordinator.worst_layer(now),
            ),
            ("alarms", "What an operator should look at (moemesh status).", len(status.alarms)),
        ):
            yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)
        for name, text, count in (
            ("routed_tokens", "Tokens that routers reported.", status.tokens),
            (
                "load_reports_dropped",
                "Load reports that did not fit the model.",
                tallies.dropped_reports,
            ),
            ("moved_slots", "Slots that were given another expert.", tallies.moved),
            (
                "slots_loaded_bytes",
                "Weights of experts that workers have loaded.",
                coordinator.loaded_bytes,
            ),
            ("rollout_failures", "Waves of moves that failed.", tallies.failures),
            ("slot_faults", "Slots that could not be filled.", tallies.faults),
        ):
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=count)


def _one_of(name: str, text: str, label: str, values: Iterable[str], now: str) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=[label])
    for value in values:
        family.add_metric([value], float(value == now))
    return family
