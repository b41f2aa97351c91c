from __future__ import annotations

from router_svc.stall import AwakeClock, StallWatch


def test_what_does_not_change_for_longer_than_the_limit_has_stalled() -> None:
    watch = StallWatch(10.0)
    watch.look((1, 5), 100.0)
    watch.look((1, 5), 110.0)
    assert not watch.stalled
    watch.look((1, 5), 110.5)
    assert watch.stalled
    watch.look((1, 6), 111.0)
    assert not watch.stalled


def test_having_nothing_to_do_is_no_stall() -> None:
    watch = StallWatch(10.0)
    for now in (0.0, 50.0, 100.0):
        watch.look(None, now)
        assert not watch.stalled
    watch.look((1, 1), 200.0)
    assert not watch.stalled


def test_time_that_nobody_looked_at_counts_little() -> None:
    now = 100.0
    clock = AwakeClock(lambda: now, 0.5)
    began = clock()
    for _ in range(8):
        now += 0.125
        clock()
    assert clock() - began == 1.0
    now += 60.0  # the machine stood still
    assert clock() - began == 1.5
    assert clock() - began == 1.5
