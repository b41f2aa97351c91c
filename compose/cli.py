"""The ``moemesh`` command. Each subcommand is a module that is imported when it is called."""

from __future__ import annotations

import signal
import sys
from importlib.metadata import version

import cyclopts

from compose.options import UsageError

app = cyclopts.App(
    name="moemesh",
    help="Mixture-of-Experts serving as a mesh of independent services.",
    version=lambda: version("moemesh"),
)

for _name, _help in {
    "up": "Start a mesh on this host and stay until Ctrl-C.",
    "status": "Show the members of a mesh: states, slots, queues, epoch and balance.",
    "down": "Stop the mesh that `moemesh up` runs on this host.",
    "config": "Print the effective configuration and where each value came from.",
    "reference": "Complete a prompt with the whole model in this one process.",
    "version": "Print the versions of moemesh, its protocol and what it runs on.",
}.items():
    app.command(f"compose.commands.{_name}:{_name}", name=_name, help=_help)
app.command("compose.commands.bench:app", name="bench")


def main() -> None:
    """Runs the command line. Exit codes: 0, 1 (the mesh failed or is not there), 2 (bad usage)."""
    try:
        sys.exit(app(sys.argv[1:]))
    except UsageError as error:
        print(f"moemesh: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
