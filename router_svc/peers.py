"""How the ranks of a router's group talk: the leader asks, each follower answers. Over gloo.

A question is one message: a header of ``HEADER`` int32 words, then 32-bit words of payload. A
follower keeps a receive of the largest size posted, so a question arrives with one message and
without a round trip to agree on its size (gloo fills a larger buffer with a shorter message). The
leader posts the receives of the answers before it asks. A follower without a question sleeps in
its receive, without limit of time: the end of its leader ends it.

Nothing is pickled; a rank that breaks the protocol can only break its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from mesh.supervise import CannotServe, ExitCode

HEADER = 4
"""int32 words before the payload: the operation, two arguments, words of payload."""
_DIST: Any = dist
"""torch's stubs do not know the gloo group's own methods."""
_NO_LIMIT = timedelta(days=3650)
_MEETING = timedelta(seconds=60)
"""All have loaded by then; who ends meanwhile is noticed otherwise."""
_HOST = "127.0.0.1"


class GroupLost(CannotServe):
    """A rank of the router's group ended, hangs or broke off. The group cannot go on: its leader
    ends, whoever started it starts all of it again, and gateways go on elsewhere meanwhile.
    """

    exit_code = ExitCode.CRASHED


class Op(IntEnum):
    """What a follower is asked to do, and its arguments ``a`` and ``b``."""

    CACHE = 1
    """Make the KV cache: ``a`` blocks of ``b`` tokens. No answer."""
    CLEAR = 2
    """Clear the blocks in the payload. No answer."""
    PLAN = 3
    """Keep the plan of the ``a`` chunks in the payload as number ``b``. No answer."""
    EMBED = 4
    """Tokens of plan ``b``."""
    ATTEND = 5
    """Layer ``a`` of plan ``b``; payload: ``h``."""
    DENSE = 6
    """Layer ``a``; payload: ``h``."""
    SHARED = 7
    """Layer ``a``; payload: ``x``."""
    LOGITS = 8
    """Payload: ``h``."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question as a follower sees it. ``payload`` int32 words, valid until the next ``next``."""

    op: Op
    a: int
    b: int
    payload: torch.Tensor

    def rows(self, width: int) -> torch.Tensor:
        """The payload as ``[n, width]`` fp32."""
        return self.payload.view(torch.float32).view(-1, width)


class Followers(Protocol):
    """The other ranks, as the leader asks them: one question at a time. One thread calls all.

    Every method raises ``GroupLost`` when one of them ended, or did not do its part in time.
    """

    def tell(self, op: Op, a: int, b: int, payload: torch.Tensor | None = None) -> None:
        """Something that needs no answer. ``payload``: contiguous, fp32 or int32."""

    def ask(
        self,
        op: Op,
        a: int,
        b: int,
        payload: torch.Tensor | None,
        shapes: Sequence[tuple[int, int]],
    ) -> None:
        """``shapes``: of each follower's answer, in order of rank. ``answers`` must follow."""

    def answers(self) -> list[torch.Tensor]:
        """What the followers answered, in order of rank, fp32."""


Stage = Literal["loaded", "connected"]


class Rendezvous:
    """Where the ranks of a group meet: a file in the run directory, whose mode guards it."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self.size = size
        self._store = _DIST.FileStore(str(path), size)

    def say(self, what: Stage, rank: int) -> None:
        """How far this follower is."""
        self._store.set(f"{what}/{rank}", "1")

    def all_said(self, what: Stage) -> bool:
        """Whether all followers have said so. Does not wait."""
        return bool(self._store.check([f"{what}/{rank}" for rank in range(1, self.size)]))

    def connect(self, rank: int, timeout: timedelta) -> Any:
        """A ``ProcessGroupGloo`` beside torch's global group. Raises ``GroupLost``."""
        gloo = _DIST.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001 - torch has no public name
        options._devices = [gloo.create_device(hostname=_HOST)]  # noqa: SLF001
        options._timeout = timeout  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        try:
            return gloo(self._store, rank, self.size, options)
        except RuntimeError as error:
            raise GroupLost(f"the ranks of the router's group do not meet: {error}") from error

    def close(self) -> None:
        """Nobody meets here any more: for the leader, once all have connected, to one another too,
        or before it gives up.
        """
        self._path.unlink(missing_ok=True)


