"""Whole service processes: flags, signals, exit codes, systemd, and death with the launcher."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

DEADLINE_S = 60.0

PRELUDE = """
import asyncio
from mesh.service import run_service, CannotServe, Context
from mesh.supervise import Supervisor
from mesh.member import RefusedByPlanner
from mesh.links import ServerLink
"""
SERVE = """
async def main(ctx):
    ctx.ready()
    await ctx.stopping.wait()
"""


class Service:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[dict] = []

    def wait_for(self, event: str) -> dict:
        """The log line of an event, waited for."""
        assert self.process.stderr is not None
        for text in self.process.stderr:
            assert text.startswith("{"), text
            self.lines.append(json.loads(text))
            if self.lines[-1]["event"] == event:
                return self.lines[-1]
        raise AssertionError(f"{event} was not logged: {self.lines}")

    def end(self) -> tuple[int, str]:
        """Exit code, and what it wrote to standard error since."""
        _, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    started: list[subprocess.Popen[str]] = []

    def starter(main: str = SERVE, *flags: str, role: str = "router", **env: str) -> Service:
        code = f"{PRELUDE}\n{main}\nrun_service({role!r}, main)"
        process = subprocess.Popen(
            [sys.executable, "-c", code, "--set", f"mesh.run_dir={tmp_path}/run", *flags],
            stderr=subprocess.PIPE, text=True, env={**os.environ, **env},
        )  # fmt: skip
        started.append(process)
        return Service(process)

    yield starter
    for process in started:
        process.kill()
        process.communicate()


def test_a_service_serves_until_it_is_told_to_stop(start, tmp_path: Path) -> None:
    service = start(SERVE, "--id", "router-7")
    began = service.wait_for("service.started")
    assert (began["id"], began["role"], began["pid"]) == (
        "router-7", "router", service.process.pid,
    )  # fmt: skip
    service.wait_for("service.ready")
    assert (tmp_path / "run" / "router-7.pid").read_text() == f"{service.process.pid}\n"
    service.process.send_signal(signal.SIGTERM)
    service.wait_for("service.stopped")
    assert service.end()[0] == 0
    assert list((tmp_path / "run").iterdir()) == []


def test_metrics_are_served_where_the_log_says(start) -> None:
    service = start()
    url = service.wait_for("service.started")["metrics"]
    host, port = url.removeprefix("http://").removesuffix("/metrics").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as link:
        link.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert link.recv(15) == b"HTTP/1.1 200 OK"
    service.process.send_signal(signal.SIGINT)
    assert service.end()[0] == 0


@pytest.mark.parametrize(
    ("main", "code", "event"),
    [
        ("async def main(ctx): raise CannotServe('no model')", 2, "service.cannot_serve"),
        ("async def main(ctx): raise RefusedByPlanner('zombie')", 3, "service.cannot_serve"),
        ("async def main(ctx): raise ValueError('bug')", 1, "service.crashed"),
        (
            "async def main(ctx): ServerLink(ctx.net, 'ipc:///none/x', receives=int)",
            2, "service.cannot_serve",
        ),
        (
            ("async def main(ctx):\n"
            "  async def crash(): raise ValueError('bug')\n"
            "  async with Supervisor(ctx.log) as actors:\n"
            "    actors.start('faulty', crash)\n"
            "    await ctx.stopping.wait()"),
            1, "actor.crashed",
        ),
    ],
)  # fmt: skip
def test_the_exit_code_says_what_kind_of_end_it_was(
    start, main: str, code: int, event: str
) -> None:
    service = start(main)
    line = service.wait_for(event)
    assert ("exception" in line) == (code == 1)
    assert service.end()[0] == code


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--set", "router.threads=0"), "router.threads = 0 (flag --set router.threads)"),
        (("--set", "router.thread=1"), "did you mean router.threads?"),
        (("--set", "novalue"), "expected SECTION.KEY=VALUE"),
        (("--config", "/none.toml"), "/none.toml (file /none.toml): cannot be read"),
        (("--id", "../x"), "expected 1 to 40 letters"),
    ],
)
def test_bad_flags_are_answered_in_words_and_code_2(start, flags, message: str) -> None:
    code, err = start(SERVE, *flags).end()
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_an_id_runs_once(start) -> None:
    first = start()
    first.wait_for("service.ready")
    code, err = start().end()
    assert code == 4
    assert f"router-0 already runs in {Path(err.split(' in ')[1].split(' (')[0])}" in err
    assert f"(pid {first.process.pid})" in err


def test_a_second_signal_ends_a_service_that_does_not_stop(start) -> None:
    service = start("async def main(ctx):\n  ctx.ready()\n  await asyncio.Event().wait()")
    service.wait_for("service.ready")
    service.process.send_signal(signal.SIGINT)
    service.wait_for("service.stopping")
    assert service.process.poll() is None
    service.process.send_signal(signal.SIGINT)
    service.wait_for("service.stop_forced")
    assert service.end()[0] == 1


DRAIN = """
async def main(ctx):
    async def drained():
        ctx.log.info("draining")
        await asyncio.Event().wait()
    ctx.ready()
    await ctx.stopping.wait()
    await ctx.until_drained({drained})
