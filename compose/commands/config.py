"""``moemesh config``: the effective configuration and where each value came from."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from compose.options import Source
from mesh.config import Effective, knobs


def config(*, source: Source = Source()) -> int:  # noqa: B008 (frozen)
    """Print the effective configuration as TOML, with the origin of each value."""
    sys.stdout.write(as_toml(source.effective()))
    return 0


def as_toml(effective: Effective) -> str:
    """TOML that gives these settings again, each line with its origin as a comment."""
    lines: list[str] = []
    section = ""
    for knob in knobs():
        head, name = knob.key.split(".")
        if head != section:
            section = head
            lines += ["", f"[{head}]"] if lines else [f"[{head}]"]
        value = getattr(getattr(effective.settings, head), name)
        lines.append(f"{f'{name} = {_toml(value)}':<40} # {_origin(effective.origin, knob.key)}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    # JSON's forms of strings, booleans and finite numbers are TOML's too.
    return json.dumps(value, ensure_ascii=False)


def _origin(origin: Mapping[str, str], key: str) -> str:
    return origin[key].replace("\n", " ")