class GlooFollowers:
    """``Followers`` in other processes of this host."""

    def __init__(self, rendezvous: Rendezvous, capacity_words: int, *, timeout_s: float) -> None:
        """Once all have ``loaded``. ``capacity_words``: the largest payload; ``timeout_s``: how
        long a follower may take for anything. Raises ``GroupLost``.
        """
        self._timeout = timedelta(seconds=timeout_s)
        self._ranks = range(1, rendezvous.size)
        self._words = torch.zeros(HEADER + capacity_words, dtype=torch.int32)
        self._header = self._words[:HEADER].numpy()
        self._group = rendezvous.connect(0, _MEETING)
        self._sent: list[dist.Work] = []
        self._awaited: list[dist.Work] = []
        self._buffers: list[torch.Tensor] = []

    def tell(self, op: Op, a: int, b: int, payload: torch.Tensor | None = None) -> None:
        message = self._message(op, a, b, payload)
        try:
            self._sent = [self._group.send([message], rank, 0) for rank in self._ranks]
        except RuntimeError as error:
            raise GroupLost(f"a rank of the router's group is gone: {error}") from error
        self._finish_sending()

    def ask(
        self,
        op: Op,
        a: int,
        b: int,
        payload: torch.Tensor | None,
        shapes: Sequence[tuple[int, int]],
    ) -> None:
        message = self._message(op, a, b, payload)
        self._buffers = [torch.empty(shape) for shape in shapes]
        try:
            self._awaited = [
                self._group.recv([buffer], rank, 0)
                for rank, buffer in zip(self._ranks, self._buffers, strict=True)
            ]
            self._sent = [self._group.send([message], rank, 0) for rank in self._ranks]
        except RuntimeError as error:
            raise GroupLost(f"a rank of the router's group is gone: {error}") from error

    def answers(self) -> list[torch.Tensor]:
        self._finish_sending()
        for rank, work in zip(self._ranks, self._awaited, strict=True):
            self._wait(work, rank, "answer")
        return self._buffers

    def _message(self, op: Op, a: int, b: int, payload: torch.Tensor | None) -> torch.Tensor:
        count = 0
        if payload is not None:
            count = payload.numel()
            self._words[HEADER : HEADER + count].copy_(payload.view(torch.int32).view(-1))
        self._header[:] = (op, a, b, count)
        return self._words[: HEADER + count]

    def _finish_sending(self) -> None:
        for rank, work in zip(self._ranks, self._sent, strict=True):
            self._wait(work, rank, "take a question")

    def _wait(self, work: dist.Work, rank: int, what: str) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise GroupLost(
                f"rank {rank} of the router's group did not {what} "
                f"within {self._timeout.total_seconds():g} s or is gone: {error}"
            ) from error


class Leader:
    """A follower's end."""

    def __init__(self, rendezvous: Rendezvous, rank: int, capacity_words: int) -> None:
        """Waits for the leader, however long that loads. Raises ``GroupLost``."""
        rendezvous.say("loaded", rank)
        self._group = rendezvous.connect(rank, _NO_LIMIT)
        rendezvous.say("connected", rank)
        self._words = torch.zeros(HEADER + capacity_words, dtype=torch.int32)
        self._next = self._group.recv([self._words], 0, 0)

    def next(self) -> Question:
        """Sleeps until there is a question. Raises ``GroupLost`` when the leader is gone."""
        try:
            self._next.wait()
        except RuntimeError as error:
            raise GroupLost(f"the leader of the router's group is gone: {error}") from error
        op, a, b, count = self._words[:HEADER].tolist()
        return Question(Op(op), a, b, self._words[HEADER : HEADER + count])

    def done(self, answer: torch.Tensor | None) -> None:
        """The question is not needed any more. ``answer``: contiguous fp32, if it wants one."""
        # First, so that the next question is not kept waiting.
        self._next = self._group.recv([self._words], 0, 0)
        if answer is not None:
            try:
                self._group.send([answer], 0, 0).wait()
            except RuntimeError as error:
                raise GroupLost(f"the leader of the router's group is gone: {error}") from error
