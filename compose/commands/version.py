"""``moemesh version``."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

from mesh.messages import PROTOCOL_MAX, PROTOCOL_MIN


def version() -> int:
    """Print the versions of moemesh, its protocol and what it runs on."""
    parts = [f"moemesh {installed('moemesh')}", f"protocol {PROTOCOL_MIN}-{PROTOCOL_MAX}"]
    parts.append(f"python {platform.python_version()}")
    try:
        parts.append(f"torch {installed('torch')}")
    except PackageNotFoundError:
        parts.append("torch is not installed")
    sys.stdout.write("\n".join(parts) + "\n")
    return 0
