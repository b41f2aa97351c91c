"""What tests of several folders share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import variant
from tests.support.meshes import Mesh


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which tiny checkpoints are written on demand by ``variant``."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def tiny_deepseek(checkpoints: Path) -> Path:
    return variant("deepseek", checkpoints)


@pytest.fixture(scope="session")
def demo_mesh() -> Iterator[Mesh]:
    """The shipped model on one router and two expert workers."""
    with Mesh() as mesh:
        yield mesh
