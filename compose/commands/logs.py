"""``moemesh logs``: the logs of a mesh's processes as one, by time."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from compose.holder import LOGS
from compose.log_file import readable
from compose.log_merge import Filter, Line, LogReader
from compose.options import Source, UsageError
from mesh.rundir import run_dir, running

_LOOK_S = 0.2


def logs(
    *members: Annotated[str, Parameter(help="Processes, such as router-0; none: all.")],
    source: Source = Source(),  # noqa: B008 (frozen)
    follow: Annotated[
        bool, Parameter(negative=(), help="Go on with what is written, until Ctrl-C.")
    ] = False,
    request: Annotated[
        str,
        Parameter(
            help="Only what belongs to a request: its X-Request-Id, or the id in its answer."
        ),
    ] = "",
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Parameter(help="The least severe events that are shown."),
    ] = "debug",
    tail: Annotated[
        int | None, Parameter(help="Of what was written before, only the last lines.")
    ] = None,
    json: Annotated[bool, Parameter(negative=(), help="Lines as they were written.")] = False,
) -> int:
    """Print the logs of the processes that `moemesh up` runs on this host as one, by time.

    A line that is no event, such as an interpreter's last words, is shown at every level.
    """
    if tail is not None and tail < 0:
        raise UsageError(f"--tail {tail}: expected 0 or more")
    home = run_dir(source.effective().settings)
    directory = home / LOGS
    known = sorted(path.stem for path in directory.glob("*.log"))
    if not known:
        raise UsageError(_nothing_in(home), exit_code=1)
    if strangers := [member for member in members if member not in known and not follow]:
        raise UsageError(f"no log of {', '.join(strangers)}; expected {', '.join(known)}")
    wanted = Filter(request=request, level=level)
    reader = LogReader(directory, members)
    found = 0

    def history() -> Iterator[Line]:
        nonlocal found
        for line in reader.history():
            if wanted.wants(line):
                found += 1
                yield line

    try:
        _print(history() if tail is None else deque(history(), tail), as_written=json)
        if request and not found and not follow:
            raise UsageError(
                f"no line of a request {request!r} in {directory}: expected a client's "
                "X-Request-Id, or the id in an answer",
                exit_code=1,
            )
        while follow and directory.is_dir():
            time.sleep(_LOOK_S)
            _print(filter(wanted.wants, reader.news()), as_written=json)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        reader.close()
    return 0


def _nothing_in(home: Path) -> str:
    """Why there are no logs there, and where they are."""
    alone = running(home)
    if not alone:
        return f"no logs in {home / LOGS}: is the mesh up, and is this its mesh.name?"
    where = "\n".join(f"  {id_} (pid {pid}): {_standard_error(pid)}" for id_, pid in alone.items())
    return (
        f"no logs in {home / LOGS}: only `moemesh up` writes them there. These services were "
        f"started by themselves and log to their standard error:\n{where}"
    )


def _standard_error(pid: int) -> str:
    """Where it goes, in words."""
    try:
        target = str(Path(f"/proc/{pid}/fd/2").readlink())
    except OSError:
        return "not to be seen from here"
    if target.startswith("/"):
        return target
    return f"read by who started it; under systemd: journalctl _PID={pid}"


def _print(lines: Iterable[Line], *, as_written: bool) -> None:
    for line in lines:
        if as_written:
            sys.stdout.write(f"{line.text}\n")
        else:
            sys.stdout.write(f"{line.member:<9} {readable(line.text)}\n")
    sys.stdout.flush()
