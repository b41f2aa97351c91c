"""Keeps the processes of one mesh running from the first start to the ordered stop."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from compose.child import Child
from compose.console import LauncherConsole
from compose.control import ControlServer, Order, OrderFailed
from compose.fleet import Fleet
from compose.holder import LOGS
from compose.log_file import LogFile, error_text
from compose.probes import PlannerProbe, gateway_readiness
from compose.processes import ADMIN, STOP_ORDER, ProcessSpec, endpoints
from compose.restarts import RestartBudget, RestartPolicy, exit_words
from compose.sample_request import curl_line
from mesh.admin import PlannerDesk
from mesh.exposure import keys_required
from mesh.links import Net
from mesh.messages import Member, Status
from mesh.rundir import planner_address
from mesh.service import drain_limit_s
from mesh.settings import Settings

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.2
_SERVES = frozenset({"ready", "draining"})
"""States of a process that has come up."""


class _Place:
    """A place in the mesh: the process that fills it now, and its history."""

    def __init__(self, spec: ProcessSpec, log: LogFile, policy: RestartPolicy) -> None:
        self.spec = spec
        self.log = log
        self.log_lacks = False
        """Its log loses lines, which was said."""
        self.budget = RestartBudget(policy)
        self.child: Child | None = None
        self.came_up: int | None = None
        """Process id of the newest that the planner has known to serve."""
        self.leaving = False
        """Its process is not to be started again."""
        self.renewing = False
        """Its process is to be started again at once: it ends because it was asked to."""
        self.woken = asyncio.Event()
        """There is a reason not to wait any longer with the next start."""
        self.over = asyncio.Event()
        """No process fills it, and none will."""


class Launcher:
    """Starts ``specs``, restarts what dies, stops all in ``STOP_ORDER``.

    A signal stops it, SIGHUP only where that is not ignored; no child is started after it.

    ``run_dir`` exists and belongs to this launcher alone; logs go to ``run_dir/logs``. A child
    that keeps dying before the mesh was ready ends the mesh; one that dies later is started again,
    however often. Once the mesh was ready it takes orders (``compose.control``), which
    ``fleet_of(launcher, planner)`` carries out.
    """

    def __init__(
        self,
        settings: Settings,
        specs: Sequence[ProcessSpec],
        run_dir: Path,
        console: LauncherConsole,
        *,
        model: str,
        fleet_of: Callable[[Launcher, PlannerDesk], Fleet],
        policy: RestartPolicy | None = None,
        grace_s: float = 10.0,
        start_timeout_s: float = 600.0,
    ) -> None:
        self._settings = settings
        self._console = console
        self._model = model
        self._fleet_of = fleet_of
        self._policy = policy or RestartPolicy()
        self._grace_s = grace_s
        self._start_timeout_s = start_timeout_s
        self._logs = run_dir / LOGS
        self._logs.mkdir(mode=0o700, exist_ok=True)
        self._places: dict[str, _Place] = {}
        for spec in specs:
            self._add(spec)
        self._group = asyncio.TaskGroup()
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
            self._console.starting(self._model, self.specs(), str(self._logs))
            self._incomplete.set()
            async with self._group as group:
                for place in self._places.values():
                    group.create_task(self._keep_alive(place))
                announcer = group.create_task(self._announce())
                orders = group.create_task(self._take_orders())
                await self._stopping.wait()
                announcer.cancel()
                orders.cancel()
                await self._stop_all()
            self._console.stopped(kept_logs=str(self._logs) if self._failure else "")
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
            for place in self._places.values():
                place.log.close()
        return 1 if self._failure else 0

    # -------------------------------------------------------------- the fleet's crew

    def specs(self) -> list[ProcessSpec]:
        """The processes that are to run."""
        return [place.spec for place in self._places.values()]

    def missing(self, status: Status, ids: Iterable[str]) -> dict[str, str]:
        """Which of ``ids`` the planner does not know, as they run now, to be ready; and how they
        are.
        """
        known = {member.id: member for member in status.view.members}
        found = {}
        for id_ in ids:
            place, member = self._places.get(id_), known.get(id_)
            pid = None if place is None or place.child is None else place.child.pid
            if member is None or member.pid != pid:
                found[id_] = "starting"
            elif member.state not in _SERVES:
                # In coarse steps: it is said with each change.
                found[id_] = f"{member.state} {int(member.progress * 20) * 5} %"
        return found

    def hire(self, spec: ProcessSpec) -> None:
        """Starts one more process."""
        self._group.create_task(self._keep_alive(self._add(spec)))

    async def dismiss(self, id_: str) -> None:
        """Lets a process leave, and returns when it has ended; its place is given up."""
        place = self._places[id_]
        place.leaving = True
        await self._let_leave(place)
        await place.over.wait()
        del self._places[id_]
        place.log.close()

    async def renew(self, id_: str, spec: ProcessSpec | None = None) -> None:
        """Lets a process leave; it is started again at once, by ``spec`` if given. Returns when the
        old one has ended.
        """
        place = self._places[id_]
        place.spec = spec or place.spec
        place.renewing = place.child is not None and place.child.pid is not None
        await self._let_leave(place)

    async def _let_leave(self, place: _Place) -> None:
        place.woken.set()
        child = place.child
        if child is None:
            return
        limit_s = drain_limit_s(self._settings, place.spec.role) + self._grace_s
        if not await child.leave(limit_s):
            self._console.killed(place.spec, limit_s)

    def _add(self, spec: ProcessSpec) -> _Place:
        place = _Place(spec, LogFile(self._logs / f"{spec.id}.log"), self._policy)
        self._places[spec.id] = place
        return place

    async def _take_orders(self) -> None:
        net = Net(self._settings.security, ADMIN)
        try:
            fleet = self._fleet_of(self, PlannerDesk(net, planner_address(self._settings)))

            async def carry_out(order: Order, say: Callable[[str], None]) -> None:
                if not self._was_ready:
                    raise OrderFailed("the mesh is still starting")

                def both(text: str) -> None:
                    self._console.progress(text)
                    say(text)

                try:
                    await fleet.carry_out(order, both)
                except OrderFailed as error:
                    self._console.progress(f"given up: {error}")
                    raise
                except Exception as error:
                    # A bug costs the order, not the mesh.
                    self._console.progress(traceback.format_exc())
                    raise OrderFailed(f"{type(error).__name__}: {error}") from error

            await ControlServer(net, self._settings, carry_out).run()
        finally:
            net.close()

    # -------------------------------------------------------------- from start to stop

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            for place in self._places.values():
                if place.child is not None:
                    place.child.kill()
            return
        self._console.stopping()
        self._stop()

    def _fail(self, reason: str) -> None:
        if not self._stopping.is_set():
            self._failure = reason
            self._console.failed(reason)
            self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        for place in self._places.values():
            place.woken.set()

    async def _keep_alive(self, place: _Place) -> None:
        try:
            while not (self._stopping.is_set() or place.leaving):
                exit_code = await self._live(place)
                if exit_code is None or self._stopping.is_set() or place.leaving:
                    return
                if place.renewing:
                    place.renewing = False
                elif not await self._get_over(place, exit_code):
                    return
        finally:
            place.over.set()

    async def _live(self, place: _Place) -> int | None:
        """Runs one process to its end; None if it was not started any more."""
        spec = place.spec

        def on_line(line: bytes) -> None:
            if (text := error_text(line)) is not None:
                self._console.child_error(spec, text)
            if bool(place.log.fault) is not place.log_lacks:
                place.log_lacks = not place.log_lacks
                self._console.log_changed(place.log.path, place.log.fault)

        async with self._starts:
            if self._stopping.is_set() or place.leaving:
                return None
            place.child = Child(spec, place.log, on_line)
            await place.child.start()
        return await place.child.run()

    async def _get_over(self, place: _Place, exit_code: int) -> bool:
        """Reports a death and waits until the next start; False if the mesh ends instead."""
        delay_s = place.budget.died(exit_code, time.monotonic(), served=self._was_ready)
        how = exit_words(exit_code)
        self._console.child_died(place.spec, how, place.log.tail(), delay_s)
        self._incomplete.set()
        if delay_s is None:
            self._fail(f"{place.spec.id} {how} before the mesh was ready")
            return False
        place.woken.clear()
        if not self._stopping.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await place.woken.wait()
        return True

    async def _stop_all(self) -> None:
        for role in STOP_ORDER:
            places = [one for one in self._places.values() if one.spec.role == role]
            children = [one.child for one in places if one.child is not None]
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
                    needs_key = keys_required(self._settings.gateway, os.environ)
                    request = curl_line(where[0], self._model, needs_key=needs_key)
                    name = self._settings.mesh.name
                    self._console.ready(where, self._model, seconds, request, name)

    def _shown(self, members: Sequence[Member]) -> list[ProcessSpec]:
        """What there is to tell of: processes that have not come up yet, and others of which the
        planner knows more than a planner does that was only just started.
        """
        known = {member.id: member for member in members}
        shown = []
        for id_, place in self._places.items():
            pid = None if place.child is None else place.child.pid
            member = known.get(id_)
            if member is not None and (member.pid != pid or member.state == "joining"):
                member = None
            if member is not None and member.state in _SERVES:
                place.came_up = pid
            if member is not None or pid is None or place.came_up != pid:
                shown.append(place.spec)
        return shown

    async def _until_whole(self, planner: PlannerProbe) -> None:
        while True:
            self._incomplete.clear()
            status = await planner.status(timeout_s=1.0)
            members = status.view.members if status is not None else ()
            self._console.waiting(self._shown(members), members)
            if status is not None and not self.missing(status, self._places):
                gateways = sum(spec.role == "gateway" for spec in self.specs())
                answers = [
                    await gateway_readiness(endpoint, timeout_s=2.0)
                    for endpoint in endpoints(self._settings, gateways)
                ]
                if not any(answers) and not self._incomplete.is_set():
                    return
            await asyncio.sleep(_POLL_S)
