"""What tests of several folders share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch, here and in child processes: on few busy cores several OpenMP
# threads wait for one another, and tests take many times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

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
