"""Loads the package's compiled C, which ``build_native.py`` puts beside its source."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

_DIRECTORY = Path(__file__).parent / "native"


class NativeLibraryMissing(ImportError):
    """A compiled part of moemesh is not where the installation puts it."""


@cache
def load(name: str, *, keeps_lock: bool = True) -> ctypes.CDLL:
    """``native/NAME.so``. Calls keep the interpreter's lock unless told otherwise: most take
    microseconds, and giving it up and getting it back would cost more. Raises
    ``NativeLibraryMissing``.
    """
    path = _DIRECTORY / f"{name}.so"
    try:
        return ctypes.PyDLL(str(path)) if keeps_lock else ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryMissing(
            f"cannot load {path}: {error}; install moemesh again (`pip install .` compiles it)"
        ) from error
