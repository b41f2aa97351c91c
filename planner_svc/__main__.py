"""``python -m planner_svc``: one planner process."""

from __future__ import annotations

from mesh.service import run_service
from planner_svc.service import main

if __name__ == "__main__":
    run_service("planner", main)
