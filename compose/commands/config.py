"""``moemesh config``: the effective configuration and where each value came from."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated

from cyclopts import Parameter

from compose.options import Source
from compose.settings_file import reference as reference_file
from compose.settings_file import toml
from mesh.config import SECRET_VARIABLES, Effective, knobs


def config(
    *,
    source: Source = Source(),  # noqa: B008 (frozen)
    reference: Annotated[
        bool, Parameter(negative=(), help="Instead every knob at its default, and what it means.")
    ] = False,
) -> int:
    """Print the effective configuration as TOML, with the origin of each value."""
    if reference:
        sys.stdout.write(reference_file())
        return 0
    sys.stdout.write(as_toml(source.effective()))
    for variable in SECRET_VARIABLES:
        if os.environ.get(variable):
            sys.stdout.write(f"\n# environment {variable} is set (not shown)\n")
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
        lines.append(f"{f'{name} = {toml(value)}':<40} # {_origin(effective.origin, knob.key)}")
    return "\n".join(lines) + "\n"


def _origin(origin: Mapping[str, str], key: str) -> str:
    return origin[key].replace("\n", " ")
