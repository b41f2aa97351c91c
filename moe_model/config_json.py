"""Typed look-ups in a checkpoint's JSON files: a wrong value names its key, file and remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from moe_model.errors import BadConfig, CorruptFile, MissingFile


def read_json_object(path: Path, why: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises ``MissingFile`` (with ``why`` it is needed) and ``CorruptFile``.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise MissingFile(path, why) from None
    except OSError as error:
        raise CorruptFile(path, f"cannot be read: {error.strerror}") from None
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptFile(path, f"not a JSON object: {error}") from None


class JsonReader:
    """Checked access to one JSON object. ``None`` in the file counts as absent."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def bad(self, key: str, expected: str) -> BadConfig:
        return BadConfig(self.path, key, self.values.get(key), expected)

    def optional_integer(self, key: str, *, at_least: int = 0) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.bad(key, f"a whole number of at least {at_least}")
        return value

    def integer(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        value = self.optional_integer(key, at_least=at_least)
        if value is not None:
            return value
        if default is None:
            raise self.bad(key, f"a whole number of at least {at_least}")
        return default

    def optional_number(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(key, "a number")
        return float(value)

    def number(self, key: str, default: float) -> float:
        value = self.optional_number(key)
        return default if value is None else value

    def optional_flag(self, key: str) -> bool | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.optional_flag(key)
        return default if value is None else value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.bad(key, "a string")
        return value

    def choice(self, key: str, default: str, allowed: Sequence[str]) -> str:
        """A string that must be one of ``allowed``."""
        value = self.values.get(key)
        if value is None:
            return default
        if value not in allowed:
            raise self.bad(key, " or ".join(repr(item) for item in allowed))
        return str(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """One number or a list of numbers; empty when absent."""
        value = self.values.get(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
            raise self.bad(key, "a token id or a list of token ids")
        return tuple(items)

    def nested(self, key: str) -> JsonReader | None:
        """A nested object, with its own checked access."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.bad(key, "an object")
        return JsonReader(value, self.path)
