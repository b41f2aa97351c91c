from __future__ import annotations

from prometheus_client import CollectorRegistry

from mesh.messages import LoadReport, SetMode, SlotsReady
from mesh.metrics import page
from planner_svc.metrics import PlannerCollector
from planner_svc.moves import ModelShape
from tests.support.planner import assigned, beat, coordinator, done, hello, placed


def test_all_figures_are_there_from_the_start_and_follow_what_happens() -> None:
    now = 0.0
    state = coordinator(ModelShape((0, 1), 4), mode="advise")
    registry = CollectorRegistry()
    registry.register(PlannerCollector(state, lambda: now))

    def figures() -> dict[str, float]:
        lines = [line for line in page(registry).decode().splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    before = figures()
    for role, mode in (("mode", "off"), ("mode", "auto")):
        assert before[f'moemesh_planner_{role}{{{role}="{mode}"}}'] == 0
    assert before['moemesh_planner_mode{mode="advise"}'] == 1
    assert before['moemesh_rollout_phase{phase="idle"}'] == 1
    for verdict in ("skipped", "advised", "moving", "moved", "failed"):
        assert before[f'moemesh_plans_total{{verdict="{verdict}"}}'] == 0
    for name in (
        "placement_epoch", "alarms", "plan_seconds_count", "plan_seconds_sum", "mesh_ready",
        "moved_slots_total", "slots_loaded_bytes_total", "rollout_failures_total",
        "slot_faults_total", "load_reports_dropped_total", "routed_tokens_total",
    ):  # fmt: skip
        assert before[f"moemesh_{name}"] == 0, name
    assert before["moemesh_balancedness_ratio"] == 1
    assert before["moemesh_balancedness_worst_ratio"] == 1

    placement = placed(state)
    state.received(b"r0", hello("r0", "router"), now)
    state.received(b"r0", beat("r0", epoch=placement.epoch), now)
    told = {"epoch": placement.epoch, "ranks": placement.ranks, "rank_tokens": ((4, 4), (6, 2))}
    counts = ((2, 2, 2, 2), (2, 2, 2, 2))
    state.received(b"r0", LoadReport(id="r0", incarnation=1, counts=counts, tokens=8, **told), now)
    state.received(b"admin", SetMode(mode="off"), now)
    after = figures()
    # Labels are roles, states, modes, phases and verdicts: the size of the mesh adds no series.
    assert {n for n in after if "planner_members" not in n} == {
        n for n in before if "planner_members" not in n
    }
    assert after['moemesh_planner_mode{mode="off"}'] == 1
    assert after["moemesh_placement_epoch"] == placement.epoch
    assert after["moemesh_mesh_ready"] == 1
    assert after["moemesh_routed_tokens_total"] == 8
    assert after["moemesh_balancedness_ratio"] == (1 + 4 / 6) / 2
    assert after["moemesh_balancedness_worst_ratio"] == 4 / 6


def test_loaded_bytes_are_counted_as_workers_tell() -> None:
    state = coordinator(ModelShape((0,), 2), experts=1, mode="off")
    (command,) = assigned(state.received(b"e0", hello("e0"), 0.0)).values()
    ready: SlotsReady = done("e0", command, loaded=2, loaded_bytes=1_000, seconds=0.5)
    state.received(b"e0", ready, 0.0)
    assert state.loaded_bytes == 1_000
