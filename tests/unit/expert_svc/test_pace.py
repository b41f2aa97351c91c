from __future__ import annotations

from expert_svc.pace import Pace


def test_the_first_load_begins_at_once_and_the_next_when_its_bytes_are_paid_for() -> None:
    pace = Pace(100)
    assert pace.delay(5.0) == 0
    pace.loaded(50, 5.0)
    assert pace.delay(5.125) == 0.375
    assert pace.delay(5.5) == 0
    pace.loaded(200, 5.5)
    assert pace.delay(5.5) == 2.0


def test_time_without_loads_buys_no_burst() -> None:
    pace = Pace(100)
    pace.loaded(100, 0.0)
    pace.loaded(100, 60.0)
    assert pace.delay(60.0) == 1.0


def test_loads_that_follow_each_other_early_add_up() -> None:
    pace = Pace(100)
    for _ in range(3):
        pace.loaded(100, 0.0)
    assert pace.delay(0.0) == 3.0


def test_no_limit_is_no_wait() -> None:
    pace = Pace(0)
    pace.loaded(1 << 40, 0.0)
    assert pace.delay(0.0) == 0
