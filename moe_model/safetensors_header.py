"""Safetensors headers without torch: eight bytes of length, a JSON table, then the data."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from moe_model.errors import CorruptFile, MissingFile, TruncatedFile, UnsafeFormat

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPE_BYTES = {
    "F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "F8_E4M3": 1,
}  # fmt: skip
"""Those whose size is checked; a checkpoint may carry others, which are never read."""
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: ``dtype`` as safetensors spells it, e.g. ``BF16``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, in name order.

    Raises ``MissingFile``, ``CorruptFile`` for a broken index, ``UnsafeFormat`` when there are
    only pickled weights.
    """
    index = directory / _INDEX
    if index.is_file():
        try:
            table = msgspec.json.decode(index.read_bytes())["weight_map"]
            names = sorted({str(name) for name in table.values()})
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise CorruptFile(index, f"not a safetensors index: {error}") from None
        for name in names:
            if Path(name).name != name:
                raise CorruptFile(index, f"names a file outside the checkpoint: {name}")
            if not (directory / name).is_file():
                raise MissingFile(directory / name, f"named by {_INDEX}")
        return tuple(directory / name for name in names)
    single = directory / _WEIGHTS
    if single.is_file():
        return (single,)
    for name in _PICKLED:
        if (directory / name).exists():
            raise UnsafeFormat(directory / name)
    raise MissingFile(single, "a checkpoint needs it or its sharded form")


def read_header(file: Path) -> tuple[bytes, Mapping[str, StoredTensor]]:
    """The raw header and the tensors it names; the file's size is checked against them.

    Raises ``TruncatedFile`` and ``CorruptFile``, the latter also when sizes, types and places of
    the tensors contradict each other.
    """
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(_LENGTH.size)
        if len(prefix) < _LENGTH.size:
            raise TruncatedFile(file, size_bytes, _LENGTH.size)
        (header_bytes,) = _LENGTH.unpack(prefix)
        if header_bytes > _MAX_HEADER_BYTES:
            raise CorruptFile(file, f"header of {header_bytes} bytes is no safetensors header")
        header = stream.read(header_bytes)
    if len(header) < header_bytes:
        raise TruncatedFile(file, size_bytes, _LENGTH.size + header_bytes)
    try:
        tensors, data_bytes = _parse(file, header)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise CorruptFile(file, f"header cannot be read: {error}") from None
    expected_bytes = _LENGTH.size + header_bytes + data_bytes
    if size_bytes < expected_bytes:
        raise TruncatedFile(file, size_bytes, expected_bytes)
    if size_bytes > expected_bytes:
        raise CorruptFile(file, f"{size_bytes - expected_bytes} bytes follow the last tensor")
    return header, tensors


def _parse(file: Path, header: bytes) -> tuple[dict[str, StoredTensor], int]:
    table: dict[str, Any] = msgspec.json.decode(header, type=dict[str, Any])
    tensors = {}
    places = []
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        dtype = str(entry["dtype"])
        shape = tuple(int(size) for size in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
        needed = _DTYPE_BYTES.get(dtype, 0) * math.prod(shape)
        if needed and needed != end - begin:
            raise ValueError(f"{name} has {end - begin} bytes, {dtype} {list(shape)} is {needed}")
        tensors[name] = StoredTensor(file=file, dtype=dtype, shape=shape)
        places.append((begin, end, name))
    data_bytes = 0
    for begin, end, name in sorted(places):
        if begin != data_bytes or end < begin:
            raise ValueError(f"{name} lies at {begin} to {end}, expected from {data_bytes}")
        data_bytes = end
    return tensors, data_bytes
