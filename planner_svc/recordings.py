"""Recordings of loads that administrators asked for: routers told, answers awaited. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mesh.messages import (
    RECORD_WAIT_S,
    Record,
    RecordAction,
    RecordDetail,
    Recorded,
    RecordedAt,
)

RESEND_S = 1.0
"""Pause before a router that has not answered is told again."""
MAX_PENDING = 16
"""Requests that may wait for routers at a time."""


class RecordingsBusy(Exception):
    """Too many requests wait already, or there is nobody to record; nothing was sent."""


@dataclass(slots=True)
class _Pending:
    peer: bytes
    command: Record
    deadline: float
    again_at: float
    answers: dict[str, RecordedAt | None] = field(default_factory=dict)
    """Router -> what it said; None: not yet."""


class Recordings:
    """Commands to record that wait for routers' answers. ``first_command`` grows from one start of
    the planner to the next, so that an old answer matches no new command.
    """

    def __init__(self, first_command: int) -> None:
        self._next = first_command
        self._pending: list[_Pending] = []

    def ask(self, peer: bytes, action: RecordAction, routers: Iterable[str], now: float) -> None:
        """``peer`` wants all ``routers`` to do this. Raises ``RecordingsBusy``."""
        waiting: dict[str, RecordedAt | None] = dict.fromkeys(routers)
        if not waiting:
            raise RecordingsBusy("no router is there to record")
        if len(self._pending) >= MAX_PENDING:
            raise RecordingsBusy(f"{MAX_PENDING} requests to record wait for routers already")
        self._next += 1
        command = Record(command=self._next, action=action)
        self._pending.append(_Pending(peer, command, now + RECORD_WAIT_S, now, waiting))

    def answered(self, message: Recorded) -> None:
        """A router's answer; one that nobody waits for is ignored."""
        for pending in self._pending:
            if pending.command.command == message.command and message.id in pending.answers:
                pending.answers[message.id] = RecordedAt(
                    router=message.id,
                    recording=message.recording,
                    steps=message.steps,
                    path=message.path,
                    error=message.error,
                )

    def gone(self, router: str) -> None:
        """A router died or left: its answer will not come."""
        for pending in self._pending:
            if pending.answers.get(router, pending) is None:
                pending.answers[router] = _silent(router, "it has gone")

    def due(self, now: float) -> tuple[list[tuple[str, Record]], list[tuple[bytes, RecordDetail]]]:
        """Commands to send to routers, and answers to send to who asked."""
        commands: list[tuple[str, Record]] = []
        answers: list[tuple[bytes, RecordDetail]] = []
        for pending in tuple(self._pending):
            missing = [router for router, said in pending.answers.items() if said is None]
            if missing and now < pending.deadline:
                if now >= pending.again_at:
                    pending.again_at = now + RESEND_S
                    commands += [(router, pending.command) for router in missing]
                continue
            late = f"no answer within {RECORD_WAIT_S:g} s"
            told = tuple(said or _silent(router, late) for router, said in pending.answers.items())
            answers.append((pending.peer, RecordDetail(routers=told)))
            self._pending.remove(pending)
        return commands, answers


def _silent(router: str, error: str) -> RecordedAt:
    return RecordedAt(router=router, recording=False, steps=0, error=error)
