"""The command line of ``moemesh``. Each subcommand is a module that is imported when called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version

import cyclopts
from rich.text import Text

from compose.options import UsageError
from mesh.config import close_name
from mesh.rundir import RunDirError


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; ``SystemExit`` (2) for one that cannot be
    parsed.
    """
    app = cyclopts.App(
        name="moemesh",
        help="Mixture-of-Experts serving as a mesh of independent services.",
        version=lambda: version("moemesh"),
        exit_on_error=False,
        error_formatter=_error_text,
    )
    for name, help_text in {
        "up": "Start a mesh on this host and stay until Ctrl-C.",
        "status": "Show the members of a mesh: states, slots, queues, epoch and balance.",
        "down": "Stop the mesh that `moemesh up` runs on this host.",
        "scale": "Have more or fewer processes of a role, while the mesh serves.",
        "restart": "Start processes again, one after another, while the mesh serves.",
        "drain": "Take all work off a member, so that it can be stopped at no cost.",
        "keygen": "Make the keys of a mesh's processes for TCP between them.",
        "apikey": "Make an API key and the lines of the file that let it in.",
        "logs": "Print the logs of a mesh's processes as one, by time.",
        "config": "Print the effective configuration and where each value came from.",
        "reference": "Complete a prompt with the whole model in this one process.",
        "doctor": "Say what this machine can do for a mesh, and what it lacks.",
        "version": "Print the versions of moemesh, its protocol and what it runs on.",
    }.items():
        app.command(f"compose.commands.{name}:{name}", name=name, help=help_text)
    app.command(
        "compose.commands.install_systemd:install_systemd",
        name="install-systemd",
        help="Write systemd units for the services of this host.",
    )
    app.command("compose.commands.bench:app", name="bench")
    app.command("compose.commands.plan:app", name="plan")
    try:
        return int(app(arguments) or 0)
    except cyclopts.CycloptsError:
        return 2
    except UsageError as error:
        print(f"moemesh: {error}", file=sys.stderr)
        return error.exit_code
    except RunDirError as error:
        print(f"moemesh: {error}", file=sys.stderr)
        return 1


def _error_text(error: cyclopts.CycloptsError) -> Text:
    if not isinstance(error, cyclopts.UnknownOptionError):
        return Text(f"moemesh: {error}")
    given = error.token.keyword or error.token.value
    known = [
        name
        for argument in error.argument_collection
        for name in argument.names
        if name.startswith("--")
    ]
    close = close_name(given.partition("=")[0], known)
    return Text(f"moemesh: unknown option {given}" + (f"; did you mean {close}?" if close else ""))
