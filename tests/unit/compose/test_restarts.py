import pytest
from hypothesis import given
from hypothesis import strategies as st

from compose.restarts import RestartBudget, RestartPolicy, exit_words
from mesh.supervise import ExitCode


def test_at_the_start_back_off_doubles_and_then_the_child_is_given_up():
    budget = RestartBudget(RestartPolicy(max_deaths=5, first_delay_s=1, max_delay_s=3))
    delays = [budget.died(1, now, served=False) for now in (0, 1, 2, 3, 4)]
    assert delays == [1, 2, 3, 3, None]


@pytest.mark.parametrize("code", [1, -9, ExitCode.REFUSED])
def test_a_mesh_that_has_served_starts_a_child_again_for_ever(code):
    budget = RestartBudget(RestartPolicy(max_deaths=3, first_delay_s=1, max_delay_s=3))
    delays = [budget.died(code, now / 100, served=True) for now in range(2000)]
    assert delays == [1, 2] + [3] * 1998


def test_deaths_long_ago_are_forgiven():
    budget = RestartBudget(RestartPolicy(max_deaths=2, window_s=10, first_delay_s=1))
    assert [budget.died(1, now, served=False) for now in (0, 11, 22, 33)] == [1, 1, 1, 1]


@pytest.mark.parametrize("code", [ExitCode.CANNOT_SERVE, ExitCode.ALREADY_RUNNING])
def test_a_bad_configuration_ends_the_start_and_is_rarely_tried_again_later(code):
    policy = RestartPolicy()
    assert RestartBudget(policy).died(code, 0.0, served=False) is None
    assert RestartBudget(policy).died(code, 0.0, served=True) == policy.max_delay_s


@given(st.lists(st.floats(0, 50), max_size=40))
def test_never_more_restarts_at_the_start_in_a_window_than_allowed(gaps):
    policy = RestartPolicy(max_deaths=4, window_s=60)
    budget, now, restarts = RestartBudget(policy), 0.0, []
    for gap in gaps:
        now += gap
        delay = budget.died(-9, now, served=False)
        if delay is not None:
            assert policy.first_delay_s <= delay <= policy.max_delay_s
            restarts.append(now)
    for start in restarts:
        assert sum(start <= at < start + policy.window_s for at in restarts) < policy.max_deaths


def test_exit_words():
    assert exit_words(3) == "exited with code 3"
    assert exit_words(-9) == "was killed by SIGKILL"
