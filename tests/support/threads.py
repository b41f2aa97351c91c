"""The threads of another process, as the kernel shows them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def allowed_cpus(pid: int) -> list[tuple[str, str]]:
    """Name of each thread, and the CPUs that it may use as the kernel lists them: ``0-3,8``."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            lines = (task / "status").read_text().splitlines()
            fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            found.append((fields["Name"], fields["Cpus_allowed_list"]))
    return found
