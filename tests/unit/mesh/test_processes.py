from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from mesh.processes import Standstill, has_ended


def test_a_process_has_ended_once_its_files_are_closed_reaped_or_not() -> None:
    read, write = os.pipe()
    code = "import sys; sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=[write])
    os.close(write)
    assert not has_ended(child.pid)
    child.kill()
    assert os.read(read, 1) == b""  # the kernel has closed the child's end
    os.close(read)
    assert has_ended(child.pid)
    child.wait()
    assert has_ended(child.pid)
    assert not has_ended(os.getpid())


def test_a_process_stands_still_when_it_sleeps_or_is_stopped_and_not_while_it_runs() -> None:
    busy = "import sys\nfor _ in range(10**6): pass\n"
    code = busy + "print(flush=True)\nwhile sys.stdin.read(1) == 's': pass\nwhile True: pass"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdout.readline()
            standstill = Standstill(child.pid)
            end = time.monotonic() + 30
            while not standstill.look():  # the first look says nothing
                assert time.monotonic() < end
            child.stdin.close()  # from now on it runs, or wants to
            while standstill.look():
                assert time.monotonic() < end
            assert not any(standstill.look() for _ in range(100))
            os.kill(child.pid, signal.SIGSTOP)
            while not standstill.look():
                assert time.monotonic() < end
            assert all(standstill.look() for _ in range(100))
        finally:
            child.kill()
    assert not Standstill(child.pid).look()
