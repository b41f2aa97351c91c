"""What systemd does with a unit of ``Type=notify``, for services that run without it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_PTRACE_SEIZE, _PTRACE_INTERRUPT = 0x4206, 0x4207
_WALL = 0x40000000


class Unit:
    """A unit file as systemd reads it, for what the tests need of it."""

    def __init__(self, path: Path, instance: str = "") -> None:
        # Keys may come several times (Environment=): what comes later adds to it.
        lines: dict[str, list[str]] = {}
        for line in path.read_text().splitlines():
            key, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                lines.setdefault(key, []).append(value.replace("%i", instance))
        self.argv = shlex.split(lines["ExecStart"][-1])
        self.environ = dict(
            item.split("=", 1)
            for value in lines.get("Environment", [])
            for item in shlex.split(value)
        )
        self.restarts = lines["Restart"][-1]
        self.never_after = set(lines["RestartPreventExitStatus"][-1].split())
        self.watchdog_s = float(lines["WatchdogSec"][-1])


class Supervised:
    """A unit's main process, started by its very ``ExecStart=``, and what it tells its manager."""

    def __init__(
        self, unit: Unit, directory: Path, environ: Mapping[str, str], *, watchdog_s: float
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.watchdog_s = watchdog_s
        self.states: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = directory / "notify"
        path.unlink(missing_ok=True)
        self._socket.bind(str(path))
        self.log = directory / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                unit.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env={"PATH": os.environ["PATH"], **unit.environ, **environ,
                     "NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": str(int(watchdog_s * 1e6))},
            )  # fmt: skip

    def wait_for(self, line: str, deadline_s: float) -> None:
        """Until a state is told that has this line."""
        end = time.monotonic() + deadline_s
        while not any(line in state.split("\n") for state in self.states):
            left_s = end - time.monotonic()
            assert left_s > 0, f"no {line}: {self.states[-3:]}\n{self.tail()}"
            self._receive(left_s)

    def watchdog_expires(self, deadline_s: float) -> bool:
        """Whether the watchdog is not fed for so long as systemd allows, within the deadline."""
        end = time.monotonic() + deadline_s
        fed = time.monotonic()
        self._drain()
        while time.monotonic() < end:
            self._receive(max(0.0, fed + self.watchdog_s - time.monotonic()))
            if self.states and "WATCHDOG=1" in self.states.pop():
                fed = time.monotonic()
            elif time.monotonic() >= fed + self.watchdog_s:
                return True
        return False

    def abort(self) -> None:
        """What systemd does then."""
        self.process.send_signal(signal.SIGABRT)

    def aborted(self) -> str:
        """What the process wrote last."""
        assert self.process.wait(20) == -signal.SIGABRT
        return self.tail()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def end(self, number: signal.Signals = signal.SIGTERM, deadline_s: float = 30.0) -> int:
        if self._socket.fileno() < 0:
            return int(self.process.returncode)
        self._drain()  # a full queue would take nothing more
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(deadline_s)
            while self._receive(0.0):
                pass
            return int(code)
        finally:
            self.process.kill()
            self.process.wait()
            self._socket.close()

    def _drain(self) -> None:
        self._receive(0.0)
        while self.states and self._receive(0.0):
            pass
        self.states.clear()

    def _receive(self, timeout_s: float) -> bool:
        self._socket.settimeout(timeout_s)
        try:
            self.states.append(self._socket.recv(4096).decode())
        except (TimeoutError, BlockingIOError):
            return False
        return True


@contextlib.contextmanager
def frozen_thread(pid: int, name: str) -> Iterator[None]:
    """One thread of a child process stands still, and all others go on: ptrace(2) stops it.

    Must be left by the thread that entered it.
    """
    # What it started has inherited its name.
    thread = min(
        int(task.name)
        for task in Path(f"/proc/{pid}/task").iterdir()
        if (task / "comm").read_text().strip() == name
    )
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    for request in (_PTRACE_SEIZE, _PTRACE_INTERRUPT):
        if ptrace(request, thread, None, None) != 0:
            raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(thread, _WALL)
    try:
        yield
    finally:
        # It must be reaped by its tracer before its process can be.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(thread, _WALL)