"""


@pytest.mark.parametrize(
    ("limit_s", "drained", "signals", "outcome"),
    [
        (1000, "asyncio.sleep(0)", [signal.SIGTERM], "service.drained"),
        (0.1, "drained()", [signal.SIGTERM], "service.not_drained"),
        (1000, "drained()", [signal.SIGTERM, signal.SIGINT], "service.stopped"),
        (1000, "drained()", [signal.SIGTERM, signal.SIGTERM], "service.stopped"),
        (1000, "drained()", [signal.SIGINT], "service.stopped"),
    ],
)
def test_sigterm_lets_a_service_drain_within_its_time_and_sigint_does_not(
    start, limit_s: float, drained: str, signals: list[signal.Signals], outcome: str
) -> None:
    code = "import asyncio\n" + DRAIN.format(drained=drained)
    service = start(code, "--set", f"mesh.drain_timeout_s={limit_s}")
    service.wait_for("service.ready")
    service.process.send_signal(signals[0])
    if len(signals) > 1:
        service.wait_for("draining")
        service.process.send_signal(signals[1])
    service.wait_for(outcome)
    assert service.end()[0] == 0


@pytest.mark.parametrize(
    "thread",
    [
        "threading.Thread(target=threading.Event().wait).start()",
        "asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)",
    ],
    ids=["its-own", "the-loops"],
)
def test_a_service_that_crashed_does_not_hang_on_its_threads(start, thread: str) -> None:
    service = start(
        "import asyncio, threading, mesh.service\n"
        "mesh.service.KILL_GRACE_S = 0.1\n"
        "async def main(ctx):\n"
        f"  {thread}\n"
        "  raise ValueError('bug')"
    )
    service.wait_for("service.started")
    assert service.end()[0] == 1


def test_systemd_is_told_of_readiness_and_stopping(start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(DEADLINE_S)
        service = start(NOTIFY_SOCKET=str(tmp_path / "notify"))
        seen = told(notify, "READY=1\nSTATUS=ready")
        assert all("EXTEND_TIMEOUT_USEC=90000000" in state for state in seen[:-1])
        assert "STATUS=starting" in seen[0]
        told(notify, "WATCHDOG=1\nSTATUS=ready\nREADY=1")
        service.process.send_signal(signal.SIGTERM)
        told(notify, "STOPPING=1\nSTATUS=stopping")
        assert service.end()[0] == 0


def told(notify: socket.socket, state: str) -> list[str]:
    """What is told until ``state`` is."""
    seen = []
    while state not in seen:
        seen.append(notify.recv(4096).decode())
    return seen


def test_a_service_may_open_as_many_files_as_the_hard_limit_admits(start) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    service = start("async def main(ctx):\n  ctx.ready()\n  await ctx.stopping.wait()")
    service.wait_for("service.ready")
    assert resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE) == (most, most)


LAUNCHER = """
import os, subprocess, sys, time
child = subprocess.Popen([*sys.argv[1:], "--parent-pid", str(os.getpid())])
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_service_dies_with_its_launcher(tmp_path: Path) -> None:
    code = f"{PRELUDE}\n{SERVE}\nrun_service('router', main)"
    launcher = subprocess.Popen(
        [
            sys.executable, "-c", LAUNCHER,
            sys.executable, "-c", code, "--set", f"mesh.run_dir={tmp_path}/run",
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert launcher.stdout is not None
    assert launcher.stderr is not None
    child = psutil.Process(int(launcher.stdout.readline()))
    try:
        service = Service(launcher)
        service.wait_for("service.ready")
        launcher.send_signal(signal.SIGKILL)
        service.wait_for("service.stopped")  # the child holds the same standard error
    finally:
        launcher.kill()
        psutil.wait_procs([child], timeout=DEADLINE_S)
        launcher.communicate()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_launcher_that_is_gone_already_stops_the_service_before_it_starts(start) -> None:
    service = start(SERVE, "--parent-pid", "1" if os.getpid() != 1 else "2")
    assert service.end() == (0, "")
