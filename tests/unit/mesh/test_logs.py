from __future__ import annotations

import io
import json
import logging

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
