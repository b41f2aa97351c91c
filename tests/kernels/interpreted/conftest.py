"""Runs this folder's tests in Triton's interpreter.

The interpreter must be chosen before triton is imported and holds for the whole process, so the
tests run in a process of their own: a second pytest, started when the first of them is due, with
exactly the tests of this folder that the first pytest selected. It sends each outcome through a
pipe as a line of JSON, and the first pytest reports it as that test's.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
FOLDER = "tests/kernels/interpreted"
"""As pytest names it."""
REPORT_FD = "MOEMESH_INTERPRETED_REPORT_FD"
DEADLINE_S = 300.0
"""For one test; far beyond what any takes on a busy machine."""

POISON = 0x55
"""Of integers, even of eight bits."""

WORKER: pytest.StashKey[Worker] = pytest.StashKey()
BAD: pytest.StashKey[list[str]] = pytest.StashKey()
SKIPPED: pytest.StashKey[str] = pytest.StashKey()


class Worker:
    """The second pytest. ``outcome`` returns what it said of one test, and raises
    ``RuntimeError`` when it died or is silent for too long.
    """

    def __init__(self, tests: list[str], root: Path) -> None:
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._rest = b""
        self._held = contextlib.ExitStack()
        folder = Path(self._held.enter_context(tempfile.TemporaryDirectory()))
        self._log = folder / "log"
        names = folder / "tests"
        names.write_text("\n".join(tests))
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        self._held.callback(os.close, self._read)
        self._selector = self._held.enter_context(selectors.DefaultSelector())
        self._selector.register(self._read, selectors.EVENT_READ)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", ""]
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [*command, f"@{names}"],
                    cwd=root,
                    env={**os.environ, "TRITON_INTERPRET": "1", REPORT_FD: str(write)},
                    pass_fds=[write],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        finally:
            os.close(write)

    def outcome(self, test: str) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_S
        while test not in self._outcomes:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                os.killpg(self._process.pid, 9)  # the other tests' outcomes end here too
                raise RuntimeError(f"no outcome within {DEADLINE_S} s")
            piece = os.read(self._read, 1 << 16)
            if not piece:
                self._process.wait(DEADLINE_S)
                tail = self._log.read_bytes()[-4000:].decode(errors="replace")
                raise RuntimeError(f"pytest ended with {self._process.returncode}:\n{tail}")
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for line in lines:
                message = json.loads(line)
                self._outcomes[message["test"]] = message
        return self._outcomes[test]

    def close(self) -> None:
        """Kill it, and whatever its tests started, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        self._held.close()


def in_worker() -> bool:
    return REPORT_FD in os.environ


def pytest_configure() -> None:
    if in_worker():
        from ep_kernels.triton.interpreter import correct_interpreter

        correct_interpreter()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> bool | None:
    """Only the worker needs this folder's fixtures, some of which start processes."""
    if in_worker() or not fixturedef.baseid.startswith(FOLDER):
        return None
    fixturedef.cached_result = (None, fixturedef.cache_key(request), None)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if in_worker():
        return None
    config = pyfuncitem.config
    if WORKER not in config.stash:
        mine = [item.nodeid for item in pyfuncitem.session.items if HERE in item.path.parents]
        worker = config.stash[WORKER] = Worker(mine, config.rootpath)
        config.add_cleanup(worker.close)
    try:
        told = config.stash[WORKER].outcome(pyfuncitem.nodeid)
    except (RuntimeError, OSError, ValueError) as error:
        told = {"outcome": "failed", "text": f"the interpreter's process: {error}"}
    if told["outcome"] == "failed":
        pytest.fail(told["text"], pytrace=False)
    if told["outcome"] == "skipped":
        pytest.skip(told["text"])
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """In the worker: tell of a test once it is torn down, since that may fail as well."""
    made = yield
    if not in_worker():
        return
    report: pytest.TestReport = made.get_result()
    texts = item.stash.setdefault(BAD, [])
    if report.outcome == "failed":
        sections = [f"-- {heading} --\n{text}" for heading, text in report.sections]
        texts.append("\n".join([report.longreprtext, *sections]))
    elif report.outcome == "skipped":
        item.stash[SKIPPED] = report.longreprtext
    if report.when != "teardown":
        return
    skipped = item.stash.get(SKIPPED, None)
    outcome = "failed" if texts else "passed" if skipped is None else "skipped"
    message = {"test": item.nodeid, "outcome": outcome, "text": "\n".join(texts) or skipped or ""}
    line = json.dumps(message).encode() + b"\n"
    fd = int(os.environ[REPORT_FD])
    while line:
        line = line[os.write(fd, line) :]


@pytest.fixture
def rng() -> torch.Generator:
    """Fresh values each run; a failing test shows the seed (``MOEMESH_SEED`` repeats it)."""
    seed = int(os.environ.get("MOEMESH_SEED", random.getrandbits(32)))
    print(f"MOEMESH_SEED={seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What launchers allocate is full of NaN, or of a number that is none of the right ones: a
    kernel that leaves a value out cannot pass.
    """
    allocate = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = allocate(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else POISON)

    monkeypatch.setattr(torch, "empty", empty)
