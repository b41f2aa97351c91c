from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from mesh import logs
from mesh.settings import LogSettings


def test_json_lines_carry_event_level_time_and_bound_ids() -> None:
    out = io.StringIO()
    logs.configure(LogSettings(format="json"), out)
    log = structlog.get_logger("x").bind(id="router-0")
    log.info("plan.committed", epoch=3, trace="req-1", blob=b"\x01")
    log.debug("unseen")
    (line,) = out.getvalue().splitlines()
    record = json.loads(line)
    assert record["event"] == "plan.committed"
    assert record["level"] == "info"
    assert (record["id"], record["epoch"], record["trace"]) == ("router-0", 3, "req-1")
    assert record["timestamp"].endswith("Z")


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_traceback_is_logged_without_local_variables(form: str) -> None:
    out = io.StringIO()
    logs.configure(LogSettings(format=form), out)
    prompt = " ".join(["my", "secret"])
    try:
        raise ValueError(f"bad value of {len(prompt)} letters")
    except ValueError:
        structlog.get_logger("x").exception("actor.crashed", actor="a")
    assert "ValueError: bad value of 9 letters" in out.getvalue()
    assert "test_logs.py" in out.getvalue()
    assert prompt not in out.getvalue()
    if form == "json":
        (line,) = out.getvalue().splitlines()
        assert json.loads(line)["actor"] == "a"


def test_a_value_that_json_cannot_hold_does_not_lose_the_line() -> None:
    out = io.StringIO()
    logs.configure(LogSettings(format="json"), out)
    structlog.get_logger("x").info("odd.value", value=object(), number=float("nan"))
    assert json.loads(out.getvalue())["event"] == "odd.value"


def test_the_console_form_is_readable_without_colours_in_a_file() -> None:
    out = io.StringIO()
    logs.configure(LogSettings(format="console"), out)
    structlog.get_logger("x").info("plan.committed", epoch=3)
    assert "plan.committed" in out.getvalue()
    assert "epoch=3" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_auto_means_json_when_nobody_watches() -> None:
    out = io.StringIO()
    logs.configure(LogSettings(format="auto"), out)
    structlog.get_logger("x").info("plan.committed")
    json.loads(out.getvalue())


class PausingStream(io.StringIO):
    """Lets other threads in after every write."""

    def write(self, text: str) -> int:
        written = super().write(text)
        time.sleep(0)
        return written


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    yield root
    root.handlers[:], level = before
    root.setLevel(level)


EVENTS = [
    (
        ("lane.lost router=%s: %s", "router-0", "it said a=1: %s"),
        {"event": "lane.lost", "router": "router-0", "reason": "it said a=1: %s"},
    ),
    (
        ("lane.opened router=%s incarnation=%d", "router 0", 7),
        {"event": "lane.opened", "router": "router 0", "incarnation": 7},
    ),
    (
        ("lane.refused router=unknown: %s", OSError("gone")),
        {"event": "lane.refused", "router": "unknown", "reason": "gone"},
    ),
    (("lane.watch_failed",), {"event": "lane.watch_failed"}),
    (("slow.callback took %s s", 3), {"event": "slow.callback took 3 s"}),
]


@pytest.mark.parametrize(("arguments", "fields"), EVENTS, ids=lambda value: str(value)[:20])
def test_an_event_of_the_standard_library_has_its_values_as_fields(
    root: logging.Logger, arguments: tuple[Any, ...], fields: dict[str, Any]
) -> None:
    out = io.StringIO()
    logs.configure(LogSettings(format="json"), out, id="expert-0")
    logging.getLogger("ep_kernels.shm.expert").warning(*arguments)
    line = json.loads(out.getvalue())
    assert line.pop("timestamp")
    kept = {"logger": "ep_kernels.shm.expert", "level": "warning", "id": "expert-0"}
    assert line == kept | fields


def test_on_the_console_it_keeps_its_words(root: logging.Logger) -> None:
    out = io.StringIO()
    logs.configure(LogSettings(format="console"), out)
    logging.getLogger("ep_kernels").warning("lane.lost router=%s: %s", "router-0", "it is gone")
    assert "lane.lost router=router-0: it is gone" in out.getvalue()


def test_standard_library_records_come_out_the_same_way() -> None:
    out = io.StringIO()
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    try:
        logs.configure(LogSettings(format="json", level="warning"), out, id="router-0")
        logging.getLogger("asyncio").warning("slow %s", "callback")
        logging.getLogger("asyncio").info("unseen")
        structlog.get_logger("x").info("unseen")
        (line,) = out.getvalue().splitlines()
        record = json.loads(line)
        assert record["event"] == "slow callback"
        assert record["logger"] == "asyncio"
        assert record["id"] == "router-0"
    finally:
        root.handlers[:], level = before
        root.setLevel(level)


def test_lines_of_several_threads_and_both_libraries_do_not_mix(root: logging.Logger) -> None:
    """On a stream that passes every write on at once, as standard error does unbuffered."""
    out = PausingStream()
    logs.configure(LogSettings(format="json"), out)

    def events(log: Any) -> None:
        for number in range(200):
            log.warning("thing.seen at %d", number)

    threads = [
        threading.Thread(target=events, args=(log,))
        for log in (structlog.get_logger("a"), root, structlog.get_logger("b"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    lines = out.getvalue().splitlines()
    assert len(lines) == 600
    assert all(json.loads(line)["event"].startswith("thing.seen") for line in lines)
