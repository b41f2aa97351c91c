"""Processes that tests start by the dozen, forked from one that has imported torch already: so a
start costs the processor no seconds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

DEADLINE_S = 120.0
CONTEXT = get_context("forkserver")
"""The one that is for all tests of a process."""
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CONTEXT.set_forkserver_preload(
    [
        "ep_kernels.group",
        "expert_svc.service",
        *(["ep_kernels.triton.symm"] if _INTERPRETED else []),
    ]
)


class Forked:
    """A process that runs ``target(pipe, *arguments)``. It tells what it has to through the pipe,
    and ends when that is closed.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def told(self, deadline_s: float = DEADLINE_S) -> Any:
        """What it tells next; raises ``EOFError`` when it has ended instead."""
        assert self._pipe.poll(deadline_s), f"process {self._process.pid} says nothing"
        return self._pipe.recv()

    def stop(self) -> int:
        """Its exit status, below zero for the signal that ended it."""
        self._pipe.close()
        self._process.join(DEADLINE_S)
        assert self._process.exitcode is not None, f"process {self._process.pid} does not end"
        return self._process.exitcode

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Whether it still runs or not."""
        self._process.kill()
        self.stop()
