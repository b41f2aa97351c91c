"""Where the time of a step goes in each process, from two readings of its metrics. Pure.

Every compute thread counts its own time by activity (see ``docs/architecture.md``). Here the
activities are folded into five kinds that all processes share:

* ``compute``: tensor operations of the model;
* ``copy``: activations written into lanes;
* ``signal``: publishing a message and waking its receiver;
* ``wait``: asleep or spinning until a peer has something;
* ``python``: everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec
from prometheus_client.parser import text_string_to_metric_families

KINDS = ("compute", "copy", "signal", "wait", "python")

Reading: TypeAlias = Mapping[str, float]
"""``name`` or ``name{activity}`` -> value, of one metrics page."""

_ROUTER_COMPUTE = ("attention", "gate", "shared", "head", "combine", "sampling")
_ROUTER_SECONDS = "moemesh_router_thread_seconds_total"
_EXPERT_SECONDS = "moemesh_expert_thread_seconds_total"


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds a router step, by kind, for one process."""

    member: str
    steps: float
    """Of the router; grouped FFN calls of an expert worker."""
    tokens: float
    ms: dict[str, float]
    outside_ms: float = 0.0
    """Router: time of a step in which no tensor operation ran on its way, here or in a worker."""

    @property
    def step_ms(self) -> float:
        return sum(self.ms.values())

    @property
    def outside_share(self) -> float:
        """Router: share of a step in which no tensor operation ran on its way, 0 to 1."""
        return self.outside_ms / self.step_ms if self.step_ms else 0.0


def read(page: str) -> dict[str, float]:
    """A Prometheus page; of labels only ``activity`` is kept."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            activity = sample.labels.get("activity")
            name = f"{sample.name}{{{activity}}}" if activity else sample.name
            found[name] = found.get(name, 0.0) + sample.value
    return found


def router_profile(member: str, before: Reading, after: Reading) -> Profile:
    """One router's steps between two readings."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    def seconds(*activities: str) -> float:
        return sum(grown(f"{_ROUTER_SECONDS}{{{activity}}}") for activity in activities)

    steps = max(grown("moemesh_router_steps_total"), 1.0)
    copy = grown("moemesh_router_lane_copy_seconds_total")
    signal = grown("moemesh_router_lane_signal_seconds_total")
    group = grown("moemesh_router_group_wait_seconds_total")
    # Routing, copying, signalling and waiting lie between a dispatch and its combine, where the
    # router notes the time in which neither it nor a worker ran tensor operations. Its own Python
    # is in both where it switches between micro-batches: all of it together is the most.
    between = seconds("python") + grown("moemesh_router_away_idle_seconds_total")
    outside = seconds("plan") + min(between, seconds("python", "send", "wait"))
    totals = {
        "compute": seconds(*_ROUTER_COMPUTE) - group,
        "copy": copy,
        "signal": signal,
        "wait": seconds("wait") + group,
        "python": seconds("plan", "python", "send") - copy - signal,
    }
    return Profile(
        member=member,
        steps=steps,
        tokens=grown("moemesh_router_tokens_total"),
        ms={kind: totals[kind] * 1e3 / steps for kind in KINDS},
        outside_ms=outside * 1e3 / steps,
    )


def expert_profile(member: str, router_steps: float, before: Reading, after: Reading) -> Profile:
    """One expert worker between two readings, per step of the routers it served."""

    def seconds(activity: str) -> float:
        name = f"{_EXPERT_SECONDS}{{{activity}}}"
        return after.get(name, 0.0) - before.get(name, 0.0)

    totals = {
        "compute": seconds("ffn"),
        "copy": 0.0,
        "signal": seconds("signal"),
        "wait": seconds("wait"),
        "python": seconds("python"),
    }
    calls = after.get("moemesh_expert_calls_total", 0.0) - before.get(
        "moemesh_expert_calls_total", 0.0
    )
    tokens = after.get("moemesh_expert_tokens_total", 0.0) - before.get(
        "moemesh_expert_tokens_total", 0.0
    )
    return Profile(
        member=member,
        steps=calls,
        tokens=tokens,
        ms={kind: totals[kind] * 1e3 / router_steps for kind in KINDS},
    )


def service_profile(member: str, router_steps: float, before: Reading, after: Reading) -> Profile:
    """A process without tensors, gateway or planner: its CPU time per step of the routers."""
    name = "moemesh_process_cpu_seconds_total"
    cpu_s = after.get(name, 0.0) - before.get(name, 0.0)
    ms = dict.fromkeys(KINDS, 0.0) | {"python": cpu_s * 1e3 / router_steps}
    return Profile(member=member, steps=0, tokens=0, ms=ms)
