"""``moemesh install-systemd``: units for the services of this host."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from compose.options import UsageError
from compose.units import changes, hidden_by_units, unit_files, write

_NEXT = """
systemd-sysusers
systemctl daemon-reload
systemctl enable moemesh.target moemesh-planner moemesh-gateway moemesh-router@0 \\
  moemesh-expert@0 moemesh-expert@1
systemctl start moemesh.target
"""


def install_systemd(
    *,
    dry_run: Annotated[
        bool, Parameter(negative=(), help="Say what would be written, and print it.")
    ] = False,
    root: Annotated[Path, Parameter(help="Write below this directory, for an image.")] = Path("/"),
    config: Annotated[
        Path, Parameter(help="The mesh's TOML file, as the services are to find it.")
    ] = Path("/etc/moemesh/mesh.toml"),
) -> int:
    """Write systemd units for gateway, planner, routers and expert workers, and the user that they
    run as. They use this Python. Nothing is enabled or started.
    """
    if not config.is_absolute():
        raise UsageError(f"--config {config}: expected an absolute path")
    python = Path(sys.executable)
    files = unit_files(python, config)
    say = sys.stdout.write
    try:
        for file, how in changes(files, root):
            say(f"{how}: {root / file.path}\n")
            if dry_run:
                say("".join(f"    {line}\n" for line in file.text.splitlines()))
        if not dry_run:
            write(files, root)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}", exit_code=1) from None
    if hidden_by_units(python):
        sys.stderr.write(
            f"moemesh: the services cannot see {python} (or what it links to): they see no home "
            "and no temporary directory. Install moemesh elsewhere, such as in /opt/moemesh.\n"
        )
    if not (root / config.relative_to("/")).exists():
        say(f"missing: {root / config.relative_to('/')} (`moemesh config --reference` makes one)\n")
    if not dry_run:
        say(f"then:\n{_NEXT}")
    return 0
