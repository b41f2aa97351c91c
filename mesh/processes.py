"""Whether a process of this host still runs, and ending with one."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_FLAGS = 6
"""Field of ``/proc/PID/stat`` after the name: see proc_pid_stat(5)."""
_PR_SET_PDEATHSIG = 1
_EXITING = 0x4
"""PF_EXITING: set before the kernel closes the files of a process, and to its very end."""


def has_ended(pid: int) -> bool:
    """Whether there is no such process, or one that no longer runs any code. Does not wait."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return bool(int(stat.rpartition(")")[2].split()[_FLAGS]) & _EXITING)


def die_with(parent_pid: int, number: signal.Signals) -> None:
    """Have the kernel send a signal when the thread that started us ends: for a child of the
    launcher SIGINT, since the mesh ends with it and there is nobody to drain for.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it ended before we asked
        raise SystemExit(0)
