"""Loads the package's compiled C, which ``build_native.py`` puts beside its source."""

from __future__ import annotations

import ctypes
from pathlib import Path

_DIRECTORY = Path(__file__).parent / "native"


class NativeLibraryMissing(ImportError):
    """A compiled part of moemesh is not where the installation puts it."""


def load(name: str) -> ctypes.PyDLL:
    """``native/NAME.so``. Calls keep the interpreter's lock: they take microseconds, and giving it
    up and getting it back would cost more. Raises ``NativeLibraryMissing``.
    """
    path = _DIRECTORY / f"{name}.so"
    try:
        return ctypes.PyDLL(str(path))
    except OSError as error:
        raise NativeLibraryMissing(
            f"cannot load {path}: {error}; install moemesh again (`pip install .` compiles it)"
        ) from error
