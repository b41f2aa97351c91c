"""Actors: named long-running coroutines that start in order and stop in reverse.

API
    ``async with Supervisor(log) as actors:``
        ``actors.start("engine", engine.run)``      a crash ends the service
        ``actors.task(coroutine)``                  a short job under the same roof
        ``await ctx.stopping.wait()``
    Leaving the block cancels the actors one after another, last started first, each awaited.

A crash is logged as ``actor.crashed`` with the actor's name and its traceback, then raised as
``ActorCrashed`` out of the block, which cancels its body: no service runs on with a dead part.
``CannotServe`` (a refusal, a bad checkpoint) is raised as it is: it is an answer to the operator,
not a bug, and needs no traceback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from enum import IntEnum
from types import TracebackType
from typing import Any, TypeVar

from structlog.typing import FilteringBoundLogger

T = TypeVar("T")


class ExitCode(IntEnum):
    """What the launcher and systemd learn from a service's end."""

    OK = 0
    CRASHED = 1
    """A bug or a lost resource: starting again can help."""
    CANNOT_SERVE = 2
    """Configuration, checkpoint or address: starting again cannot help."""
    REFUSED = 3
    """The planner refused this process (other model, fenced incarnation)."""
    ALREADY_RUNNING = 4


class CannotServe(Exception):
    """The service cannot run as it was asked to; the message says why to the operator."""

    exit_code = ExitCode.CANNOT_SERVE


class ActorCrashed(Exception):
    """An actor ended by an exception (its ``__cause__``). Attribute: ``actor``."""

    def __init__(self, actor: str, cause: BaseException) -> None:
        super().__init__(f"{actor} crashed: {type(cause).__name__}: {cause}")
        self.actor = actor


class Supervisor:
    """Owns the actors of one service; see the module's docstring."""

    def __init__(
        self, log: FilteringBoundLogger, *, quiet: tuple[type[Exception], ...] = ()
    ) -> None:
        """``quiet``: further exceptions that are raised as they are."""
        self._log = log
        self._quiet: tuple[type[Exception], ...] = (CannotServe, *quiet)
        self._group = asyncio.TaskGroup()
        self._actors: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Supervisor:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for actor in reversed(self._actors):
                actor.cancel()
                await asyncio.wait([actor])
        except asyncio.CancelledError as cancelled:
            # Out of patience, or an actor crashed while it stopped: the group ends all at once.
            kind, error, trace = type(cancelled), cancelled, cancelled.__traceback__
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            # One cause is enough to end a service, and callers match on its type.
            raise first_error(group) from group

    def start(self, name: str, run: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run an actor until it returns, crashes, or the block is left."""
        task = self._group.create_task(self._run(name, run), name=name)
        self._actors.append(task)
        return task

    def task(self, job: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """A short job; its exception ends the block like a crash."""
        return self._group.create_task(job, name=name)

    async def _run(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        try:
            await run()
        except self._quiet:
            raise
        except Exception as error:
            self._log.exception("actor.crashed", actor=name)
            raise ActorCrashed(name, error) from error


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception of a group that is no group itself."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
