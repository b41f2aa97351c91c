"""Flags that every subcommand shares, and what they mean together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mesh.config import ConfigError, Effective, load


class UsageError(Exception):
    """What the user asked for cannot be done; the text says why and what would do.

    The command prints it and ends with ``exit_code``: 2 for a bad value, 1 for a mesh that is
    not there.
    """

    def __init__(self, text: str, exit_code: int = 2) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the configuration comes from: defaults < TOML < environment < flags."""

    config: Annotated[Path | None, Parameter(help="TOML file that describes the mesh.")] = None
    set_: Annotated[
        list[str],
        Parameter(
            name="--set",
            negative=(),
            show_default=False,
            help="Any setting, as section.key=value; repeatable.",
        ),
    ] = field(default_factory=list)

    def overrides(self, flags: Mapping[str, object]) -> dict[str, str]:
        """``section.key -> text`` of ``--set`` and of the named flags that were given."""
        values: dict[str, str] = {}
        for item in self.set_:
            key, separator, value = item.partition("=")
            if not separator:
                raise UsageError(f"--set {item}: expected section.key=value")
            values[key.strip()] = value
        values.update({key: str(value) for key, value in flags.items() if value is not None})
        return values

    def refuse_conflicts(self, flags: Mapping[str, object], names: Mapping[str, str]) -> None:
        """Raises ``UsageError`` where a flag and ``--set`` give one setting different values."""
        given = self.overrides({})
        for key, value in flags.items():
            if value is not None and key in given and given[key] != str(value):
                raise UsageError(
                    f"{names[key]} {value} and --set {key}={given[key]} contradict each other: "
                    "expected one of them"
                )

    def effective(
        self, flags: Mapping[str, object] | None = None, names: Mapping[str, str] | None = None
    ) -> Effective:
        """The merged configuration; ``names`` says which flag gave a key (``--port``).

        Raises ``UsageError`` for an unknown key or a value out of range.
        """
        try:
            return load(self.config, self.overrides(flags or {}), os.environ, flag_names=names)
        except ConfigError as error:
            raise UsageError(str(error)) from None
