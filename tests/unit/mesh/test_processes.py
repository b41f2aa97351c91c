from __future__ import annotations

import os
import subprocess
import sys

from mesh.processes import has_ended


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
