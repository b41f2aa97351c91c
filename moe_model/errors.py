"""What can be wrong with a checkpoint. Every error is raised before anything is served.

Whoever started the process decides what to do; nothing here is worth a retry, because the files
on disk have to change first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class CheckpointError(Exception):
    """Base of all checkpoint errors. ``path`` is the file or directory at fault."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class MissingFile(CheckpointError):
    """A file that every checkpoint needs, or that its index names, is not there."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(path, f"no such file ({why})")


class BadConfig(CheckpointError):
    """A value of a JSON file is absent, of the wrong type or out of range."""

    def __init__(self, path: Path, key: str, value: object, expected: str) -> None:
        super().__init__(path, f"{key} is {value!r}, expected {expected}")
        self.key = key
        self.value = value
        self.expected = expected


class UnknownArchitecture(CheckpointError):
    """No family can run what ``config.json`` names."""

    def __init__(self, path: Path, found: Sequence[str], known: Sequence[str]) -> None:
        super().__init__(
            path, f"architectures is {list(found)}, known are {', '.join(sorted(known))}"
        )
        self.found = tuple(found)
        self.known = tuple(known)


class UnsafeFormat(CheckpointError):
    """The weights are pickled; loading them could run code, so they are never opened."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "pickled weights are refused; convert them to safetensors")


class TruncatedFile(CheckpointError):
    """A safetensors file is shorter than its header says."""

    def __init__(self, path: Path, size_bytes: int, expected_bytes: int) -> None:
        super().__init__(
            path, f"truncated: holds {size_bytes} bytes, its header needs {expected_bytes}"
        )
        self.size_bytes = size_bytes
        self.expected_bytes = expected_bytes


class CorruptFile(CheckpointError):
    """A file is not what its name says; ``reason`` names the part that cannot be read."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.reason = reason


class MissingTensor(CheckpointError):
    """A tensor that the architecture needs is in none of the files."""

    def __init__(self, path: Path, tensor: str) -> None:
        super().__init__(path, f"tensor {tensor} is missing")
        self.tensor = tensor


class WrongShape(CheckpointError):
    """A tensor's shape contradicts ``config.json``."""

    def __init__(
        self, path: Path, tensor: str, found: Sequence[int], expected: Sequence[int]
    ) -> None:
        super().__init__(
            path, f"tensor {tensor} has shape {list(found)}, config.json implies {list(expected)}"
        )
        self.tensor = tensor
        self.found = tuple(found)
        self.expected = tuple(expected)


class WrongDtype(CheckpointError):
    """A tensor is stored in a type that cannot be served: only F32, F16 and BF16 can, and F8_E4M3
    for matrices where ``config.json`` says so.
    """

    def __init__(self, path: Path, tensor: str, found: str) -> None:
        super().__init__(path, f"tensor {tensor} has dtype {found}, expected F32, F16 or BF16")
        self.tensor = tensor
        self.found = found


class NotFinite(CheckpointError):
    """A tensor holds NaN or infinity, so that no output could be right. Found when it is read."""

    def __init__(self, path: Path, tensor: str) -> None:
        super().__init__(path, f"tensor {tensor} holds NaN or infinite values")
        self.tensor = tensor
