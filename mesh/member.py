"""A member's end of its talk with the planner: one actor that outlives any planner.

API (everything on the event loop's thread; from another one use ``loop.call_soon_threadsafe``)
    ::

        member = Member(
            ctx.net, planner_address(ctx.settings),
            hello=lambda: Hello(id=ctx.id, role=ctx.role, ...),   # asked again at each Hello
            load=lambda: Load(...),                               # asked at each heartbeat
            on_view=apply_view,                                   # each newer View
            on_command=apply_command,                             # a Command; may come twice
            log=ctx.log,
        )
        supervisor.start("member", member.run)

    ``member.set_state("loading", detail="reading weights", progress=0.4)``
    ``member.report_now()``                       heartbeat at once, for what ``load`` says now
    ``member.send(SlotsReady(...)) -> bool``      False while no planner has welcomed us
    ``member.view``                               newest ``View``, or None
    ``await request_status(net, address, timeout_s) -> Status``      what ``moemesh status`` asks

``run()`` returns only by cancellation (it then says ``Goodbye``) or raises ``RefusedByPlanner``.
A planner that dies and comes back, or is not there yet, is waited for without limit: the member
serves on with what it knows. It says ``Hello`` on each new connection, when a planner does not
know it, and again until it is welcomed; each ``Hello`` brings the newest placement that it knows.

Callbacks must be quick and must not raise.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec
from structlog.typing import FilteringBoundLogger

from mesh.links import ClientLink, LinkClosed, Net, Subscriber, request
from mesh.messages import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    AssignSlots,
    FromPlanner,
    GetStatus,
    GetView,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    MemberState,
    Record,
    Refused,
    Status,
    ToPlanner,
    Unknown,
    View,
    Welcome,
)
from mesh.supervise import CannotServe, ExitCode, first_error

HELLO_AGAIN_S = 1.0
"""Pause before Hello is repeated to a planner that has not answered, or said to try again."""
PROMPT_HEARTBEAT_S = 0.02
"""A change of state is reported after this, so that a burst of changes makes one message."""


Command = AssignSlots | Record
"""What a planner tells a member to do. It is repeated until the answer carries its number."""


class RefusedByPlanner(CannotServe):
    """The mesh does not take this process: it must exit. Attribute: ``reason``."""

    exit_code = ExitCode.REFUSED

    def __init__(self, reason: str) -> None:
        super().__init__(f"refused by the planner: {reason}")
        self.reason = reason


class Member:
    """See the module's docstring."""

    def __init__(
        self,
        net: Net,
        planner_address: str,
        *,
        hello: Callable[[], Hello],
        load: Callable[[], Load],
        on_view: Callable[[View], None],
        on_command: Callable[[Command], None] | None = None,
        log: FilteringBoundLogger,
        state: MemberState = "joining",
    ) -> None:
        self._net = net
        self._address = planner_address
        self._hello = hello
        self._load = load
        self._on_view = on_view
        self._on_command = on_command
        self._log = log
        self._state: MemberState = state
        self._detail = ""
        self._progress = 1.0
        self._link: ClientLink[FromPlanner, ToPlanner] | None = None
        self._said: Hello | None = None
        self._welcome: Welcome | None = None
        self._welcomed_anew = False
        self._wake = asyncio.Event()
        """Something to tell the planner now rather than with the next heartbeat."""
        self._subscribe = asyncio.Event()
        self._subscriber: Subscriber[View] | None = None
        self.view: View | None = None
        """Newest snapshot of the mesh, or None before the first."""

    @property
    def state(self) -> MemberState:
        return self._state

    @property
    def detail(self) -> str:
        """What was said with the state, in words."""
        return self._detail

    @property
    def welcomed(self) -> bool:
        """Whether a planner knows this member on the present connection."""
        return self._welcome is not None

    def set_state(self, state: MemberState, *, detail: str = "", progress: float = 1.0) -> None:
        """What the next heartbeats say; a change of state or detail is sent at once.

        ``state``: joining, loading, ready or draining; the others are the planner's to say.
        """
        if (state, detail) != (self._state, self._detail):
            self._wake.set()
        self._state, self._detail, self._progress = state, detail, progress

    def report_now(self) -> None:
        """Send the next heartbeat at once: something in ``load`` is waited for."""
        self._wake.set()

    def send(self, message: ToPlanner) -> bool:
        """False: no planner is there to take it, nothing was sent."""
        return self._welcome is not None and self._link is not None and self._link.send(message)

    async def run(self) -> None:
        """Belong to the mesh until cancelled. Raises ``RefusedByPlanner``."""
        self._link = ClientLink(
            self._net,
            self._address,
            receives=FromPlanner,
            on_up=self._on_up,
            on_down=self._on_down,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(self._link), name="member.receive")
                tasks.create_task(self._report(self._link), name="member.report")
                tasks.create_task(self._listen(), name="member.listen")
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            if (me := self._said) is not None:
                self.send(Goodbye(id=me.id, incarnation=me.incarnation, reason="stopped"))
            self._link.close()
            self._link = None
            self._welcome = None

    def _on_up(self) -> None:
        self._welcome = None
        self._wake.set()

    def _on_down(self) -> None:
        if self._welcome is not None:
            self._log.warning("planner.lost", address=self._address)
        self._welcome = None

    async def _report(self, link: ClientLink[FromPlanner, ToPlanner]) -> None:
        """Say Hello until welcomed, then beat; sleeps while there is no connection."""
        while True:
            await link.wait_up()
            self._wake.clear()
            welcome = self._welcome
            if welcome is None:
                self._said = self._present_itself()
                link.send(self._said)
                pause_s = HELLO_AGAIN_S
            else:
                link.send(self._heartbeat())
                pause_s = welcome.heartbeat_ms / 1000
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
                await asyncio.sleep(PROMPT_HEARTBEAT_S)

    def _present_itself(self) -> Hello:
        return msgspec.structs.replace(
            self._hello(),
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            placement=None if self.view is None else self.view.placement,
        )

    def _heartbeat(self) -> Heartbeat:
        assert self._said is not None, "a welcome answers a Hello"
        return Heartbeat(
            id=self._said.id,
            incarnation=self._said.incarnation,
            state=self._state,
            load=self._load(),
            detail=self._detail,
            progress=self._progress,
            view_version=0 if self.view is None else self.view.version,
        )

    async def _receive(self, link: ClientLink[FromPlanner, ToPlanner]) -> None:
        while True:
            match await link.recv():
                case View() as view:
                    if self._welcomed_anew and not self._is_of_same_planner(view):
                        # The first from a planner that welcomed us is right by definition, even
                        # if the clock that it numbers its views by has gone back.
                        self._apply(view)
                    else:
                        self._take(view)
                    self._welcomed_anew = False
                case AssignSlots() | Record() as command:
                    if self._on_command is None:
                        self._log.warning("command.unexpected", command=command.command)
                    else:
                        self._on_command(command)
                case Welcome() as welcome:
                    self._log.info("planner.welcomed", protocol=welcome.protocol)
                    self._welcome = welcome
                    self._welcomed_anew = True
                    self._subscribe.set()
                    if self._subscriber and self._subscriber.address != welcome.broadcast:
                        self._subscriber.close()
                    self._wake.set()
                    link.send(GetView())
                case Unknown():
                    if self._welcome is not None:
                        self._log.warning("planner.forgot_us", address=self._address)
                    self._welcome = None
                    self._wake.set()
                case Refused(reason=reason, retry=retry):
                    if not retry:
                        raise RefusedByPlanner(reason)
                    self._log.warning("planner.refused_for_now", reason=reason)
                    self._welcome = None
                case Status():
                    pass

    async def _listen(self) -> None:
        """Receive broadcasts from where the newest Welcome says that they are."""
        while True:
            await self._subscribe.wait()
            self._subscribe.clear()
            if self._welcome is None:
                continue
            self._subscriber = Subscriber(self._net, self._welcome.broadcast, receives=View)
            try:
                while True:
                    self._take(await self._subscriber.recv())
            except LinkClosed:
                continue  # broadcasts have moved
            finally:
                self._subscriber.close()
                self._subscriber = None

    def _is_of_same_planner(self, view: View) -> bool:
        """Whether the process that made it made ours too, whose broadcast may have come first."""
        maker = _maker(view)
        return self.view is not None and maker != 0 and maker == _maker(self.view)

    def _take(self, view: View) -> None:
        if self.view is None or view.version > self.view.version:
            self._apply(view)

    def _apply(self, view: View) -> None:
        self.view = view
        self._on_view(view)


def _maker(view: View) -> int:
    """Incarnation of the planner whose view it is; 0 if it does not say."""
    return next((m.incarnation for m in view.members if m.role == "planner"), 0)


async def request_status(net: Net, planner_address: str, timeout_s: float) -> Status:
    """Ask a planner how its mesh is. Raises ``TimeoutError`` when none answers."""
    return await request(
        net, planner_address, GetStatus(), receives=FromPlanner, want=Status, timeout_s=timeout_s
    )
