"""The threads of another process, as the kernel shows them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mesh.cpus import cpus_text, share_of


def allowed_cpus(pid: int) -> list[tuple[str, str]]:
    """Name of each thread, and the CPUs that it may use as the kernel lists them: ``0-3,8``."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            lines = (task / "status").read_text().splitlines()
            fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            found.append((fields["Name"], fields["Cpus_allowed_list"]))
    return found


def compute_cpus(pid: int) -> str:
    """The CPUs on which an expert worker computes."""
    return dict(allowed_cpus(pid))["compute"]


def shares(workers: int) -> list[str]:
    """Which CPUs ``moemesh up`` gives each of so many expert workers, on whatever machine."""
    usable = os.sched_getaffinity(0)
    found = [share_of(usable, index, workers, 1) for index in range(workers)]
    return [cpus_text(share or usable) for share in found]
