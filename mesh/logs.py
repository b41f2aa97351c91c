"""Structured logs: one JSON object, or one readable line, an event.

API
    ``configure(settings.logs, role=, id=)`` once, at the start of a process
    ``structlog.get_logger(name)``           anywhere; ``bind`` ids once, then log

Events are dotted and in the past tense (``plan.committed``); values are fields. ``trace`` is the
client's X-Request-Id wherever a line belongs to one request. Prompts are never logged.
Records of the standard library's ``logging`` (uvicorn, asyncio) come out the same way. Where such a
record is an event by its form, ``lane.lost router=%s: %s``, JSON has its values as fields, and what
follows the colon as ``reason``; ``ep_kernels``, which knows no structlog, logs like that.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO, cast

import msgspec
import structlog

from mesh.settings import LogSettings

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure(settings: LogSettings, stream: TextIO | None = None, **process: str) -> None:
    """Send the process's logs to ``stream`` (standard error unless given). ``process``: what says
    whose they are, for lines that no logger bound it to.
    """
    out = sys.stderr if stream is None else stream
    level = _LEVELS[settings.level]
    console = settings.format == "console" or (settings.format == "auto" and out.isatty())
    common: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.StackInfoRenderer(),
        structlog.processors.TimeStamper(fmt="iso", utc=not console),
    ]
    if console:
        # The renderers' defaults print local variables, and with them prompts.
        plain = structlog.dev.plain_traceback
        final: list[Any] = [
            structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=plain)
        ]
    else:
        final = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_json),
        ]
    sink = _Sink(out, threading.Lock())
    structlog.configure(
        processors=[*common, *final],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", sink)),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sink)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_logger_name,
                lambda _logger, _method, event: {**process, **event},
                *([] if console else [_as_fields]),
                *common,
            ],
            pass_foreign_args=not console,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.INFO))


_EVENT = re.compile(
    r"(?P<name>[a-z_]+\.[a-z_]+)(?P<fields>(?: [a-z_]+=[^\s:]+)*)(?P<reason>: %s)?", re.ASCII
)
_FIELD = re.compile(r" ([a-z_]+)=(\S+)")


def _as_fields(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """An event by its form, in parts: those of its format, so that no value is ever taken apart."""
    form, arguments = str(event["_record"].msg), event.pop("positional_args") or ()
    found = _EVENT.fullmatch(form)
    if found is None or not isinstance(arguments, tuple) or form.count("%") != len(arguments):
        return event
    values = iter(arguments)
    fields = {
        name: next(values) if value.startswith("%") else value
        for name, value in _FIELD.findall(found["fields"])
    }
    if found["reason"]:
        fields["reason"] = str(next(values))
    return {**event, **fields, "event": found["name"]}


class _Sink(threading.local):
    """Writes what can be written, line by line: whoever read the log may be gone (a killed
    launcher, a restarted journal), and that must not end, or keep from ending, a service.

    A line may be written in several calls, and lines of several threads and both libraries must not
    mix: each thread has a begun line of its own.
    """

    def __init__(self, stream: TextIO, lock: threading.Lock) -> None:
        self._stream = stream
        self._lock = lock
        self._begun = ""

    def write(self, text: str) -> int:
        lines, end, self._begun = (self._begun + text).rpartition("\n")
        if end:
            with self._lock, contextlib.suppress(OSError):
                self._stream.write(lines + end)
        return len(text)

    def flush(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._stream.flush()


def _json(event: dict[str, Any], **_: Any) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()
