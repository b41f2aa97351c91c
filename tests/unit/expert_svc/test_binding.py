from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from expert_svc.binding import Binding, bind, binding
from mesh.cpus import cpus_text
from mesh.service import CannotServe
from tests.support.forked_services import ForkedExpert
from tests.support.threads import allowed_cpus

DEADLINE_S = 60.0
USABLE = os.sched_getaffinity(0)
NO_CPU = 8000
"""Beyond those of any machine that runs tests."""


def test_auto_takes_the_share_if_there_is_one_and_can_do_without() -> None:
    assert binding("auto", "default", frozenset(), {0, 1}) == Binding()
    assert binding("auto", "default", frozenset({1}), {0, 1}) == Binding(frozenset({1}))
    assert binding("auto", "default", frozenset({5}), {0, 1}).may_fail


def test_any_binds_nothing() -> None:
    assert binding("any", "flag", frozenset({1}), {0, 1}) == Binding()


def test_a_list_is_taken_as_it_is_or_refused_with_what_could_be() -> None:
    assert binding("0,2", "flag", frozenset({1}), {0, 1, 2}) == Binding(
        frozenset({0, 2}), may_fail=False
    )
    with pytest.raises(CannotServe) as refused:
        binding("0-3,8", "file m.toml", frozenset(), {0, 1})
    assert str(refused.value) == (
        "expert.cpus = '0-3,8' (file m.toml): expected auto, any, or CPUs that this process may "
        "use: 0-1, not 2-3,8"
    )


def in_a_thread(chosen: Binding) -> tuple[list[dict], list[Exception]]:
    """What ``bind`` logs and raises on a thread of its own."""
    raised: list[Exception] = []

    def body() -> None:
        try:
            bind(chosen, structlog.get_logger())
        except CannotServe as error:
            raised.append(error)

    with capture_logs() as logged:
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
    assert os.sched_getaffinity(0) == USABLE
    return logged, raised


def test_a_share_that_was_taken_away_is_done_without() -> None:
    logged, raised = in_a_thread(Binding(frozenset({NO_CPU})))
    assert not raised
    assert [(line["event"], line["log_level"]) for line in logged] == [
        ("compute.not_bound", "warning"), ("compute.started", "info"),
    ]  # fmt: skip
    assert logged[0]["reason"] == f"CPUs {NO_CPU}: Invalid argument"
    assert (logged[1]["cpus"], logged[1]["bound"]) == (cpus_text(USABLE), False)


def test_chosen_cpus_that_were_taken_away_end_the_worker() -> None:
    _, raised = in_a_thread(Binding(frozenset({NO_CPU}), may_fail=False))
    assert [str(error) for error in raised] == [f"expert.cpus: CPUs {NO_CPU}: Invalid argument"]


class Lone:
    """An expert worker without a mesh; it computes, should anything come."""

    def __init__(self, process: ForkedExpert, log: Path) -> None:
        self._process = process
        self._log = log

    def wait_for(self, *events: str) -> list[dict]:
        """The log lines of these events, the last of which has come."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            text = self._log.read_text() if self._log.exists() else ""
            lines = [
                json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"
            ]
            found = [line for line in lines if line["event"] in events]
            if found and found[-1]["event"] == events[-1]:
                return found
            time.sleep(0.02)
        raise AssertionError(f"{events[-1]} was not logged")

    def threads(self) -> list[tuple[str, str]]:
        return allowed_cpus(self._process.pid)

    def end(self) -> int:
        return self._process.wait(DEADLINE_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Lone]]:
    started: list[ForkedExpert] = []

    def starter(*flags: str) -> Lone:
        log = tmp_path / f"{len(started)}.log"
        process = ForkedExpert(["--set", f"mesh.run_dir={tmp_path}/run", *flags], log)
        started.append(process)
        return Lone(process, log)

    yield starter
    for process in started:
        process.kill()
        process.wait(DEADLINE_S)


@pytest.mark.parametrize("share", [(), ("--cpus", str(min(USABLE)))])
def test_any_leaves_every_thread_where_it_was(start, share: tuple[str, ...]) -> None:
    lone = start("--set", "expert.cpus=any", *share)
    (said,) = lone.wait_for("compute.started")
    assert (said["cpus"], said["bound"]) == (cpus_text(USABLE), False)
    threads = lone.threads()
    assert "compute" in dict(threads)
    assert {cpus for _, cpus in threads} == {cpus_text(USABLE)}


@pytest.mark.parametrize("flags", [("--cpus", "{}"), ("--set", "expert.cpus={}")])
def test_the_compute_thread_and_its_helpers_keep_to_their_cpus_and_no_other_does(
    start, flags: tuple[str, ...]
) -> None:
    one = str(max(USABLE))
    lone = start("--set", "expert.threads=2", *(flag.format(one) for flag in flags))
    (said,) = lone.wait_for("compute.started")
    assert (said["cpus"], said["bound"]) == (one, True)
    end = time.monotonic() + DEADLINE_S
    while [name for name, _ in lone.threads()].count("compute") < 2:
        assert time.monotonic() < end
    threads = lone.threads()
    assert {cpus for name, cpus in threads if name == "compute"} == {one}
    assert {cpus for name, cpus in threads if name != "compute"} == {cpus_text(USABLE)}


def test_a_worker_whose_share_is_gone_goes_on_and_one_whose_choice_is_not_there_does_not(
    start,
) -> None:
    lone = start("--cpus", str(NO_CPU))
    lost, began = lone.wait_for("compute.not_bound", "compute.started")
    assert (lost["level"], began["bound"]) == ("warning", False)
    assert dict(lone.threads())["compute"] == cpus_text(USABLE)
    refused = start("--id", "expert-1", "--set", f"expert.cpus={NO_CPU}")
    (why,) = refused.wait_for("service.cannot_serve")
    assert f"expert.cpus = '{NO_CPU}' (flag --set expert.cpus)" in why["reason"]
    assert refused.end() == 2
