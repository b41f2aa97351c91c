"""What the planner keeps on disk, for a planner that is started again.

``plan.json``     the last committed plan, in the state directory: it outlives the mesh
``orders.json``   what administrators ordered at run time, in the run directory, which
                  ``moemesh up`` clears at its start and end, as does the last of the services that
                  were started by themselves: it lives as long as the mesh
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from mesh.messages import Placement
from mesh.rundir import ORDERS
from planner_svc.decide import Orders

PLAN = "plan.json"
T = TypeVar("T")


class StoredPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of the file; the plan means nothing for a mesh with another serving digest."""

    model_digest: str
    placement: Placement


class StoreError(Exception):
    """The file cannot be read or written; the planner goes on without it."""


def read_plan(directory: Path, model_digest: str) -> Placement | None:
    """The plan kept for this model, or None. Raises ``StoreError`` for a file that is damaged."""
    stored = _read(directory / PLAN, StoredPlan)
    return stored.placement if stored and stored.model_digest == model_digest else None


def keep_plan(directory: Path, model_digest: str, placement: Placement) -> None:
    """Replace the plan; makes the directory (mode 0700) if need be. Raises ``StoreError``."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{directory}: {error}") from error
    _keep(directory / PLAN, StoredPlan(model_digest=model_digest, placement=placement))


def read_orders(directory: Path) -> Orders | None:
    """The orders of this mesh; None when no planner has served it yet. Raises ``StoreError``."""
    return _read(directory / ORDERS, Orders)


def keep_orders(directory: Path, orders: Orders) -> None:
    """Replace the orders. Raises ``StoreError``."""
    _keep(directory / ORDERS, orders)


def _read(path: Path, type_: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreError(f"{path}: {error}") from error


def _keep(path: Path, value: msgspec.Struct) -> None:
    """At once, so that a crash leaves the old file or the new one, never half."""
    new = path.with_suffix(".new")
    try:
        new.write_bytes(msgspec.json.encode(value))
        new.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: {error}") from error
