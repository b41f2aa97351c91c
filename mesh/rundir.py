"""The run directory: sockets, pid files and logs of one mesh on one host, private to its user.
And the state directory, of what outlives the mesh.

API
    ``run_dir(settings) -> Path``            where it is (creates nothing)
    ``create_run_dir(settings) -> Path``     makes it (mode 0700) or refuses an unsafe one
    ``state_dir(settings) -> Path``          where that is (creates nothing)
    ``planner_address(settings)``            ZeroMQ address of the planner's command socket
    ``broadcast_address(settings)``          ... of its broadcasts
    ``router_address(settings, id)``         ... at which a router listens for requests
    ``lanes_path(settings, id)``             Unix socket path at which an expert takes lanes
    ``bundles_address(settings, id)``        ... at which an expert worker hands experts out
    ``claim(directory, id) -> Claim``        one process per id: pid file under a lock
    ``running_pid(directory, id)``           whose process that is
    ``running(directory)``                   all that run there
    ``take_along(settings)``                 the last process of a mesh removes what it left there

The directory's mode guards every ``ipc://`` link: whoever may enter it may command the mesh.
Errors: ``RunDirError``.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType

from mesh.addresses import MAX_SOCKET_PATH_BYTES
from mesh.hosts import listen_address
from mesh.settings import Settings

ORDERS = "orders.json"
"""What administrators ordered at run time: it outlives the planner, and goes with the mesh."""


class RunDirError(Exception):
    """The run directory cannot be trusted or used; the message names it and the remedy."""


class AlreadyRunning(RunDirError):
    """Another live process holds the id. Attributes: ``id``, ``pid`` (0 if unknown)."""

    def __init__(self, id: str, pid: int, directory: Path) -> None:  # noqa: A002
        super().__init__(f"{id} already runs in {directory} (pid {pid or 'unknown'})")
        self.id = id
        self.pid = pid


def run_dir(settings: Settings) -> Path:
    """``mesh.run_dir``, else ``$XDG_RUNTIME_DIR/moemesh/NAME``, else ``/tmp/moemesh-UID/NAME``."""
    if settings.mesh.run_dir:
        return Path(settings.mesh.run_dir)
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_absolute() and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime) / "moemesh" / settings.mesh.name
    return Path(f"/tmp/moemesh-{os.getuid()}") / settings.mesh.name  # noqa: S108 - checked below


def create_run_dir(settings: Settings) -> Path:
    """Make the run directory with mode 0700, or check that an existing one is ours alone.

    A default directory's parent (``moemesh``, ``moemesh-UID``) is held to the same rule, since
    whoever owns it could swap what lies below. Raises ``RunDirError``.
    """
    directory = run_dir(settings)
    private = [directory] if settings.mesh.run_dir else [directory.parent, directory]
    chosen = "mesh.run_dir" if settings.mesh.run_dir else "no mesh.run_dir is set"
    try:
        private[0].parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_be_made(private[0], chosen, error) from None
    for path in private:
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise _cannot_be_made(path, chosen, error) from None
        try:
            found = path.lstat()
        except OSError as error:
            raise _cannot_be_made(path, chosen, error) from None
        if not stat.S_ISDIR(found.st_mode):
            raise RunDirError(
                f"run directory {path} ({chosen}) is not a directory: expected one of this user "
                "alone, or a path at which it can be made"
            )
        if found.st_uid != os.getuid():
            raise RunDirError(
                f"run directory {path} belongs to uid {found.st_uid}, not to {os.getuid()}: "
                "set mesh.run_dir to one of your own"
            )
        if mode := stat.S_IMODE(found.st_mode) & 0o077:
            raise RunDirError(
                f"run directory {path} is open to others (mode {mode | 0o700:o}): chmod 700 it"
            )
    socket_path(directory, "x" * 24)
    return directory


def _cannot_be_made(path: Path, chosen: str, error: OSError) -> RunDirError:
    return RunDirError(
        f"run directory {path} ({chosen}) cannot be made: {error.strerror}; expected a path at "
        "which this user can make a directory: set mesh.run_dir to one"
    )


def state_dir(settings: Settings) -> Path:
    """``mesh.state_dir``, else ``$XDG_STATE_HOME/moemesh/NAME``, else
    ``~/.local/state/moemesh/NAME``. Raises ``RunDirError`` for a user without a home.
    """
    if settings.mesh.state_dir:
        return Path(settings.mesh.state_dir)
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise RunDirError(f"no state directory: {error}; set mesh.state_dir") from None
    return base / "moemesh" / settings.mesh.name


def socket_path(directory: Path, name: str) -> Path:
    """``directory/name``, checked against the length limit of a Unix socket path."""
    path = directory / name
    if (size := len(os.fsencode(path))) > MAX_SOCKET_PATH_BYTES:
        raise RunDirError(
            f"socket path {path} has {size} bytes, more than {MAX_SOCKET_PATH_BYTES}: "
            "set mesh.run_dir to a shorter path"
        )
    return path


def planner_address(settings: Settings) -> str:
    return settings.mesh.planner or f"ipc://{socket_path(run_dir(settings), 'planner.sock')}"


def broadcast_address(settings: Settings) -> str:
    return settings.mesh.broadcast or f"ipc://{socket_path(run_dir(settings), 'broadcast.sock')}"


def router_address(settings: Settings, id: str) -> str:  # noqa: A002
    return listen_address(settings) or f"ipc://{socket_path(run_dir(settings), f'{id}.sock')}"


def lanes_path(settings: Settings, id: str) -> str:  # noqa: A002
    return str(socket_path(run_dir(settings), f"{id}.lanes"))


def bundles_address(settings: Settings, id: str) -> str:  # noqa: A002
    return listen_address(settings) or f"ipc://{socket_path(run_dir(settings), f'{id}.bundles')}"


class Claim:
    """Holds ``DIRECTORY/ID.pid`` under a lock that the kernel drops when the process ends."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Remove the file, then drop the lock, so that nobody finds a file without an owner."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def claim(directory: Path, id: str) -> Claim:  # noqa: A002
    """Make this process the only one of its id. Raises ``AlreadyRunning``, or ``RunDirError`` where
    nothing can be written.

    Two planners on one ``ipc://`` path would silently take each other's members.
    """
    path = directory / f"{id}.pid"
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RunDirError(f"{path} cannot be made: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(fd, 32).strip()
            os.close(fd)
            raise AlreadyRunning(id, int(pid) if pid.isdigit() else 0, directory) from None
        # The previous owner may have unlinked the file between our open and our lock.
        try:
            same = os.path.samestat(os.fstat(fd), path.stat())
        except FileNotFoundError:
            same = False
        if same:
            break
        os.close(fd)
    held = Claim(path, fd)
    try:
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
    except OSError as error:
        held.release()
        raise RunDirError(f"{path} cannot be written: {error.strerror}") from None
    return held


def running_pid(directory: Path, id: str) -> int | None:  # noqa: A002
    """Process id of the process of this id that runs in ``directory``, or None."""
    try:
        descriptor = os.open(directory / f"{id}.pid", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(descriptor, 32).strip()
        return int(text) if text.isdigit() else None
    else:
        return None
    finally:
        os.close(descriptor)


def running(directory: Path) -> dict[str, int]:
    """Id -> process id of what runs in ``directory``, in order of ids."""
    ids = sorted(path.stem for path in directory.glob("*.pid"))
    return {id_: pid for id_ in ids if (pid := running_pid(directory, id_)) is not None}


def take_along(settings: Settings) -> None:
    """For a process that has given up its claim: remove what belongs to the mesh if nobody is left
    in its run directory. Where the planner is reached from other hosts, the mesh may go on there.
    """
    directory = run_dir(settings)
    if not settings.mesh.planner and not running(directory):
        (directory / ORDERS).unlink(missing_ok=True)
