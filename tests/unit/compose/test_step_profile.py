from __future__ import annotations

import pytest

from compose.step_profile import expert_profile, read, router_profile, service_profile

PAGE = """\
# HELP moemesh_router_steps_total Engine steps.
# TYPE moemesh_router_steps_total counter
moemesh_router_steps_total {steps}
# TYPE moemesh_router_thread_seconds_total counter
moemesh_router_thread_seconds_total{{activity="attention"}} {attention}
moemesh_router_thread_seconds_total{{activity="send"}} {send}
moemesh_router_thread_seconds_total{{activity="python"}} {python}
# TYPE moemesh_router_lane_copy_seconds_total counter
moemesh_router_lane_copy_seconds_total {copy}
# TYPE moemesh_router_group_wait_seconds_total counter
moemesh_router_group_wait_seconds_total {group}
# TYPE moemesh_router_away_idle_seconds_total counter
moemesh_router_away_idle_seconds_total {idle}
"""


def test_a_router_step_is_divided_by_kind() -> None:
    before = read(
        PAGE.format(steps=10, attention=1.0, send=1.0, python=0.5, copy=0.1, idle=0.2, group=0.4)
    )
    after = read(
        PAGE.format(steps=20, attention=1.5, send=1.2, python=0.6, copy=0.15, idle=0.3, group=0.5)
    )
    profile = router_profile("router-0", before, after)
    assert profile.steps == 10
    assert profile.ms["compute"] == pytest.approx(40)
    assert profile.ms["wait"] == pytest.approx(10)  # for followers, in what it computes
    assert profile.ms["copy"] == pytest.approx(5)
    assert profile.ms["python"] == pytest.approx(25)  # 10 of its own, 15 of sending
    assert profile.step_ms == pytest.approx(80)
    assert profile.outside_ms == pytest.approx(20)  # python, and idle between dispatch and combine
    assert profile.outside_share == pytest.approx(0.25)


def test_no_more_than_a_step_passes_outside_tensor_operations() -> None:
    nothing = dict.fromkeys(("steps", "attention", "send", "python", "copy", "idle", "group"), 0)
    before = read(PAGE.format(**nothing))
    after = read(PAGE.format(**nothing | {"steps": 1, "send": 0.2, "python": 0.5, "idle": 0.6}))
    profile = router_profile("router-0", before, after)
    assert profile.outside_ms == profile.step_ms == pytest.approx(700)


def test_an_expert_worker_is_divided_per_router_step() -> None:
    before = {"moemesh_expert_thread_seconds_total{ffn}": 1.0, "moemesh_expert_calls_total": 4.0}
    after = {"moemesh_expert_thread_seconds_total{ffn}": 3.0, "moemesh_expert_calls_total": 44.0}
    profile = expert_profile("expert-0", 10, before, after)
    assert profile.ms["compute"] == pytest.approx(200)
    assert profile.steps == 40


def test_a_service_without_tensors_shows_its_cpu_time() -> None:
    name = "moemesh_process_cpu_seconds_total"
    profile = service_profile("gateway-0", 10, {name: 1.0}, {name: 1.2})
    assert profile.ms["python"] == pytest.approx(20)
    assert profile.ms["compute"] == 0
