"""The last committed plan on disk, for a planner that is started again.

The file lies in the run directory, which ``moemesh up`` clears at its start and end: it outlives
the planner, not the mesh.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from mesh.messages import Placement

FILE_NAME = "plan.json"


class StoredPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of the file; the plan means nothing for a mesh with another serving digest."""

    model_digest: str
    placement: Placement


class StoreError(Exception):
    """The file cannot be read or written; the planner goes on without it."""


def read_plan(directory: Path, model_digest: str) -> Placement | None:
    """The plan kept for this model, or None. Raises ``StoreError`` for a file that is damaged."""
    path = directory / FILE_NAME
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=StoredPlan)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreError(f"{path}: {error}") from error
    return stored.placement if stored.model_digest == model_digest else None


def keep_plan(directory: Path, model_digest: str, placement: Placement) -> None:
    """Replace the file at once, so that a crash leaves the old one or the new one, never half.

    Raises ``StoreError``.
    """
    path = directory / FILE_NAME
    plan = StoredPlan(model_digest=model_digest, placement=placement)
    new = path.with_suffix(".new")
    try:
        new.write_bytes(msgspec.json.encode(plan))
        new.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: {error}") from error
