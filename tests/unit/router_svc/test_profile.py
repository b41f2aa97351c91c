from __future__ import annotations

import pytest

from router_svc.profile import Times, uncovered_ns


@pytest.mark.parametrize(("spans", "uncovered"), [
    ([], 100),
    ([(0, 200)], 0),
    ([(120, 130)], 90),
    ([(110, 150), (140, 160)], 50),
    ([(140, 160), (110, 150)], 50),
    ([(0, 120), (180, 300)], 60),
    ([(0, 50), (300, 400)], 100),
    ([(110, 180), (120, 130)], 30),
])  # fmt: skip
def test_time_that_no_span_covers(spans: list[tuple[int, int]], uncovered: int) -> None:
    assert uncovered_ns(100, 200, spans) == uncovered


def test_python_is_what_is_in_no_other_part() -> None:
    times = Times(step_ns=100, attention_ns=30, shared_ns=10, send_ns=5, wait_ns=20)
    assert times.python_ns == 35
