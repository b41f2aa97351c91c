"""Whether a process of this machine still runs, and whether one can know."""

from __future__ import annotations

from pathlib import Path

_FLAGS = 6
"""Field of ``/proc/PID/stat`` after the name: see proc_pid_stat(5)."""
_EXITING = 0x4
"""PF_EXITING: set before the kernel closes the files of a process, and to its very end."""


def has_ended(pid: int) -> bool:
    """Whether there is no such process, or one that no longer runs any code. Does not wait."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return bool(int(stat.rpartition(")")[2].split()[_FLAGS]) & _EXITING)


def pid_namespace() -> int:
    """Names the set of processes among which this one's id means something, see
    pid_namespaces(7): containers have one each. 0 where that cannot be told.
    """
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
