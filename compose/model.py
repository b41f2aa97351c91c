"""The model that a mesh is to serve, looked at before any process starts."""

from __future__ import annotations

from compose.options import UsageError
from mesh.settings import Settings
from moe_model.errors import CheckpointError
from moe_model.shipped import checkpoint_dir, model_id
from moe_model.spec import load_spec, model_digest


def served_model(settings: Settings) -> str:
    """Checks the checkpoint's shape and files, and returns the model's id in the API.

    Raises ``UsageError`` for one that no service could load.
    """
    try:
        path = checkpoint_dir(settings.model.path)
        load_spec(path)
        model_digest(path)
        return model_id(settings.model.name, settings.model.path)
    except CheckpointError as error:
        raise UsageError(f"model.path: {error}") from None
