"""A checkpoint's weights: one or many safetensors files, mapped into memory, read on demand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open

from moe_model.errors import CorruptFile, MissingTensor, WrongDtype, WrongShape
from moe_model.safetensors_header import StoredTensor, read_header, weight_files
from moe_model.tensors import TensorRef

_SERVED_DTYPES = frozenset({"F32", "F16", "BF16"})


class Checkpoint:
    """Read tensors by name. Opening reads headers only; a tensor's pages are read when asked for.

    Raises ``MissingFile``, ``UnsafeFormat``, ``TruncatedFile`` and ``CorruptFile`` on opening.
    Reading is safe from several threads. Usable as a context manager.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: dict[str, StoredTensor] = {}
        for file in weight_files(path):
            _, tensors = read_header(file)
            for name, stored in tensors.items():
                if name in self._tensors:
                    raise CorruptFile(file, f"{name} is also in {self._tensors[name].file.name}")
                self._tensors[name] = stored
        self._files: dict[Path, Any] = {
            file: safe_open(str(file), framework="pt")
            for file in {stored.file for stored in self._tensors.values()}
        }

    def check(self, refs: Iterable[TensorRef]) -> None:
        """Raises ``MissingTensor``, ``WrongShape`` or ``WrongDtype`` for the first that is."""
        for ref in refs:
            self._stored(ref)

    def read(self, ref: TensorRef) -> torch.Tensor:
        """The tensor in the type it is stored in, backed by the file: copy what you keep.

        Raises as ``check`` does.
        """
        stored = self._stored(ref)
        tensor: torch.Tensor = self._files[stored.file].get_tensor(ref.name)
        return tensor

    def close(self) -> None:
        """Unmap the files. Tensors already read stay valid."""
        self._files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _stored(self, ref: TensorRef) -> StoredTensor:
        stored = self._tensors.get(ref.name)
        if stored is None:
            raise MissingTensor(self.path, ref.name)
        if stored.shape != ref.shape:
            raise WrongShape(stored.file, ref.name, stored.shape, ref.shape)
        if stored.dtype not in _SERVED_DTYPES:
            raise WrongDtype(stored.file, ref.name, stored.dtype)
        return stored
