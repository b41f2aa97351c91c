"""What tests of several folders share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before anything imports torch, here and in child processes: on few busy cores several OpenMP
# threads wait for one another, and tests take many times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.support.checkpoints import variant
from tests.support.meshes import Mesh

ONE_PROCESS = "tests/kernels/interpreted"
"""A folder whose tests share a process of their own, which runs all that were selected of it."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile``, but for such a folder, which would run once in each worker: it goes to
    one of them as a whole.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return ONE_PROCESS if nodeid.startswith(ONE_PROCESS) else super()._split_scope(nodeid)

    return ByFile(config, log)


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
