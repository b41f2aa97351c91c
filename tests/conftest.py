"""What tests of several folders share."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before anything imports torch, here and in child processes: on few busy cores several OpenMP
# threads wait for one another, and tests take many times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import structlog

from tests.support.checkpoints import variant
from tests.support.meshes import Mesh

# What is imported stays, and is large: the collector would look at all of it again and again.
gc.disable()
# By itself structlog shows exceptions with the variables of each frame, tensors and all: seconds.
_PLAIN = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], _PLAIN])

ONE_PROCESS = "tests/kernels/interpreted"
"""A folder whose tests share a process of their own, which runs all that were selected of it."""
ONE_MESH = "demo_mesh"
"""A fixture whose mesh all files share that name it."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile``, but for what such files share, which would be started once in each
    worker: they go to one of them as a whole.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            if file.startswith(ONE_PROCESS):
                return ONE_PROCESS
            return ONE_MESH if names_it(config.rootpath / file) else file

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: what comes last must be short, for workers to end together. It needs one
    processor, and tests that start meshes take all that they get.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(ONE_PROCESS))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@functools.cache
def names_it(file: Path) -> bool:
    return ONE_MESH in file.read_text()


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
