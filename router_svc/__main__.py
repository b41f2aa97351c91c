"""``python -m router_svc``: one router."""

from __future__ import annotations

from mesh.service import run_service
from router_svc.service import main

if __name__ == "__main__":
    run_service("router", main)
