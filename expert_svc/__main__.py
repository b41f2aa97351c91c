"""``python -m expert_svc``: one expert worker."""

from __future__ import annotations

from expert_svc.service import main
from mesh.service import run_service

if __name__ == "__main__":
    run_service("expert", main)
