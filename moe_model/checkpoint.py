"""A checkpoint's weights: one or many safetensors files, mapped into memory, read on demand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from ep_kernels.fp8 import BlockScaled, Weight
from safetensors import SafetensorError, safe_open

from moe_model.errors import CorruptFile, NotFinite
from moe_model.inventory import FP8_DTYPE, Inventory
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
        file: copy what you keep. Only that part's pages are read. FP8 comes as fp32.

        Raises as ``check`` does, and ``NotFinite`` for NaN or infinity in it: one such weight
        makes NaN of every token that meets it.
        """
        tensor, scales = self._open(ref)
        if scales is not None:
            whole = cut or Cut(0, 0, ref.shape[0])
            tensor = BlockScaled(tensor, scales).narrow(whole.dim, whole.start, whole.stop)
        elif cut is not None:
            tensor = tensor.narrow(cut.dim, cut.start, cut.stop - cut.start)
        self._check_finite(ref, tensor)
        return tensor

    def read_weight(self, ref: TensorRef) -> Weight:
        """The same for a whole matrix, FP8 as it is stored."""
        tensor, scales = self._open(ref)
        if scales is None:
            self._check_finite(ref, tensor)
            return tensor
        # e4m3 has no infinity, and one NaN of each sign.
        if bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise NotFinite(self._inventory.find(ref).file, ref.name)
        return BlockScaled(tensor, scales)

    def _open(self, ref: TensorRef) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Backed by the file; with scales, which are fp32, if it is FP8."""
        stored = self._inventory.find(ref)
        tensor: torch.Tensor = self._files[stored.file].get_tensor(ref.name)
        if stored.dtype != FP8_DTYPE:
            return tensor, None
        assert ref.scales is not None, "found only with them"
        return tensor, self.read(ref.scales).float()

    def _check_finite(self, ref: TensorRef, tensor: torch.Tensor) -> None:
        # Both ends carry a NaN on. One pass without a copy; isfinite costs 25 times as much.
        low, high = torch.aminmax(tensor)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NotFinite(self._inventory.find(ref).file, ref.name)

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
