from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Raw
from tokenizers import decoders, models

from gateway.text import Tokenizer
from tests.unit.gateway.scripted_mesh import MODEL, Mesh


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Metaspace pieces with byte fallback, as Mixtral's."""
    vocab = {"<unk>": 0, "▁": 1, "▁he": 2, "llo": 3, "▁world": 4, "h": 5}
    vocab |= {f"<0x{byte:02X}>": 6 + byte for byte in range(256)}
    raw = Raw(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    path = tmp_path_factory.mktemp("sp")
    raw.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


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
