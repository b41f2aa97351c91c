"""Who runs the mesh of a run directory, and clearing that directory when it stops."""

from __future__ import annotations

import shutil
from pathlib import Path

from mesh.rundir import Claim, claim, create_run_dir, running_pid
from mesh.settings import Settings

LOGS = "logs"
"""Folder of the run directory that holds the log of each process."""
LAUNCHER = "launcher"
"""The id under which a launcher claims its mesh; ``RUN_DIR/launcher.pid`` has its process id."""


def claim_mesh(settings: Settings) -> tuple[Path, Claim]:
    """The run directory, empty, and the claim of this process to it.

    What a killed mesh left there is removed. Raises ``mesh.rundir.RunDirError``; that is
    ``AlreadyRunning`` when another launcher runs this mesh.
    """
    while True:
        directory = create_run_dir(settings)
        try:
            held = claim(directory, LAUNCHER)
        except FileNotFoundError:
            continue  # a mesh that has just stopped took the directory with it
        clear(directory)
        return directory, held


def release_mesh(directory: Path, held: Claim, settings: Settings, *, keep_logs: bool) -> None:
    """Removes the run directory, unless another mesh has moved in meanwhile.

    ``keep_logs``: leave its logs, for whoever wants to know why the mesh ended.
    """
    clear(directory, keep_logs=keep_logs)
    held.release()
    empty = [directory] if settings.mesh.run_dir else [directory, directory.parent]
    for path in empty:
        try:
            path.rmdir()
        except OSError:
            return


def clear(directory: Path, *, keep_logs: bool = False) -> None:
    """Removes all but the launcher's claim and, on demand, the logs."""
    kept = {f"{LAUNCHER}.pid"} | ({LOGS} if keep_logs else set())
    for entry in directory.iterdir():
        if entry.name in kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def launcher_pid(directory: Path) -> int | None:
    """Process id of the launcher that runs the mesh of ``directory``, or None."""
    return running_pid(directory, LAUNCHER)
