"""The entry point of the ``moemesh`` command. Imports next to nothing by itself, so that it soon
decides what a signal does.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Runs the command line. Exit codes: 0, 1 (the mesh failed or is not there), 2 (bad usage)."""
    # While modules are imported there is nothing to clean up, and an exception in the middle of
    # one would show as a traceback: end at once. A script's ``moemesh up &`` comes with SIGINT
    # ignored and must end by it as well.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from compose.app import run  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        # Whoever read the output has seen enough. What is left to flush goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
