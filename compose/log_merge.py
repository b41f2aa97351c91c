"""The logs of a mesh's processes as one, by time.

``LogReader`` reads what ``LogFile`` wrote; ``Filter`` says which lines are wanted. A line that is
no event (what a library or a dying interpreter wrote) stands where the one before it stood.
"""

from __future__ import annotations

import heapq
import io
import os
import re
from collections.abc import Collection, Iterator
from datetime import datetime
from operator import attrgetter
from pathlib import Path

import msgspec

from compose.log_file import event_of

LEVELS = ("debug", "info", "warning", "error", "critical")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CONSOLE = re.compile(r"(?P<at>\d{4}-\d\d-\d\dT\S+) \[(?P<level>\w+) *\]")
_MOST_READ_BYTES = 8 * 1024 * 1024
"""Of one file at a time, while following."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a process's log. ``at``: seconds since the epoch. ``level``: empty for a line
    that is no event.
    """

    member: str
    at: float
    level: str
    text: str
    names: tuple[str, ...] = ()
    """The request that it belongs to: the client's id, and its name in the process."""


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """``request``: a client's X-Request-Id, or the id in an answer. ``level``: the least."""

    request: str = ""
    level: str = "debug"

    def wants(self, line: Line) -> bool:
        if self.request and not self._is_of_request(line):
            return False
        return not line.level or LEVELS.index(line.level) >= LEVELS.index(self.level)

    def _is_of_request(self, line: Line) -> bool:
        # A router knows an answer's sequences by its id with a number after it.
        if any(name == self.request or name.startswith(f"{self.request}-") for name in line.names):
            return True
        return not line.names and self.request in line.text


class LogReader:
    """The logs in ``directory``, of all processes or of ``members``.

    ``history`` first, then ``news`` as often as wanted. Close it at the end.
    """

    def __init__(self, directory: Path, members: Collection[str] = ()) -> None:
        self._directory = directory
        self._members = members
        self._open: dict[str, _Follower] = {}

    def history(self) -> Iterator[Line]:
        """All lines so far, by time; those of a file are taken to be in order."""
        for member in self._present():
            self._open[member] = _Follower(self._directory / f"{member}.log", member)
        yield from heapq.merge(
            *(follower.lines() for follower in self._open.values()), key=attrgetter("at")
        )

    def news(self) -> list[Line]:
        """What has been written since, by time; also of processes that came since."""
        for member in self._present():
            if member not in self._open:
                self._open[member] = _Follower(self._directory / f"{member}.log", member)
        found = [line for follower in self._open.values() for line in follower.lines()]
        return sorted(found, key=attrgetter("at"))

    def close(self) -> None:
        for follower in self._open.values():
            follower.close()

    def _present(self) -> list[str]:
        there = sorted(path.stem for path in self._directory.glob("*.log"))
        return [member for member in there if not self._members or member in self._members]


class _Follower:
    """One process's log, also when its file is put aside for a new one."""

    def __init__(self, path: Path, member: str) -> None:
        self._path = path
        self._member = member
        self._at = 0.0
        self._rest = b""
        self._older = path.with_name(path.name + ".1")
        self._file: io.BufferedReader | None = None

    def lines(self) -> Iterator[Line]:
        """Whole lines that were not read yet."""
        if self._file is None:
            if self._older.exists():
                with self._older.open("rb") as older:
                    yield from self._parsed(older)
            self._file = self._path.open("rb")
        yield from self._parsed(self._file)
        if self._was_replaced():
            yield from self._parsed(self._file)  # what came before it was
            self._file.close()
            self._file = self._path.open("rb")
            yield from self._parsed(self._file)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _was_replaced(self) -> bool:
        assert self._file is not None
        try:
            return self._path.stat().st_ino != _inode(self._file)
        except FileNotFoundError:  # between the two, or for good
            return False

    def _parsed(self, file: io.BufferedReader) -> Iterator[Line]:
        while block := file.read(_MOST_READ_BYTES):
            *whole, self._rest = (self._rest + block).split(b"\n")
            for raw in whole:
                line = parse(self._member, raw, self._at)
                self._at = line.at
                yield line


def _inode(file: io.BufferedReader) -> int:
    return os.fstat(file.fileno()).st_ino


def parse(member: str, raw: bytes, before: float) -> Line:
    """A line as JSON or the console renderer wrote it; ``before``: the time of the one before."""
    text = raw.decode(errors="replace")
    event = event_of(raw)
    if event is not None:
        names = tuple(
            value for key in ("trace", "request") if isinstance(value := event.get(key), str)
        )
        level, at = str(event.get("level", "")), str(event.get("timestamp", ""))
    else:
        names = ()
        found = _CONSOLE.match(_ANSI.sub("", text))
        level, at = (found["level"], found["at"]) if found else ("", "")
    return Line(
        member=member,
        at=_seconds(at, before),
        level=level if level in LEVELS else "",
        text=text,
        names=names,
    )


def _seconds(timestamp: str, otherwise: float) -> float:
    try:
        return datetime.fromisoformat(timestamp).timestamp()
    except ValueError:
        return otherwise
