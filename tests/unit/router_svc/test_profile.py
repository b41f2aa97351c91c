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


def test_an_empty_time_is_covered() -> None:
    assert uncovered_ns(200, 200, []) == uncovered_ns(200, 100, []) == 0


def test_overlapping_micro_batches_are_idle_only_while_nothing_computes_and_once() -> None:
    times = Times()
    times.computed(0, 110, 150)  # the other micro-batch's attention, while the first one is away
    times.was_away(100, 200, [(160, 180)])
    assert times.idle_ns == 40  # 100-110, 150-160, 180-200
    times.computed(0, 210, 230)
    times.was_away(150, 250, [])  # away since 150: until 200 that was told already
    assert times.idle_ns == 40 + 30


def test_python_is_what_is_in_no_other_part() -> None:
    times = Times(step_ns=100, attention_ns=30, shared_ns=10, send_ns=5, wait_ns=20)
    assert times.python_ns == 35
