"""Changing a mesh that runs: more or fewer processes, and starting them again, without a loss.

Nothing is taken away before what replaces it is ready and what it held is elsewhere:

- an expert worker drains by the planner's word first: its experts are moved while it serves them;
- a router that gets SIGTERM ends its sequences or hands them back, and the gateways go on with them
  elsewhere;
- a gateway that gets SIGTERM ends its streams while another one takes connections of its socket.

Where a role has one process only, a spare one is started for the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from compose.control import Order, OrderFailed, Restart, Scale
from compose.listeners import Listeners
from compose.options import UsageError
from compose.processes import START_ORDER, ProcessSpec, Recipe, ServiceRole, member_id, member_index
from mesh.admin import PlannerAway, PlannerDesk, PlannerRefused
from mesh.messages import Drain, GetStatus, PlanDetail, Status
from mesh.placement import EMPTY, local_slots

SCALED: tuple[ServiceRole, ...] = ("expert", "router", "gateway")
"""Roles of which there may be several, in the order in which they grow and are started again."""
_LOOK_S = 0.2
_ANSWER_S = 2.0
_STUCK_S = 300.0
"""An order fails when what it waits for has not got on for so long."""
_SHARING = frozenset({"first", "repair", "join", "drain"})
"""Moves that follow from who is there, as ``Status.moving`` names them."""

Say = Callable[[str], None]


class Crew(Protocol):
    """The processes, as the launcher runs them: each is started again when it ends by itself."""

    def specs(self) -> list[ProcessSpec]:
        """Those that are to run."""

    def missing(self, status: Status, ids: Iterable[str]) -> dict[str, str]:
        """Which of ``ids`` the planner does not know, as they run now, to be ready; and how they
        are.
        """

    def hire(self, spec: ProcessSpec) -> None:
        """Start one more."""

    async def dismiss(self, id_: str) -> None:
        """Let it leave, and wait until it has ended."""

    async def renew(self, id_: str, spec: ProcessSpec | None = None) -> None:
        """Let it leave, and have it started again, by ``spec`` from now on; returns once the old
        process has ended.
        """


@dataclass(frozen=True, slots=True)
class Most:
    """How many processes of a role a mesh may have, and why no more, in words."""

    count: int
    why: str


class Fleet:
    """Carries out one order at a time. ``check`` raises ``UsageError`` for processes that could not
    be started.
    """

    def __init__(
        self,
        crew: Crew,
        planner: PlannerDesk,
        recipe: Recipe,
        listeners: Listeners,
        most: Mapping[ServiceRole, Most],
        check: Callable[[Sequence[ProcessSpec]], None],
    ) -> None:
        self._crew = crew
        self._planner = planner
        self._recipe = recipe
        self._listeners = listeners
        self._most = most
        self._check = check

    async def carry_out(self, order: Order, say: Say) -> None:
        """Raises ``OrderFailed``; what was done until then stays."""
        try:
            match order:
                case Scale(counts=counts):
                    await self._scale(self._wanted(counts), say)
                case Restart(members=members):
                    await self._restart(self._named(members), say)
        except (UsageError, PlannerRefused) as error:
            raise OrderFailed(str(error)) from error

    # -------------------------------------------------------------- scale

    def _wanted(self, counts: Mapping[str, int]) -> dict[ServiceRole, int]:
        for role, count in counts.items():
            if role not in SCALED:
                known = ", ".join(f"{one}s" for one in SCALED)
                raise OrderFailed(f"{role}s cannot be scaled; expected {known}")
            most = self._most[role]
            if not 1 <= count <= most.count:
                raise OrderFailed(f"{role}s={count}: expected 1 to {most.count}: {most.why}")
        return {role: counts[role] for role in SCALED if role in counts}

    async def _scale(self, wanted: Mapping[ServiceRole, int], say: Say) -> None:
        await self._until_whole(say)
        new = [
            self._spec(role, index, among=count)
            for role, count in wanted.items()
            for index in range(count)
            if index not in self._indices(role)
        ]
        if new:
            await self._hire(new, say)
        for role, count in wanted.items():
            leaving = [member_id(role, index) for index in self._indices(role) if index >= count]
            for id_ in leaving:
                if role == "gateway":
                    self._listeners.close(member_index(id_))
            await self._dismiss(leaving, say)
            self._recipe.counts[role] = count
        await self._until_whole(say)

    async def _hire(self, new: Sequence[ProcessSpec], say: Say) -> None:
        """Start processes and wait until they are ready; those that do not get so are let go."""
        self._check(new)
        for spec in new:
            say(f"{spec.id}: starting")
            self._crew.hire(spec)
        try:
            await self._until_whole(say)
        except OrderFailed:
            with suppress(OrderFailed, PlannerRefused):
                await self._relieve([s.id for s in new if s.role == "expert"], say)
            await asyncio.gather(*(self._crew.dismiss(spec.id) for spec in new))
            raise

    async def _dismiss(self, ids: Sequence[str], say: Say) -> None:
        experts = [id_ for id_ in ids if self._role(id_) == "expert"]
        if experts:
            await self._relieve(experts, say)
        for id_ in ids:
            say(f"{id_}: leaving")
        await asyncio.gather(*(self._crew.dismiss(id_) for id_ in ids))
        for id_ in ids:
            say(f"{id_}: left")

    # -------------------------------------------------------------- restart

    def _named(self, members: Sequence[str]) -> list[str]:
        present = [spec.id for spec in self._crew.specs()]
        for id_ in members:
            if id_ not in present:
                raise OrderFailed(f"{id_} does not run here; expected one of {', '.join(present)}")
        return list(members) or present

    async def _restart(self, ids: Sequence[str], say: Say) -> None:
        await self._until_whole(say)
        # The planner is off the tokens' way; a new one is to lead the others' restart.
        for role in ("planner", *SCALED):
            for id_ in [one for one in ids if self._role(one) == role]:
                await self._renew(id_, role, say)

    async def _renew(self, id_: str, role: ServiceRole, say: Say) -> None:
        spare = ""
        if role == "gateway":
            spare = await self._hire_spare(role, say, shares=member_index(id_))
        elif role in SCALED and len(self._indices(role)) == 1:
            spare = await self._hire_spare(role, say)
        if role == "expert":
            try:
                await self._relieve([id_], say)
            except PlannerRefused as refused:
                if spare:
                    raise OrderFailed(refused.reason) from refused
                say(refused.reason)
                spare = await self._hire_spare(role, say)
                await self._relieve([id_], say)
        say(f"{id_}: restarting")
        renewed = None
        if role == "planner":
            renewed = self._recipe.spec("planner", 0)
        await self._crew.renew(id_, renewed)
        await self._until_whole(say)
        say(f"{id_}: restarted")
        if spare:
            await self._dismiss([spare], say)
            await self._until_whole(say)

    async def _hire_spare(self, role: ServiceRole, say: Say, *, shares: int | None = None) -> str:
        """Start a process to stand in for another; a gateway takes connections where ``shares``
        does.
        """
        taken = self._indices(role)
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        spec = self._spec(role, index, shares=shares)
        say(f"{spec.id} is to stand in")
        await self._hire([spec], say)
        return spec.id

    # -------------------------------------------------------------- steps

    async def _relieve(self, ids: Sequence[str], say: Say) -> None:
        """Have the experts of these workers moved to the others. Raises ``OrderFailed``, and
        ``PlannerRefused`` when there is no room; the workers go on then.
        """
        ordered: list[str] = []
        try:
            for id_ in ids:
                await self._drain(id_)
                ordered.append(id_)
            await self._until(lambda status: left_on(status, ids), say)
        except (OrderFailed, PlannerRefused):
            for id_ in ordered:
                with suppress(OrderFailed, PlannerRefused):
                    await self._drain(id_, undo=True)
            raise

    async def _drain(self, id_: str, *, undo: bool = False) -> None:
        try:
            await self._planner.ask(Drain(member=id_, undo=undo), PlanDetail)
        except PlannerAway as error:
            raise OrderFailed(str(error)) from error

    async def _until_whole(self, say: Say) -> None:
        """Until every process is known and ready, a token can be run, and each expert worker has
        its share.
        """

        def lacking(status: Status) -> str:
            ids = [spec.id for spec in self._crew.specs()]
            missing = self._crew.missing(status, ids)
            if missing:
                return "waiting for " + ", ".join(f"{id_} ({how})" for id_, how in missing.items())
            if not status.ready:
                return status.reason
            if status.moving in _SHARING:
                return f"moving experts ({status.moving}): {status.moved} of {status.to_move}"
            return ""

        await self._until(lacking, say)

    async def _until(self, lacking: Callable[[Status], str], say: Say) -> None:
        """Until ``lacking`` is empty; raises ``OrderFailed`` when it has not changed for long."""
        loop = asyncio.get_running_loop()
        said, alarms, since = "", "", loop.time()
        while True:
            try:
                status = await self._planner.ask(GetStatus(), Status, timeout_s=_ANSWER_S)
            except PlannerAway:
                words = "waiting for the planner"
            else:
                words, alarms = lacking(status), "; ".join(status.alarms)
            if not words:
                return
            if words != said:
                said, since = words, loop.time()
                say(words)
            elif loop.time() - since > _STUCK_S:
                raise OrderFailed(": ".join(filter(None, (words, alarms))))
            await asyncio.sleep(_LOOK_S)

    # -------------------------------------------------------------- who is there

    def _spec(
        self,
        role: ServiceRole,
        index: int,
        *,
        shares: int | None = None,
        among: int | None = None,
    ) -> ProcessSpec:
        listen_fd = -1
        if role == "gateway":
            listen_fd = self._listeners.open(index if shares is None else shares)
        return self._recipe.spec(role, index, shares=shares, listen_fd=listen_fd, among=among)

    def _indices(self, role: ServiceRole) -> list[int]:
        return sorted(member_index(s.id) for s in self._crew.specs() if s.role == role)

    def _role(self, id_: str) -> ServiceRole:
        return next(role for role in START_ORDER if id_.partition("-")[0] == role)


def left_on(status: Status, ids: Iterable[str]) -> str:
    """How much is still placed on some expert workers, in words; empty when nothing is."""
    placement = status.view.placement
    left = {}
    for id_ in ids:
        if placement is not None and id_ in placement.ranks:
            rows = local_slots(placement, id_)
            if count := sum(expert != EMPTY for row in rows for expert in row):
                left[id_] = count
    return ", ".join(f"{id_}: {count} experts to be moved" for id_, count in left.items())
