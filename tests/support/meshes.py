"""Start a real mesh (the launcher and its children) for a test, and look at it from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from compose.probes import PlannerProbe
from compose.status_view import document
from mesh.messages import Status
from mesh.settings import MeshSettings, Settings

MOEMESH = str(Path(sys.executable).with_name("moemesh"))
START_DEADLINE_S = 300.0
STOP_DEADLINE_S = 90.0
"""The launcher gives the processes of each of the four roles 16 s before it kills them."""
STATUS_DEADLINE_S = 5.0


def free_port(count: int = 1) -> int:
    """The first of ``count`` free ports in a row."""
    while True:
        with contextlib.ExitStack() as held:
            first = 0
            for index in range(count):
                probe = held.enter_context(socket.socket())
                try:
                    probe.bind(("127.0.0.1", first + index if first else 0))
                except OSError:
                    break
                first = first or int(probe.getsockname()[1])
            else:
                return first


class Mesh:
    """``with Mesh(model, experts=3) as mesh: mesh.url``: a running mesh in a directory of its own.

    Keyword settings are the configuration's ``section__key`` names; ``environment`` is added to
    its processes' own.
    """

    def __init__(
        self,
        model: Path | None = None,
        *,
        experts: int = 2,
        routers: int = 1,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.port = free_port(int(settings.get("mesh__gateways", 1)))
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = environment
        self._tls: ssl.SSLContext | None = None
        if "gateway__tls_cert" in settings:
            self.url = f"https://127.0.0.1:{self.port}"
            self._tls = ssl.create_default_context(cafile=str(settings["gateway__tls_cert"]))
        self._home = tempfile.TemporaryDirectory(prefix="moemesh-test-")
        self.run_dir = Path(self._home.name) / "run"
        command = [MOEMESH, "up", "--port", str(self.port)]
        command += ["--experts", str(experts), "--routers", str(routers)]
        if model is not None:
            command += ["--model", str(model)]
        places = {"mesh__run_dir": self.run_dir, "mesh__state_dir": Path(self._home.name) / "state"}
        for key, value in (places | settings).items():
            command += ["--set", f"{key.replace('__', '.', 1)}={value}"]
        self.command = command
        self.log = Path(self._home.name) / "launcher.log"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | (self._environment or {}),
            )
        try:
            self.wait_ready()
        except BaseException:
            self._stop()
            self._home.cleanup()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        self._home.cleanup()

    def wait_ready(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Until it serves and its launcher has seen that: a process that dies before then is one
        that did not start, and is told of differently.
        """
        self.wait_for(
            lambda: self.get("/ready")[0] == 200 and "ready after" in self.log.read_text(),
            "the mesh to be ready",
            deadline_s,
        )

    def wait_for(self, condition: Any, what: str, deadline_s: float = 90.0) -> None:
        """Poll an observable condition until it holds or the deadline passes."""
        end = time.monotonic() + deadline_s
        while not condition():
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"the launcher ended early:\n{self.logs()}")
            if time.monotonic() > end:
                raise AssertionError(f"waited {deadline_s} s for {what}:\n{self.logs()}")
            time.sleep(0.05)

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET; status 0 while nobody listens."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10, context=self._tls) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()
        except OSError:
            return 0, ""

    def post(self, path: str, body: Any, timeout_s: float = 120.0) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s, context=self._tls) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as refused:
            return refused.code, json.loads(refused.read())

    def run(self, *arguments: str, timeout_s: float = 60.0) -> str:
        """What ``moemesh ARGUMENTS`` prints about this mesh."""
        command = [MOEMESH, *arguments, "--set", f"mesh.run_dir={self.run_dir}"]
        done = subprocess.run(
            command, check=False, capture_output=True, timeout=timeout_s, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def status(self) -> dict[str, Any]:
        """What ``moemesh status --json`` prints, without a process for each look."""

        async def ask() -> Status | None:
            where = MeshSettings(run_dir=str(self.run_dir))
            async with PlannerProbe(Settings(mesh=where)) as planner:
                return await planner.status(STATUS_DEADLINE_S)

        status = asyncio.run(ask())
        assert status is not None, "no planner answers"
        return dict(json.loads(msgspec.json.encode(document(status))))

    def members(self, role: str) -> list[dict[str, Any]]:
        return [member for member in self.status()["members"] if member["role"] == role]

    def logs(self) -> str:
        """The launcher's output and the end of each process's log."""
        texts = [self.log.read_text(errors="replace")[-4000:]]
        texts += [
            f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}"
            for path in sorted((self.run_dir / "logs").glob("*.log"))
        ]
        return "\n".join(texts)

    def _stop(self) -> None:
        process = self.process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            words = f"the launcher did not stop in {STOP_DEADLINE_S} s:\n{self.logs()}"
            raise AssertionError(words) from None
