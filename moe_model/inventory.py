"""Which tensors a checkpoint holds, from the headers of its files alone. Torch-free.

Whoever is to start a mesh checks here, in milliseconds, what its processes will want to read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moe_model.errors import CorruptFile, MissingTensor, WrongDtype, WrongShape
from moe_model.safetensors_header import StoredTensor, read_header, weight_files
from moe_model.tensors import TensorRef

_SERVED_DTYPES = frozenset({"F32", "F16", "BF16"})
FP8_DTYPE = "F8_E4M3"


class Inventory:
    """The tensors of all weight files below ``path``; ``files`` are those that hold one.

    Raises ``MissingFile``, ``UnsafeFormat``, ``TruncatedFile`` and ``CorruptFile``.
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
        self.files = frozenset(stored.file for stored in self._tensors.values())

    def find(self, ref: TensorRef) -> StoredTensor:
        """Where ``ref`` lies. Raises ``MissingTensor``, ``WrongShape`` or ``WrongDtype``."""
        stored = self._tensors.get(ref.name)
        if stored is None:
            raise MissingTensor(self.path, ref.name)
        if stored.shape != ref.shape:
            raise WrongShape(stored.file, ref.name, stored.shape, ref.shape)
        if stored.dtype == FP8_DTYPE and ref.scales is not None:
            self.find(ref.scales)
        elif stored.dtype not in _SERVED_DTYPES:
            raise WrongDtype(stored.file, ref.name, stored.dtype)
        return stored

    def check(self, refs: Iterable[TensorRef]) -> None:
        """Raises as ``find`` does for the first that cannot be served."""
        for ref in refs:
            self.find(ref)
