"""Which checkpoint to serve, and under what name: the configured one, or the model that ships.

Torch-free. Every process of a mesh asks here, so that all agree on an empty ``model.path``.
"""

from __future__ import annotations

from pathlib import Path

from moe_model.errors import MissingFile

SHIPPED_NAME = "moemesh-demo"

_SHIPPED = Path(__file__).parent.parent / "demo" / "model"
"""Beside this package, in a checkout as in an installed wheel."""


def checkpoint_dir(configured: str) -> Path:
    """The directory that ``model.path`` names; for an empty one that of the shipped model.

    Raises ``MissingFile`` when there is no such directory.
    """
    if configured:
        path = Path(configured).expanduser()
        if not path.is_dir():
            raise MissingFile(path, "model.path is to name a checkpoint directory")
        return path.resolve()
    if not _SHIPPED.is_dir():
        raise MissingFile(_SHIPPED, "the model that ships is not installed: set model.path")
    return _SHIPPED


def model_id(configured_name: str, configured_path: str) -> str:
    """The model's id in the API: ``model.name``, else the name of the directory ``model.path``."""
    if configured_name:
        return configured_name
    return checkpoint_dir(configured_path).name if configured_path else SHIPPED_NAME
