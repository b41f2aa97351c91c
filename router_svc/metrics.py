"""The router's figures for Prometheus, read from the engine's sums when a page is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ep_kernels.triton.device import Device
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mesh.metrics import PREFIX, Buckets
from router_svc.ahead import FAULTS
from router_svc.engine import Engine
from router_svc.profile import LayerTimes

_ACTIVITIES = (
    "plan",
    "attention",
    "gate",
    "shared",
    "head",
    "send",
    "wait",
    "combine",
    "sampling",
    "ahead",
    "python",
)


class RouterCollector(Collector):
    """Figures of the engine that ``engine()`` gives; none before there is one. ``device``: where it
    computes, if not on the CPU.
    """

    def __init__(self, engine: Callable[[], Engine | None], device: Device | None) -> None:
        self._engine = engine
        self._device = device

    def collect(self) -> Iterable[Metric]:
        engine = self._engine()
        if engine is None:
            return
        state, times, tally = engine.state, engine.times, engine.tally
        total = state.kv_blocks_total
        for name, text, gauge in (
            ("num_requests_running", "Sequences that share the steps.", state.running),
            ("num_requests_waiting", "Sequences queued.", state.waiting),
            (
                "kv_cache_usage_perc",
                "Share of KV blocks that sequences hold, 0 to 1.",
                (total - state.kv_blocks_free) / total,
            ),
            ("router_lanes", "Expert workers with an open lane.", state.lanes),
            (
                "router_lane_slots_in_use",
                "Ring slots in use over all lanes.",
                state.lane_slots_in_use,
            ),
            ("router_placement_epoch", "Epoch of the placement routed by.", state.epoch),
        ):
            yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=float(gauge))
        for name, text, count in (
            ("num_preemptions", "Sequences that lost their KV blocks.", state.preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", state.prefix_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", state.prefix_hits),
            ("router_steps", "Engine steps.", times.steps),
            ("router_steps_ahead", "Steps that the device, or C, went through alone.", tally.ahead),
            ("router_tokens", "Tokens computed, prompts and decodes.", times.tokens),
            ("router_lane_messages", "Parts sent to expert workers.", tally.messages),
            ("router_stale_parts", "Parts answered stale and sent again.", tally.stale),
            (
                "router_corrupt_lanes",
                "Lanes dropped because the worker wrote nonsense.",
                engine.corrupt_lanes,
            ),
            ("router_resent_pairs", "(token, expert) pairs sent again.", tally.resent),
        ):
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=float(count))
        for name, text, ns in (
            ("router_lane_copy", "Part of `send`: parts written into lanes.", engine.copy_ns),
            ("router_lane_signal", "Part of `send`: waking workers.", engine.signal_ns),
            (
                "router_group_wait",
                "Part of `attention`, `shared` and `head`: waiting for this router's followers.",
                engine.group_wait_ns,
            ),
            (
                "router_away_idle",
                "Time between dispatch and combine in which no tensor operation ran for it.",
                times.idle_ns,
            ),
        ):
            yield CounterMetricFamily(f"{PREFIX}_{name}_seconds", text, value=ns / 1e9)
        seconds = CounterMetricFamily(
            f"{PREFIX}_router_thread_seconds",
            "Where the compute thread's time in steps went.",
            labels=["activity"],
        )
        for activity in _ACTIVITIES:
            seconds.add_metric([activity], getattr(times, f"{activity}_ns") / 1e9)
        yield seconds
        again = CounterMetricFamily(
            f"{PREFIX}_router_steps_again",
            "Steps that the device, or C, went through alone in vain, and that were run again.",
            labels=["reason"],
        )
        for reason in FAULTS:
            again.add_metric([reason], tally.again.get(reason, 0))
        yield again
        yield from self._layers(times.layers)
        lanes = CounterMetricFamily(
            f"{PREFIX}_router_lane_bytes",
            "Activations and pairs sent to an expert worker, and rows received from it.",
            labels=["peer", "direction"],
        )
        for peer, moved in engine.lane_bytes.items():
            lanes.add_metric([peer, "sent"], moved.sent)
            lanes.add_metric([peer, "received"], moved.received)
        yield lanes
        copied = CounterMetricFamily(
            f"{PREFIX}_router_device_copied_bytes",
            "Rows, ids, weights and tokens copied between the host and the router's device.",
            labels=["direction"],
        )
        for direction in ("up", "down"):
            count = 0 if self._device is None else getattr(self._device.copied, direction)
            copied.add_metric([direction], count)
        yield copied
        for phase, text in (
            ("queue", "From a sequence's arrival here until its first tokens were scheduled."),
            ("prefill", "From a sequence's first tokens being scheduled to its first token."),
            ("decode", "From a sequence's first token to its last."),
        ):
            buckets: Buckets = getattr(engine.phases, phase)
            yield buckets.family(f"request_{phase}_time_seconds", text)

    def _layers(self, times: LayerTimes) -> Iterable[Metric]:
        family = CounterMetricFamily(
            f"{PREFIX}_router_layer_seconds",
            "The part of the compute thread's time that belongs to a group of layers.",
            labels=["layers", "activity"],
        )
        for activity in ("compute", "dispatch", "wait", "combine"):
            for label, ns in zip(times.groups.labels, getattr(times, activity), strict=True):
                family.add_metric([label, activity], ns / 1e9)
        yield family
