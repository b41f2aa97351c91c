"""``moemesh down``: stop the mesh that ``moemesh up`` runs on this host."""

from __future__ import annotations

import os
import select
import signal
from typing import Annotated

from cyclopts import Parameter

from compose.holder import launcher_pid
from compose.options import Source, UsageError
from mesh.rundir import run_dir


def down(
    *,
    source: Source = Source(),  # noqa: B008 (frozen)
    timeout: Annotated[float, Parameter(help="Seconds to wait for the launcher to end.")] = 60.0,
) -> int:
    """Stop the mesh that `moemesh up` runs on this host, in order, and wait for it."""
    directory = run_dir(source.effective().settings)
    pid = launcher_pid(directory)
    if pid is None:
        raise UsageError(f"no mesh was started by `moemesh up` in {directory}", exit_code=1)
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0
    try:
        # The lock still names it now, so the handle is the launcher's and no reused number's.
        if launcher_pid(directory) == pid:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
        ended, _, _ = select.select([handle], [], [], timeout)
    finally:
        os.close(handle)
    if not ended:
        raise UsageError(f"the launcher (process {pid}) has not ended after {timeout:g} s", 1)
    return 0
