"""Expert workers as processes of their own, forked from one that has imported torch already: so a
start costs the processor a tenth of what it costs from nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.kernels.forked import CONTEXT


def _serve(arguments: Sequence[str], log: str) -> None:
    from expert_svc.service import main
    from mesh.service import run_service

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.argv = ["expert_svc", *arguments]
    run_service("expert", main)


class ForkedExpert:
    """What ``python -m expert_svc ARGUMENTS`` does, with the face of a ``subprocess.Popen``. Its
    output is added to the file ``log``.
    """

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._process: BaseProcess = CONTEXT.Process(
            target=_serve, args=(list(arguments), str(log)), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("expert_svc", timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
