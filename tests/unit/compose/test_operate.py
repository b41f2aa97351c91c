"""Operators find every event that wants their attention in docs/operate.md."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
SERVICES = ("gateway", "router_svc", "expert_svc", "planner_svc", "mesh")
LOGGED = re.compile(r"\.(?:warning|error|exception)\(\s*\"([a-z_]+\.[a-z_]+)\"")


def test_every_warning_and_error_is_explained() -> None:
    said = (ROOT / "docs" / "operate.md").read_text()
    events = {
        event
        for service in SERVICES
        for path in (ROOT / service).rglob("*.py")
        for event in LOGGED.findall(path.read_text())
    }
    assert len(events) > 30
    assert not {event for event in events if f"`{event}`" not in said}
