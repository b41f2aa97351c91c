"""Compose files as the engine sees them, without an engine: variables replaced, files laid over
one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from compose.docker.roots import expand

COMPOSE = Path(__file__).parents[2] / "compose"
_APPENDED = {"ports", "expose", "volumes", "secrets", "configs", "tmpfs", "security_opt"}


class Tag(yaml.SafeLoader):
    """Also takes ``!reset`` and ``!override``."""


class Reset:
    """``!reset``: the key of the file before goes."""


class Override(list[Any]):
    """``!override``: not added to what was there."""


Tag.add_constructor("!reset", lambda _loader, _node: Reset())
Tag.add_constructor(
    "!override", lambda loader, node: Override(loader.construct_sequence(node, deep=True))
)


def effective(*names: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """``docker compose -f NAME -f NAME config``, as far as our files go."""
    whole: dict[str, Any] = {}
    for name in names:
        text = expand((COMPOSE / name).read_text(), variables or {})
        whole = _laid_over(whole, yaml.load(text, Tag))
    return {key: value for key, value in whole.items() if not key.startswith("x-")}


def _laid_over(lower: Any, upper: Any, key: str = "") -> Any:
    if isinstance(upper, Override):
        return list(upper)
    if isinstance(lower, dict) and isinstance(upper, dict):
        merged = dict(lower)
        for name, value in upper.items():
            if isinstance(value, Reset):
                merged.pop(name, None)
            else:
                merged[name] = _laid_over(lower.get(name), value, name)
        return merged
    if isinstance(lower, list) and isinstance(upper, list) and key in _APPENDED:
        return [*lower, *(item for item in upper if item not in lower)]
    return upper
