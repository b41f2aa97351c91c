"""The systemd units that ship, fitted to this installation, and writing them. No systemd is called.

The templates in ``compose/systemd`` are units by themselves, of an installation in
``/opt/moemesh``; only the interpreter and the settings file are replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TEMPLATES = Path(__file__).parent / "systemd"
UNITS = "etc/systemd/system"
SYSUSERS = "etc/sysusers.d/moemesh.conf"
_PYTHON = "/opt/moemesh/bin/python"
_CONFIG = "/etc/moemesh/mesh.toml"
_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - named, not used
"""What ``ProtectHome`` and ``PrivateTmp`` hide from the services."""


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A file to be written, ``path`` being relative to the root directory."""

    path: str
    text: str


def unit_files(python: Path, config: Path) -> tuple[UnitFile, ...]:
    """All units and the user that they need. ``python`` has moemesh installed; ``config`` is the
    mesh's TOML file.
    """
    files = [UnitFile(SYSUSERS, (TEMPLATES / "moemesh.sysusers").read_text())]
    for path in sorted([*TEMPLATES.glob("*.service"), *TEMPLATES.glob("*.target")]):
        text = path.read_text().replace(_PYTHON, _quoted(python)).replace(_CONFIG, _quoted(config))
        files.append(UnitFile(f"{UNITS}/{path.name}", text))
    return tuple(files)


def changes(
    files: Iterable[UnitFile], root: Path
) -> list[tuple[UnitFile, Literal["new", "changed", "as it is"]]]:
    """What writing each file would do to ``root``."""
    found: list[tuple[UnitFile, Literal["new", "changed", "as it is"]]] = []
    for file in files:
        try:
            same = (root / file.path).read_text() == file.text
        except FileNotFoundError:
            found.append((file, "new"))
        else:
            found.append((file, "as it is" if same else "changed"))
    return found


def write(files: Iterable[UnitFile], root: Path) -> None:
    """Replace each file at once. Raises ``OSError``."""
    for file in files:
        path = root / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_text(file.text)
        new.chmod(0o644)
        new.replace(path)


def hidden_by_units(path: Path) -> bool:
    """Whether services that the units start could not see ``path``, or what it links to."""
    places = {Path(os.path.abspath(path)), path.resolve()}  # noqa: PTH100 - without links
    return any(place.is_relative_to(hidden) for place in places for hidden in _HIDDEN)


def _quoted(path: Path) -> str:
    """As a unit file has it: see systemd.service(5), "Command lines"."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"' if any(c.isspace() or c in "\"'\\" for c in text) else text
