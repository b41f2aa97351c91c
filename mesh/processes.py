"""What a process and its threads are to the rest of the machine, and ending with another one."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_FLAGS = 6
"""Field of ``/proc/PID/stat`` after the name: see proc_pid_stat(5)."""
_PR_SET_NAME = 15
_PR_SET_PDEATHSIG = 1
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12
"""Fields of the same of a thread."""
_WANTS = frozenset("RDt")
"""States of a thread that runs or waits for a CPU, for a disk, or for its debugger."""
_EXITING = 0x4
"""PF_EXITING: set before the kernel closes the files of a process, and to its very end."""


def has_ended(pid: int) -> bool:
    """Whether there is no such process, or one that no longer runs any code. Does not wait."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return bool(int(stat.rpartition(")")[2].split()[_FLAGS]) & _EXITING)


class Standstill:
    """Whether a process does nothing at all: stopped, or asleep with all its threads.

    However slow a process is on a busy machine, it uses a CPU or waits for one, or for a disk. So
    load is never taken for a standstill; only a process that nobody needs anything of may look so.
    """

    def __init__(self, pid: int) -> None:
        self._threads = Path(f"/proc/{pid}/task")
        self._used = -1

    def look(self) -> bool:
        """Whether it has used no CPU since the last look, and wants none now. False where that
        cannot be told: a kernel that says of a process that runs that it never did counts nothing.
        """
        used, wants = 0, False
        try:
            for thread in self._threads.iterdir():
                fields = (thread / "stat").read_text().rpartition(")")[2].split()
                used += int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
                wants |= fields[_STATE] in _WANTS
        except OSError:  # a thread that ends, or no such process
            return False
        before, self._used = self._used, used
        return used == before and used > 0 and not wants


def pid_namespace() -> int:
    """Names the set of processes among which this one's id means something, see
    pid_namespaces(7): containers have one each. 0 where that cannot be told.
    """
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def name_thread(name: str) -> None:
    """Let tools such as ``top -H`` show the calling thread by this name of at most 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with(parent_pid: int, number: signal.Signals) -> None:
    """Have the kernel send a signal when the thread that started us ends: for a child of the
    launcher SIGINT, since the mesh ends with it and there is nobody to drain for.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it ended before we asked
        raise SystemExit(0)
