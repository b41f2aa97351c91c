from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.text import Tokenizer
from tests.unit.gateway.scripted_mesh import MODEL, Mesh


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL)


@pytest.fixture(scope="module")
def shared_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    run_dir = tmp_path_factory.mktemp("gw")
    run_dir.chmod(0o700)
    mesh = Mesh(run_dir)
    try:
        mesh.add_router("router-0")
        mesh.start_gateway()
        mesh.wait_ready()
        yield mesh
    finally:
        mesh.close()


@pytest.fixture
def mesh(shared_mesh: Mesh) -> Mesh:
    """A ready mesh of one gateway and one router, shared by the tests of a module."""
    shared_mesh.reset()
    return shared_mesh


@pytest.fixture
def own_mesh(tmp_path: Path) -> Iterator[Mesh]:
    """A mesh without routers and gateway, for tests that start, kill and stop them."""
    tmp_path.chmod(0o700)
    mesh = Mesh(tmp_path)
    try:
        yield mesh
    finally:
        mesh.close()
