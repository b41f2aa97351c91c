"""Build hook: compiles each ``native/*.c`` into a shared library beside it.

The libraries have a plain C interface and are loaded with ctypes, so that one build serves every
Python. Without a C compiler on the machine, Zig's (a wheel) is installed for the build and used.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = (
    "planner_svc/native/plan.c",
    "kernels/ep_kernels/native/ahead.c",
    "kernels/ep_kernels/native/attend.c",
    "kernels/ep_kernels/native/few.c",
    "kernels/ep_kernels/native/gate.c",
    "kernels/ep_kernels/native/half.c",
    "kernels/ep_kernels/native/lane.c",
    "kernels/ep_kernels/native/latent.c",
    "kernels/ep_kernels/native/route.c",
    "kernels/ep_kernels/native/rows.c",
    "kernels/ep_kernels/native/serve.c",
)
# No -march: the library may run on another machine than it was built on. No contraction of
# multiply and add: the same inputs give the same bits everywhere.
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra", "-pthread")


def compiler() -> list[str] | None:
    """The machine's C compiler (``$CC``, cc, gcc or clang), or None."""
    if given := os.environ.get("CC"):
        return shlex.split(given)
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    return None if found is None else [found]


class NativeBuild(BuildHookInterface[Any]):
    """See the module's docstring."""

    def dependencies(self) -> list[str]:
        return [] if compiler() else ["ziglang>=0.13"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        command = compiler() or [sys.executable, "-m", "ziglang", "cc"]
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for name in SOURCES:
            source = Path(self.root, name)
            library = source.with_suffix(".so")
            new = library.with_suffix(".so.new")
            subprocess.run(  # noqa: S603
                [*command, *FLAGS, str(source), "-o", str(new), "-lm"], check=True
            )
            new.replace(library)
            build_data["artifacts"].append(str(library.relative_to(self.root)))
