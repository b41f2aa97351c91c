"""A child's log on disk, bounded, with its last lines at hand."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

MAX_BYTES = 16 * 1024 * 1024
TAIL_LINES = 12

_NOT_SHOWN = frozenset({"level", "event", "timestamp", "exception", "role", "id", "incarnation"})
_CONSOLE_ERROR = re.compile(r"\[\s*(?:\x1b\[[0-9;]*m)*(?:error|critical)\b")


class LogFile:
    """Appends lines to ``path``; at ``max_bytes`` the file becomes ``path.1`` and starts anew,
    so that a child uses at most twice that.

    A disk that is full costs lines, never the mesh: ``fault`` says what the system said last, and
    is empty once a line could be written again.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.fault = ""
        self._max_bytes = max_bytes
        # No buffer: what could not be written must not be in the way when the file is closed.
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def write(self, line: bytes) -> None:
        """Appends one line, its newline included, if the disk takes it."""
        self._tail.append(line.decode(errors="replace").rstrip())
        try:
            if self._size + len(line) > self._max_bytes and self._size:
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self._file.close()
                self._file = self.path.open("wb", buffering=0)
                self._size = 0
            self._size += self._file.write(line)
            self.fault = ""
        except OSError as error:
            self.fault = error.strerror or str(error)

    def start_tail(self) -> None:
        """Forgets the lines so far: another process writes from here on."""
        self._tail.clear()

    def tail(self) -> tuple[str, ...]:
        """The last lines since ``start_tail``, oldest first, as people read them."""
        return tuple(readable(line) for line in self._tail)

    def close(self) -> None:
        self._file.close()


def error_text(line: bytes) -> str | None:
    """The line in short when it reports an error (JSON or console form), else None."""
    record = event_of(line)
    if record is not None:
        return _short(record) if record.get("level") in {"error", "critical"} else None
    text = line.decode(errors="replace").rstrip()
    return text if _CONSOLE_ERROR.search(text) else None


def readable(line: str) -> str:
    """A JSON line as people read it, its traceback below; any other line as it is."""
    record = event_of(line.encode())
    if record is None:
        return line
    head = f"{record.get('timestamp', '')} {record.get('level', ''):<7} {_short(record)}"
    trace = record.get("exception")
    return f"{head}\n{trace}" if isinstance(trace, str) else head


def event_of(line: bytes) -> dict[str, Any] | None:
    """The event that a JSON line holds, or None for any other line."""
    if not line.startswith(b"{"):
        return None
    try:
        record: Any = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return record if isinstance(record, dict) else None


def _short(record: dict[str, Any]) -> str:
    fields = " ".join(f"{key}={value}" for key, value in record.items() if key not in _NOT_SHOWN)
    return f"{record.get('event', '')} {fields}".strip()
