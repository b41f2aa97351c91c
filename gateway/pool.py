"""The gateway's links to all routers: connect, ping, read, and tell the sequence table.

One DEALER per router of the newest view, one reading task each. Losing the connection, or silence
on it, moves the router's sequences elsewhere at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from structlog.typing import FilteringBoundLogger

from gateway.routers import Routers
from gateway.sequences import SequenceTable
from mesh.links import ClientLink, LinkClosed, LinkError, Net
from mesh.messages import FromRouter, Member, Ping, Pong, Rejected, Tokens, ToRouter, View

PING_S = 0.4

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Pool:
    """Routers as this gateway reaches them.

    ``table``: the sequences in the mesh. ``routers``: owned by the pool from now on. ``spawn``
    runs reading tasks under the service's supervision.
    """

    def __init__(
        self,
        net: Net,
        *,
        gateway: str,
        incarnation: int,
        routers: Routers,
        router_wait_s: float,
        spawn: Spawn,
        log: FilteringBoundLogger,
    ) -> None:
        self._net = net
        self._ping = Ping(gateway=gateway, incarnation=incarnation)
        self._spawn = spawn
        self._log = log
        self._stopping = False
        self.drained = False
        """An administrator wants this gateway to get no more requests; it serves those that come
        all the same."""
        self._was_ready = False
        self._links: dict[str, ClientLink[FromRouter, ToRouter]] = {}
        self._routers = routers
        self.table = SequenceTable(self._routers, self._send, router_wait_s=router_wait_s)

    def why_not_ready(self) -> str:
        """Empty when the mesh can run a token, else why not."""
        if self._stopping:
            return "the gateway is stopping"
        return "the gateway drains" if self.drained else self._routers.why_not_ready()

    def stop(self) -> None:
        """From now on not ready; what runs goes on."""
        self._stopping = True

    def _note_readiness(self) -> None:
        why = self.why_not_ready()
        if (not why) != self._was_ready:
            self._was_ready = not why
            if why:
                self._log.warning("mesh.became_unready", reason=why)
            else:
                self._log.info("mesh.became_ready")

    def apply_view(self, view: View) -> None:
        """Connect to new routers and let go of those that are gone."""
        added, gone = self._routers.apply(view)
        for id_ in gone:
            self._close(id_)
            self._lose(id_, "left the mesh")
        for member in added:
            self._connect(member)
        self._note_readiness()

    async def run(self) -> None:
        """Ping every router, notice silent ones, retry what waits; until cancelled."""
        try:
            while True:
                for link in self._links.values():
                    if link.up:
                        link.send(self._ping)
                await asyncio.sleep(PING_S)
                now = time.monotonic()
                quiet, hung = self._routers.silent(now)
                for id_ in quiet:
                    moved = self.table.on_router_quiet(id_, now)
                    self._log.warning("router.quiet", router=id_, moved=moved)
                for id_ in hung:
                    self._lose(id_, "fell silent")
                self.table.place_waiting(now)
                self._note_readiness()
        finally:
            for id_ in list(self._links):
                self._close(id_)

    def _send(self, router: str, message: ToRouter) -> bool:
        link = self._links.get(router)
        return link is not None and link.send(message)

    def _connect(self, member: Member) -> None:
        id_ = member.id
        try:
            link: ClientLink[FromRouter, ToRouter] = ClientLink(
                self._net,
                member.control,
                receives=FromRouter,
                server=id_,
                on_up=lambda: self._on_up(id_),
                on_down=lambda: self._on_down(id_),
            )
        except LinkError as error:
            self._log.error("router.unreachable", router=id_, reason=str(error))
            return
        self._links[id_] = link
        self._spawn(self._read(id_, link))

    def _close(self, id_: str) -> None:
        link = self._links.pop(id_, None)
        if link is not None:
            link.close()  # which ends its reader

    def _on_up(self, id_: str) -> None:
        self._log.info("router.connected", router=id_)
        self._routers.link_changed(id_, up=True, now=time.monotonic())
        link = self._links.get(id_)
        if link is not None:
            link.send(self._ping)

    def _on_down(self, id_: str) -> None:
        self._routers.link_changed(id_, up=False, now=time.monotonic())
        self._lose(id_, "disconnected")

    def _lose(self, id_: str, how: str) -> None:
        before = self.table.moved
        self.table.on_router_lost(id_, time.monotonic())
        self._log.warning("router.lost", router=id_, how=how, moved=self.table.moved - before)
        self._note_readiness()

    async def _read(self, id_: str, link: ClientLink[FromRouter, ToRouter]) -> None:
        table = self.table
        while True:
            try:
                message = await link.recv()
            except LinkClosed:
                return
            now = time.monotonic()
            match message:
                case Tokens():
                    self._routers.heard(id_, now)
                    table.on_tokens(message, now)
                case Pong():
                    if self._routers.pong(id_, message, now):
                        table.place_waiting(now)
                    self._note_readiness()
                case Rejected():
                    table.on_rejected(message, now)
                    self._note_readiness()
