"""Beats: made only while everything that is watched gets on, and what a health check reads."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog
from structlog.testing import capture_logs
from structlog.typing import FilteringBoundLogger

from mesh.health import (
    FRESH_S,
    Health,
    Report,
    beat_period_s,
    health_path,
    sd_notify,
    verdict,
)


class Thread:
    """A thread as it looks from outside."""

    def __init__(self) -> None:
        self.turns = 0
        self.answers = True

    def wake(self) -> None:
        self.turns += self.answers


@pytest.fixture
def log() -> FilteringBoundLogger:
    return structlog.get_logger()


class Scene:
    def __init__(self, path: Path, log: FilteringBoundLogger) -> None:
        self.now = 100.0
        self.path = path
        self.health = Health(path, log, environ={}, clock=lambda: self.now)

    def look(self) -> bool:
        self.now += 1.0
        return self.health.look()

    def wrong(self, *, alive_only: bool = False) -> str:
        return verdict(self.path, self.now, alive_only=alive_only)


@pytest.fixture
def scene(tmp_path: Path, log: FilteringBoundLogger) -> Scene:
    return Scene(tmp_path / "expert-0.health", log)


def test_an_idle_thread_that_answers_is_alive(scene: Scene) -> None:
    thread = Thread()
    scene.health.watch("compute", lambda: thread.turns, thread.wake)
    assert not scene.look()  # it is woken by this look, and answers
    assert [scene.look() for _ in range(3)] == [True] * 3


def test_a_thread_that_hangs_stops_the_beats(scene: Scene) -> None:
    thread, other = Thread(), Thread()
    scene.health.watch("compute", lambda: thread.turns, thread.wake)
    scene.health.watch("loader", lambda: other.turns, other.wake)
    scene.look()
    assert scene.look()
    thread.answers = False
    scene.look()
    with capture_logs() as logs:
        assert not any(scene.look() for _ in range(30))
    assert [(line["event"], line["thread"]) for line in logs] == [("service.stalled", "compute")]
    assert "no sign of life for 3" in scene.wrong()
    thread.answers = True
    scene.look()
    with capture_logs() as logs:
        assert scene.look()
    assert logs[0]["event"] == "service.gets_on"
    assert "no sign of life" not in scene.wrong()


def test_threads_may_get_on_at_different_times(scene: Scene) -> None:
    slow, fast = Thread(), Thread()
    scene.health.watch("slow", lambda: slow.turns)
    scene.health.watch("fast", lambda: fast.turns)
    fast.turns += 1
    assert not scene.look()
    slow.turns += 1
    assert scene.look()  # both have moved since the last beat


def test_a_thread_without_anything_to_do_is_not_waited_for(scene: Scene) -> None:
    scene.health.watch("loader", lambda: None)
    assert scene.look()


def test_the_check_tells_readiness_from_life(scene: Scene) -> None:
    assert "the service does not run" in scene.wrong()
    scene.look()
    assert scene.wrong() == "starting"
    assert scene.wrong(alive_only=True) == ""
    scene.health.ready()
    scene.look()
    assert scene.wrong() == ""
    scene.health.why_not_ready = lambda: "3 experts have no worker"
    scene.look()
    assert scene.wrong() == "3 experts have no worker"
    scene.now += FRESH_S + 1
    assert "no sign of life" in scene.wrong(alive_only=True)


@pytest.mark.parametrize("content", [b"", b"{", b'{"beat": "now"}'])
def test_a_file_that_makes_no_sense_is_no_sign_of_life(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.health"
    path.write_bytes(content)
    assert "cannot be read" in verdict(path, 0.0)


def test_a_beat_of_an_earlier_boot_is_no_sign_of_life(tmp_path: Path) -> None:
    path = tmp_path / "x.health"
    path.write_bytes(msgspec.json.encode(Report(beat=5000.0, reason="")))
    assert "no sign of life" in verdict(path, 10.0)


@pytest.mark.parametrize(
    ("environ", "period_s"),
    [
        ({}, 2.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 1.0),
        ({"WATCHDOG_USEC": "3000000"}, 1.0),
        ({"WATCHDOG_USEC": "60000000"}, 2.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, 2.0),
        ({"WATCHDOG_USEC": "soon"}, 2.0),
    ],
)
def test_beats_are_as_frequent_as_the_watchdog_wants(environ, period_s: float) -> None:
    assert beat_period_s(environ) == period_s


@pytest.fixture
def abstract(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A listener at an abstract address, as systemd's user manager has it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + os.urandom(8).hex())
        listener.settimeout(5.0)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + listener.getsockname()[1:].decode())
        yield listener


def test_systemd_is_reached_at_an_abstract_address(abstract: socket.socket) -> None:
    sd_notify("STATUS=ready")
    assert abstract.recv(100) == b"STATUS=ready"


def test_a_manager_that_is_gone_costs_one_line(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "none"))
    with capture_logs() as logs:
        assert scene.look()
        assert scene.look()
    assert [line["event"] for line in logs] == ["systemd.unreachable"]


def check(directory: Path, *flags: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mesh.health", *flags],
        env=os.environ | {"MOEMESH_MESH_RUN_DIR": str(directory)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_command_answers_by_its_exit_code(tmp_path: Path) -> None:
    assert check(tmp_path, "--id", "router-0")[0] == 1
    path = health_path(tmp_path, "router-0")
    path.write_bytes(msgspec.json.encode(Report(beat=time.monotonic(), reason="loading")))
    assert check(tmp_path, "--id", "router-0") == (1, "loading\n")
    assert check(tmp_path, "--id", "router-0", "--alive") == (0, "alive\n")
    elsewhere = ("--set", f"mesh.run_dir={tmp_path}")
    assert check(tmp_path / "none", *elsewhere, "--id", "router-0") == (1, "loading\n")
    code, said = check(tmp_path, "--set", "mesh.run_dirs=x", "--id", "router-0")
    assert code == 2
    assert "did you mean mesh.run_dir" in said


def test_a_run_directory_that_is_gone_costs_one_line_and_no_service(
    tmp_path: Path, log: FilteringBoundLogger
) -> None:
    scene = Scene(tmp_path / "gone" / "x.health", log)
    with capture_logs() as logs:
        assert scene.look()
        assert scene.look()
    assert [line["event"] for line in logs] == ["health.not_written"]
