"""The launcher's own socket: what ``moemesh scale`` and ``moemesh restart`` ask of it.

API
    ``ControlServer(net, settings, carry_out).run()``      the launcher's end
    ``await order(settings, Scale(...), told)``            the command's end

It is ``RUN_DIR/launcher.sock``, of mode 0600 in a directory of mode 0700. One order is carried out
at a time, to its end even if whoever gave it has gone; a second one is refused meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from compose.options import UsageError
from compose.processes import ADMIN
from mesh.links import ClientLink, LinkClosed, Net, ServerLink
from mesh.rundir import run_dir, socket_path
from mesh.settings import Settings

_CONNECT_S = 3.0
_END_S = 1.0
"""How long the end of an order waits to be sent."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Scale(_Message, frozen=True, kw_only=True):
    """Have so many processes of these roles, as long as the mesh is up."""

    counts: dict[str, int]


class Restart(_Message, frozen=True, kw_only=True):
    """Start these members again, one after another; none named: all."""

    members: tuple[str, ...] = ()


class Progress(_Message, frozen=True, kw_only=True):
    """What is being done, in words."""

    text: str


class Finished(_Message, frozen=True, kw_only=True):
    """The order is carried out, or, with ``error``, is not."""

    error: str = ""


Order = Scale | Restart
FromLauncher = Progress | Finished


class OrderFailed(Exception):
    """An order cannot be carried out (any further); the text says why, and what was left how."""


CarryOut = Callable[[Order, Callable[[str], None]], Awaitable[None]]


def control_address(settings: Settings) -> str:
    return f"ipc://{socket_path(run_dir(settings), 'launcher.sock')}"


class ControlServer:
    """Takes orders; ``carry_out(order, say)`` raises ``OrderFailed``."""

    def __init__(self, net: Net, settings: Settings, carry_out: CarryOut) -> None:
        """Listen. Raises ``LinkError``."""
        self._carry_out = carry_out
        self._busy = ""
        self._link: ServerLink[Order, FromLauncher] = ServerLink(
            net, control_address(settings), receives=Order
        )

    async def run(self) -> None:
        """Until cancelled; an order that is under way is cancelled then too."""
        try:
            async with asyncio.TaskGroup() as orders:
                while True:
                    peer, order = await self._link.recv()
                    if self._busy:
                        reason = f"the launcher is busy: {self._busy}"
                        self._link.send(peer, Finished(error=reason))
                    else:
                        self._busy = type(order).__name__.lower()
                        orders.create_task(self._answer(peer, order))
        finally:
            self._link.close()

    async def _answer(self, peer: bytes, order: Order) -> None:
        error = "the mesh is stopping"
        try:
            await self._carry_out(order, lambda text: self._tell(peer, Progress(text=text)))
            error = ""
        except OrderFailed as failed:
            error = str(failed)
        finally:
            self._busy = ""
            self._tell(peer, Finished(error=error))

    def _tell(self, peer: bytes, message: FromLauncher) -> None:
        self._link.send(peer, message)  # False: whoever asked has gone


async def order(settings: Settings, message: Order, told: Callable[[str], None]) -> None:
    """Have the launcher carry out ``message``; ``told`` gets each ``Progress``. Raises
    ``UsageError`` when no launcher is there, or it fails.
    """
    net = Net(settings.security, ADMIN)
    lost = asyncio.Event()
    link: ClientLink[FromLauncher, Order] = ClientLink(
        net, control_address(settings), receives=FromLauncher, on_down=lost.set
    )
    try:
        try:
            async with asyncio.timeout(_CONNECT_S):
                await link.wait_up()
        except TimeoutError:
            directory = run_dir(settings)
            raise UsageError(
                f"no mesh was started by `moemesh up` in {directory}", exit_code=1
            ) from None
        link.send(message)
        if error := await _outcome(link, lost, told):
            raise UsageError(error, exit_code=1)
    finally:
        link.close()
        net.close()


async def _outcome(
    link: ClientLink[FromLauncher, Order], lost: asyncio.Event, told: Callable[[str], None]
) -> str:
    async def end() -> str:
        while True:
            match await link.recv():
                case Progress(text=text):
                    told(text)
                case Finished(error=error):
                    return error

    ending = asyncio.ensure_future(end())
    gone = asyncio.ensure_future(lost.wait())
    try:
        await asyncio.wait([ending, gone], return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            await asyncio.wait([ending], timeout=_END_S)  # it may have said how it ended
        return ending.result() if ending.done() else "the launcher has ended"
    except LinkClosed:
        return "the launcher has ended"
    finally:
        for task in (ending, gone):
            task.cancel()
            await asyncio.wait([task])
