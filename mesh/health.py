"""Whether a service gets on and is ready, told to systemd and to whoever looks after containers.

API
    ``Health(path, log)``                  one per process; ``run_service`` makes and runs it
    ``health.watch(name, count, wake)``    a thread that must get on for the service to be alive
    ``health.why_not_ready``               asked at each beat; set it to what the service knows
    ``sd_notify(state)``                   systemd's notify protocol
    ``python -m mesh.health --id ID``      a container's health check: exit code 0 or 1, and why;
                                           flags as a service's

A *beat* is made by the event loop, and only when every watched thread has moved since the one
before: a thread without work is woken to show that it answers. So neither a loop nor a thread that
hangs leaves a service that looks alive. A beat feeds systemd's watchdog and is written to
``RUN_DIR/ID.health``; until the service is ready, and while it stops, it also asks systemd for more
time. So weights may load, and streams may end, for as long as they get on.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mesh.config import ConfigError, assignment, load
from mesh.rundir import RunDirError, run_dir

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_PERIOD_S = 2.0
_BEATS_PER_WATCHDOG = 3
"""How many beats fit into the time after which systemd gives a service up."""
_MORE_TIME_US = 90_000_000
"""Asked for with each beat before a service is ready and while it stops."""
_STALLED_S = 20.0
FRESH_S = 15.0
"""A beat that is older does not count as a sign of life: several steps of a slow machine."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What ``RUN_DIR/ID.health`` holds."""

    beat: float
    """``time.monotonic()`` of the newest beat, the same for all processes of a machine."""
    reason: str
    """Why the service is not ready, in words; empty when it is."""


class _Watched:
    def __init__(
        self, name: str, count: Callable[[], Hashable], wake: Callable[[], None] | None
    ) -> None:
        self.name = name
        self.count = count
        self.wake = wake
        self.seen: Hashable = count()


class Health:
    """See the module's docstring. Everything on the event loop's thread."""

    def __init__(
        self,
        path: Path,
        log: FilteringBoundLogger,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.why_not_ready: Callable[[], str] = self._own_reason
        self.period_s = beat_period_s(environ)
        self._path = path
        self._log = log
        self._clock = clock
        self._watched: list[_Watched] = []
        self._beat_s = clock()
        self._ready = False
        self._stopping = False
        self._stalled = False
        self._unreachable = False
        self._unwritten = False

    def watch(
        self, name: str, count: Callable[[], Hashable], wake: Callable[[], None] | None = None
    ) -> None:
        """``count`` must change from one beat to the next; None: it has nothing to get on with.
        ``wake`` makes it do so when it has no work.
        """
        self._watched.append(_Watched(name, count, wake))

    def ready(self) -> None:
        """The service does its work from now on."""
        self._ready = True
        self._notify("READY=1\nSTATUS=ready")

    def stopping(self) -> None:
        """The service leaves."""
        self._stopping = True
        self._notify("STOPPING=1\nSTATUS=stopping")

    async def run(self) -> None:
        """Beat until cancelled; the file goes with it."""
        try:
            while True:
                self.look()
                await asyncio.sleep(self.period_s)
        finally:
            self._path.unlink(missing_ok=True)

    def look(self) -> bool:
        """Make a beat if everything gets on; returns whether it did."""
        now = self._clock()
        stuck = self._stuck()
        if stuck:
            if not self._stalled and now - self._beat_s > _STALLED_S:
                self._stalled = True
                self._log.error(
                    "service.stalled", thread=stuck, seconds=round(now - self._beat_s, 1)
                )
            return False
        if self._stalled:
            self._log.warning("service.gets_on", seconds=round(now - self._beat_s, 1))
        self._stalled = False
        self._beat_s = now
        reason = self.why_not_ready()
        self._write(Report(beat=now, reason=reason))
        words = ["WATCHDOG=1", "STATUS=" + (" ".join(reason.split()) or "ready")]
        # What was said before is said again, since a manager whose queue is full takes nothing.
        if self._stopping:
            words.append("STOPPING=1")
        elif self._ready:
            words.append("READY=1")
        if self._stopping or not self._ready:
            words.append(f"EXTEND_TIMEOUT_USEC={_MORE_TIME_US}")
        self._notify("\n".join(words))
        return True

    def _stuck(self) -> str:
        """Which thread has not moved since the last beat; all are woken."""
        stuck = ""
        moved = []
        for one in self._watched:
            count = one.count()
            moved.append(count)
            if count is not None and count == one.seen:
                stuck = stuck or one.name
            if one.wake is not None:
                one.wake()
        if not stuck:
            for one, count in zip(self._watched, moved, strict=True):
                one.seen = count
        return stuck

    def _own_reason(self) -> str:
        return "stopping" if self._stopping else "" if self._ready else "starting"

    def _write(self, report: Report) -> None:
        new = self._path.with_name(self._path.name + ".new")
        try:
            new.write_bytes(msgspec.json.encode(report))
            new.replace(self._path)
        except OSError as error:
            # A full disk must not end a service that serves; its health check will say so.
            if not self._unwritten:
                self._log.warning("health.not_written", file=str(self._path), error=str(error))
            self._unwritten = True
        else:
            self._unwritten = False

    def _notify(self, state: str) -> None:
        try:
            sd_notify(state)
        except OSError as error:
            if not self._unreachable:
                self._log.warning("systemd.unreachable", error=str(error))
            self._unreachable = True
        else:
            self._unreachable = False


def sd_notify(state: str) -> None:
    """Tell systemd a state, by its notify protocol; do nothing without systemd. Never waits: raises
    ``OSError`` when it is not taken at once.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address[0] == "@":
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
        link.setblocking(False)
        link.connect(address)
        link.sendall(state.encode())


def beat_period_s(environ: Mapping[str, str]) -> float:
    """Pause between beats: short enough for the watchdog that systemd keeps on this process."""
    limit_us = environ.get("WATCHDOG_USEC", "")
    if not limit_us.isdigit() or environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return _PERIOD_S
    return min(_PERIOD_S, int(limit_us) / 1e6 / _BEATS_PER_WATCHDOG)


def health_path(directory: Path, id: str) -> Path:  # noqa: A002
    return directory / f"{id}.health"


def verdict(path: Path, now: float, *, alive_only: bool = False) -> str:
    """What is wrong with the service whose file this is, in words; empty when nothing is.

    ``now``: ``time.monotonic()``. ``alive_only``: it need not be ready.
    """
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except FileNotFoundError:
        return f"{path} is not there: the service does not run"
    except (OSError, msgspec.DecodeError) as error:
        return f"{path} cannot be read: {error}"
    age_s = now - report.beat
    if not 0 <= age_s <= FRESH_S:
        return f"no sign of life for {age_s:.0f} s; then: {report.reason or 'ready'}"
    return "" if alive_only else report.reason


def main(argv: Sequence[str]) -> int:
    """The health check of one service; prints what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m mesh.health", description="Is a service of this machine's mesh ready?"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of the mesh")
    parser.add_argument("--id", required=True, help="which process of the mesh")
    parser.add_argument(
        "--set",
        type=assignment,
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one setting; may be repeated",
    )
    parser.add_argument(
        "--alive", action="store_true", help="ask only whether it gets on, ready or not"
    )
    flags = parser.parse_args(argv)
    try:
        directory = run_dir(load(flags.config, dict(flags.set), os.environ).settings)
    except (ConfigError, RunDirError) as error:
        print(error, file=sys.stderr)
        return 2
    wrong = verdict(health_path(directory, flags.id), time.monotonic(), alive_only=flags.alive)
    print(wrong or ("alive" if flags.alive else "ready"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
