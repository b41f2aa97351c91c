from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_model.checkpoint import Checkpoint
from moe_model.errors import (
    CorruptFile,
    MissingFile,
    MissingTensor,
    NotFinite,
    TruncatedFile,
    UnsafeFormat,
    WrongDtype,
    WrongShape,
)
from moe_model.tensors import TensorRef


def sharded(path: Path) -> Path:
    save_file({"a": torch.ones(2, 3)}, path / "model-1.safetensors")
    save_file({"b": torch.zeros(4).bfloat16()}, path / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_reads_single_and_sharded_files(tmp_path: Path) -> None:
    with Checkpoint(sharded(tmp_path)) as checkpoint:
        assert torch.equal(checkpoint.read(TensorRef("a", (2, 3))), torch.ones(2, 3))
        assert checkpoint.read(TensorRef("b", (4,))).dtype is torch.bfloat16
    single = tmp_path / "single"
    single.mkdir()
    save_file({"a": torch.ones(2, 3)}, single / "model.safetensors")
    with Checkpoint(single) as checkpoint:
        tensor = checkpoint.read(TensorRef("a", (2, 3)))
    assert tensor.sum() == 6  # outlives the checkpoint


def test_missing_tensor_wrong_shape_and_dtype_are_named(tmp_path: Path) -> None:
    save_file(
        {"a": torch.ones(2, 3), "i": torch.ones(2, dtype=torch.int64)},
        tmp_path / "model.safetensors",
    )
    with Checkpoint(tmp_path) as checkpoint:
        with pytest.raises(MissingTensor, match="no_such"):
            checkpoint.check([TensorRef("a", (2, 3)), TensorRef("no_such", (1,))])
        with pytest.raises(WrongShape, match=r"a has shape \[2, 3\].*\[3, 2\]"):
            checkpoint.read(TensorRef("a", (3, 2)))
        with pytest.raises(WrongDtype, match="I64"):
            checkpoint.read(TensorRef("i", (2,)))


@pytest.mark.parametrize("keep", [0, 7, 20, -1])
def test_truncated_file_is_found_on_opening(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(64)}, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(TruncatedFile) as caught:
        Checkpoint(tmp_path)
    assert caught.value.size_bytes == file.stat().st_size
    assert caught.value.expected_bytes > caught.value.size_bytes


def test_garbage_is_not_safetensors(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(CorruptFile, match="header"):
        Checkpoint(tmp_path)
    file.write_bytes((5).to_bytes(8, "little") + b"[1,2]")
    with pytest.raises(CorruptFile, match="header"):
        Checkpoint(tmp_path)
    file.write_bytes((8).to_bytes(8, "little") + b'{"a":{}}')
    with pytest.raises(CorruptFile, match="header"):
        Checkpoint(tmp_path)


def test_index_must_name_files_of_the_checkpoint(tmp_path: Path) -> None:
    index = sharded(tmp_path) / "model.safetensors.index.json"
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(MissingFile, match="model-2"):
        Checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../model-1.safetensors"}}))
    with pytest.raises(CorruptFile, match="outside"):
        Checkpoint(tmp_path)
    index.write_text("[]")
    with pytest.raises(CorruptFile, match="index"):
        Checkpoint(tmp_path)


def test_pickles_are_refused_and_nothing_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingFile):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsafeFormat):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 7, 66])
def test_a_tensor_that_is_not_finite_is_named(
    tmp_path: Path, dtype: torch.dtype, value: float, place: int
) -> None:
    bad = torch.randn(67).to(dtype)
    bad[place] = value
    save_file({"good": torch.randn(67).to(dtype), "bad": bad}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.read(TensorRef("good", (67,)))
        with pytest.raises(NotFinite, match="tensor bad holds NaN or infinite"):
            checkpoint.read(TensorRef("bad", (67,)))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ('{"dtype":"I16","shape":[2],"data_offsets":[0,8]}', "8 bytes, I16"),
        ('{"dtype":"F32","shape":[3],"data_offsets":[0,8]}', "8 bytes, F32"),
        ('{"dtype":"F32","shape":[1],"data_offsets":[4,8]}', "lies at 4"),
        ('{"dtype":"F32","shape":[1],"data_offsets":[0,4]}', "4 bytes follow"),
        ('{"dtype":"XYZ","shape":[2],"data_offsets":[0,8]}', "header cannot be read"),
        ('{"dtype":"F32","shape":[2],"data_offsets":[0]}', "header cannot be read"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    tmp_path: Path, entry: str, reason: str
) -> None:
    header = f'{{"a":{entry}}}'.encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CorruptFile, match=reason):
        Checkpoint(tmp_path)
