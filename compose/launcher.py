"""Keeps the processes of one mesh running from the first start to the ordered stop."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from compose.child import Child
from compose.console import LauncherConsole
from compose.holder import LOGS
from compose.log_file import LogFile, error_text
from compose.probes import PlannerProbe, gateway_readiness
from compose.processes import STOP_ORDER, ProcessSpec, endpoints
from compose.restarts import RestartBudget, RestartPolicy, exit_words
from compose.sample_request import curl_line
from mesh.messages import Status
from mesh.settings import Settings

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.2


class _Supervised:
    """A place in the mesh: the process that fills it now, and its history."""

    def __init__(self, spec: ProcessSpec, log: LogFile, policy: RestartPolicy) -> None:
        self.spec = spec
        self.log = log
        self.budget = RestartBudget(policy)
        self.child: Child | None = None


class Launcher:
    """Starts ``specs``, restarts what dies, stops all in ``STOP_ORDER``.

    A signal stops it, SIGHUP only where that is not ignored; no child is started after it.

    ``run_dir`` exists and belongs to this launcher alone; logs go to ``run_dir/logs``. A child
    that keeps dying before the mesh was ready ends the mesh; one that dies later is started again,
    however often.
    """

    def __init__(
        self,
        settings: Settings,
        specs: Sequence[ProcessSpec],
        run_dir: Path,
        console: LauncherConsole,
        *,
        model: str,
        policy: RestartPolicy | None = None,
        grace_s: float = 10.0,
        start_timeout_s: float = 600.0,
    ) -> None:
        self._settings = settings
        self._console = console
        self._model = model
        self._grace_s = grace_s
        self._start_timeout_s = start_timeout_s
        self._logs = run_dir / LOGS
        self._logs.mkdir(mode=0o700, exist_ok=True)
        self._children = [
            _Supervised(spec, LogFile(self._logs / f"{spec.id}.log"), policy or RestartPolicy())
            for spec in specs
        ]
        self._stopping = asyncio.Event()
        self._incomplete = asyncio.Event()
        # One start after another, so that a signal is seen between two of them.
        self._starts = asyncio.Lock()
        self._was_ready = False
        self._failure: str | None = None

    async def run(self) -> int:
        """Runs until a signal or until the mesh cannot go on. Returns the exit code: 0 or 1.

        No child is left when it returns or raises. After 1 the logs are worth keeping.
        """
        loop = asyncio.get_running_loop()
        # nohup says with an ignored SIGHUP that the mesh is to outlive its terminal.
        hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        signals = (*_SIGNALS, *hang_up)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        try:
            self._console.starting(
                self._model, [one.spec for one in self._children], str(self._logs)
            )
            async with asyncio.TaskGroup() as group:
                for supervised in self._children:
                    group.create_task(self._keep_alive(supervised))
                announcer = group.create_task(self._announce())
                await self._stopping.wait()
                announcer.cancel()
                await self._stop_all()
            self._console.stopped(kept_logs=str(self._logs) if self._failure else "")
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
            for supervised in self._children:
                supervised.log.close()
        return 1 if self._failure else 0

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            for supervised in self._children:
                if supervised.child is not None:
                    supervised.child.kill()
            return
        self._console.stopping()
        self._stopping.set()

    def _fail(self, reason: str) -> None:
        if not self._stopping.is_set():
            self._failure = reason
            self._console.failed(reason)
            self._stopping.set()

    async def _keep_alive(self, supervised: _Supervised) -> None:
        spec = supervised.spec

        def on_line(line: bytes) -> None:
            if (text := error_text(line)) is not None:
                self._console.child_error(spec, text)

        while not self._stopping.is_set():
            self._incomplete.set()
            async with self._starts:
                if self._stopping.is_set():
                    return
                supervised.child = Child(spec, supervised.log, on_line)
                await supervised.child.start()
            exit_code = await supervised.child.run()
            if self._stopping.is_set():
                return
            delay_s = supervised.budget.died(exit_code, time.monotonic(), served=self._was_ready)
            how = exit_words(exit_code)
            self._console.child_died(spec, how, supervised.log.tail(), delay_s)
            self._incomplete.set()
            if delay_s is None:
                self._fail(f"{spec.id} {how} before the mesh was ready")
                return
            try:
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    async def _stop_all(self) -> None:
        for role in STOP_ORDER:
            members = [one for one in self._children if one.spec.role == role]
            children = [one.child for one in members if one.child is not None]
            in_time = await asyncio.gather(*(child.stop(self._grace_s) for child in children))
            for child, was_in_time in zip(children, in_time, strict=True):
                if not was_in_time:
                    self._console.killed(child.spec, self._grace_s)

    async def _announce(self) -> None:
        """Says when the mesh can run a token: after the start, and after each loss."""
        async with PlannerProbe(self._settings) as planner:
            while True:
                await self._incomplete.wait()
                began = time.monotonic()
                try:
                    async with asyncio.timeout(None if self._was_ready else self._start_timeout_s):
                        await self._until_whole(planner)
                except TimeoutError:
                    self._fail(f"the mesh was not ready after {self._start_timeout_s:g} s")
                    return
                seconds = time.monotonic() - began
                if self._was_ready:
                    self._console.recovered(seconds)
                else:
                    self._was_ready = True
                    where = endpoints(self._settings)
                    request = curl_line(where[0], self._model)
                    self._console.ready(where, self._model, seconds, request)

    async def _until_whole(self, planner: PlannerProbe) -> None:
        while True:
            self._incomplete.clear()
            status = await planner.status(timeout_s=1.0)
            members = status.view.members if status is not None else ()
            self._console.waiting([one.spec for one in self._children], members)
            if status is not None and self._whole(status):
                answers = [
                    await gateway_readiness(endpoint, timeout_s=2.0)
                    for endpoint in endpoints(self._settings)
                ]
                if not any(answers) and not self._incomplete.is_set():
                    return
            await asyncio.sleep(_POLL_S)

    def _whole(self, status: Status) -> bool:
        """Every process that is to run is known to the planner, as it runs now, and ready."""
        known = {member.id: member for member in status.view.members}
        for supervised in self._children:
            if supervised.spec.role in {"planner", "gateway"}:
                continue
            member = known.get(supervised.spec.id)
            pid = supervised.child.pid if supervised.child is not None else None
            if member is None or member.state != "ready" or member.pid != pid:
                return False
        return True
