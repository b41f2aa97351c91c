"""A checkpoint's weights: one or many safetensors files, mapped into memory, read on demand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moe_model.errors import CorruptFile, NotFinite
from moe_model.inventory import Inventory
from moe_model.shard import Cut
from moe_model.tensors import TensorRef


class Checkpoint:
    """Read tensors by name. Opening reads headers only; a tensor's pages are read when asked for.

    Raises ``MissingFile``, ``UnsafeFormat``, ``TruncatedFile`` and ``CorruptFile`` on opening.
    Reading is safe from several threads. Usable as a context manager.
    """

    def __init__(self, path: Path) -> None:
        self._inventory = Inventory(path)
        self._files: dict[Path, Any] = {file: _open(file) for file in self._inventory.files}

    def check(self, refs: Iterable[TensorRef]) -> None:
        """Raises ``MissingTensor``, ``WrongShape`` or ``WrongDtype`` for the first that is."""
        self._inventory.check(refs)

    def read(self, ref: TensorRef, cut: Cut | None = None) -> torch.Tensor:
        """The tensor, or the part that ``cut`` says, in the type it is stored in and backed by the
        file: copy what you keep. Only that part's pages are read.

        Raises as ``check`` does, and ``NotFinite`` for NaN or infinity in it: one such weight
        makes NaN of every token that meets it.
        """
        stored = self._inventory.find(ref)
        tensor: torch.Tensor = self._files[stored.file].get_tensor(ref.name)
        if cut is not None:
            tensor = tensor.narrow(cut.dim, cut.start, cut.stop - cut.start)
        # Both ends carry a NaN on. One pass without a copy; isfinite costs 25 times as much.
        low, high = torch.aminmax(tensor)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NotFinite(stored.file, ref.name)
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


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except SafetensorError as error:
        raise CorruptFile(file, f"header cannot be read: {error}") from None
