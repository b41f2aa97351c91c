"""How the ranks of a router's group talk: the leader asks, each follower answers.

Over a Unix socket pair that a follower inherits: nobody else can reach it, a rank that ends closes
it, and a round trip of a few kilobytes takes 15 to 20 microseconds. A question is a header of four
int32 and 32-bit words of payload, an answer the bytes of one fp32 tensor whose shape the leader
knows. A follower without a question sleeps in the kernel, without limit of time: the end of its
leader ends it.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from time import perf_counter_ns

import torch

from mesh.processes import Standstill
from mesh.supervise import CannotServe, ExitCode

_HEADER = struct.Struct("=4i")
"""Operation, two arguments, words of payload."""
_LOADING, _LOADED = b".", b"!"
"""What a follower says before it is asked anything: with each step of loading, and at the end."""
_LOOK_S = 0.1
_STILL_LOOKS = 15
"""Looks at a follower that owes something, one after another, after which it hangs if it stood
still at each of them.
"""


class GroupLost(CannotServe):
    """A rank of the router's group ended, hangs or broke off. The group cannot go on: its leader
    ends, whoever started it starts all of it again, and gateways go on elsewhere meanwhile.
    """

    exit_code = ExitCode.CRASHED


class Op(IntEnum):
    """What a follower is asked to do, with arguments ``a`` and ``b``."""

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
    MEET = 9
    """On a device: join the group's ranks, by which rows and answers go from then on; the payload
    is how many rows there are. No answer."""


class FollowerLinks:
    """The leader's end: one question at a time to all followers. One thread calls everything.

    Every method raises ``GroupLost`` when a follower has ended or does not do its part in time.
    """

    def __init__(
        self, links: Sequence[socket.socket], pids: Sequence[int], *, timeout_s: float
    ) -> None:
        """``links``: to ranks 1, 2, ..., whose processes are ``pids``. ``timeout_s``: how long one
        may take for anything; one that stands still meanwhile is given up after 1.5 s.
        """
        self._links = links
        self._pids = pids
        self._timeout_s = timeout_s
        self._answers: list[torch.Tensor] = []
        self.heard = 0
        """Grows while followers get on with loading; read by any thread."""
        self.waited_ns = 0
        """Time spent in ``answers``, since start."""
        for link in links:
            link.settimeout(_LOOK_S)

    def until_loaded(self, progress: Callable[[], None]) -> None:
        """Wait for every follower, however long it loads; ``progress`` is called again and again
        meanwhile and may raise.
        """
        said = bytearray(1)
        for rank, link in enumerate(self._links, 1):
            news = select.poll()
            news.register(link, select.POLLIN)
            while said != _LOADED:
                progress()
                if news.poll(_LOOK_S * 1000):
                    self._receive(rank, link, memoryview(said))
                    self.heard += 1
            said = bytearray(1)

    def tell(self, op: Op, a: int, b: int, payload: torch.Tensor | None = None) -> None:
        """Something that needs no answer. ``payload``: contiguous, fp32 or int32."""
        words = 0 if payload is None else payload.numel()
        parts = [memoryview(_HEADER.pack(op, a, b, words))]
        if payload is not None:
            parts.append(_bytes(payload))
        for rank, link in enumerate(self._links, 1):
            self._send(rank, link, [*parts])

    def ask(
        self,
        op: Op,
        a: int,
        b: int,
        payload: torch.Tensor | None,
        shapes: Sequence[tuple[int, int]],
    ) -> None:
        """``shapes``: of each follower's answer. ``answers`` must follow."""
        self._answers = [torch.empty(shape) for shape in shapes]
        self.tell(op, a, b, payload)

    def answers(self) -> list[torch.Tensor]:
        """What the followers answered, in order of rank, fp32."""
        started = perf_counter_ns()
        for rank, (link, answer) in enumerate(zip(self._links, self._answers, strict=True), 1):
            self._receive(rank, link, _bytes(answer))
        self.waited_ns += perf_counter_ns() - started
        return self._answers

    def watch(self, *, owing: bool) -> Callable[[float], None]:
        """For a wait that is made elsewhere: to be called again and again meanwhile, with the
        seconds that it has lasted. It looks every 0.1 s whether the followers live and, if they are
        ``owing`` what is waited for, whether they get on.
        """
        looks, waits = 0, [self._wait(rank) for rank in range(1, len(self._links) + 1)]

        def look(waited_s: float) -> None:
            nonlocal looks, waits
            due = int(waited_s / _LOOK_S)
            if due < looks:  # another wait
                looks, waits = 0, [self._wait(rank) for rank in range(1, len(self._links) + 1)]
            if due == looks:
                return
            looks = due
            for rank, (link, wait) in enumerate(zip(self._links, waits, strict=True), 1):
                if _has_hung_up(link):
                    raise _gone(rank, ConnectionResetError("it has closed the connection"))
                if owing:
                    wait.look()

        return look

    def _send(self, rank: int, link: socket.socket, parts: list[memoryview]) -> None:
        wait: _Wait | None = None
        while parts:
            try:
                sent = link.sendmsg(parts)
            except TimeoutError:
                wait = wait or self._wait(rank)
                wait.look()
                continue
            except OSError as error:
                raise _gone(rank, error) from error
            wait = None
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def _receive(self, rank: int, link: socket.socket, into: memoryview) -> None:
        wait: _Wait | None = None
        filled = 0
        while filled < len(into):
            try:
                count = _receive_some(link, into[filled:])
            except TimeoutError:
                wait = wait or self._wait(rank)
                wait.look()
                continue
            except OSError as error:
                raise _gone(rank, error) from error
            wait = None
            filled += count

    def _wait(self, rank: int) -> _Wait:
        return _Wait(rank, self._pids[rank - 1], self._timeout_s)


class _Wait:
    """One wait for a follower. Counted in looks, of which a process that stands still itself makes
    none: where the whole group was stopped for a while, nobody hangs.
    """

    def __init__(self, rank: int, pid: int, timeout_s: float) -> None:
        self._rank = rank
        self._standstill = Standstill(pid)
        self._timeout_s = timeout_s
        self._looks = self._still = 0

    def look(self) -> None:
        """After each ``_LOOK_S``. Raises ``GroupLost``."""
        self._looks += 1
        self._still = self._still + 1 if self._standstill.look() else 0
        if self._still >= _STILL_LOOKS:
            still_s = _STILL_LOOKS * _LOOK_S
            raise GroupLost(
                f"rank {self._rank} of the router's group hangs: it owes an answer and has stood "
                f"still for {still_s:g} s"
            )
        if self._looks * _LOOK_S >= self._timeout_s:
            raise GroupLost(
                f"rank {self._rank} of the router's group does not get on within "
                f"{self._timeout_s:g} s"
            )


def _has_hung_up(link: socket.socket) -> bool:
    news = select.poll()
    news.register(link, select.POLLRDHUP)
    return bool(news.poll(0))


def _gone(rank: int, error: OSError) -> GroupLost:
    return GroupLost(f"rank {rank} of the router's group is gone: {error}")


@dataclass(frozen=True, slots=True)
class Question:
    """A question as a follower sees it. ``payload``: int32 words, valid until the next one."""

    op: Op
    a: int
    b: int
    payload: torch.Tensor

    def rows(self, width: int) -> torch.Tensor:
        """The payload as ``[n, width]`` fp32."""
        return self.payload.view(torch.float32).view(-1, width)


class LeaderLink:
    """A follower's end. Methods raise ``GroupLost`` when the leader is gone."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._header = memoryview(bytearray(_HEADER.size))
        self._words = torch.empty(0, dtype=torch.int32)

    def say_loading(self) -> None:
        """The follower gets on with loading its part."""
        self._send(_LOADING)

    def say_loaded(self) -> None:
        """It can be asked."""
        self._send(_LOADED)

    def next(self) -> Question:
        """Sleeps until there is a question."""
        try:
            _receive(self._link, self._header)
            op, a, b, count = _HEADER.unpack(self._header)
            if count > self._words.numel():
                self._words = torch.empty(count, dtype=torch.int32)
            payload = self._words[:count]
            if count:
                _receive(self._link, _bytes(payload))
        except OSError as error:
            raise _leader_gone(error) from error
        return Question(Op(op), a, b, payload)

    def answer(self, rows: torch.Tensor) -> None:
        """``rows``: contiguous fp32."""
        self._send(_bytes(rows))

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self._link.sendall(data)
        except OSError as error:
            raise _leader_gone(error) from error


def _leader_gone(error: OSError) -> GroupLost:
    return GroupLost(f"the leader of the router's group is gone: {error}")


def _receive(link: socket.socket, into: memoryview) -> None:
    """Fill ``into``; raises ``OSError``, also at the end of the stream."""
    filled = 0
    while filled < len(into):
        filled += _receive_some(link, into[filled:])


def _receive_some(link: socket.socket, into: memoryview) -> int:
    """At least a byte; raises ``OSError``, also at the end of the stream."""
    count = link.recv_into(into)
    if not count:
        raise ConnectionResetError("it has closed the connection")
    return count


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor that is not empty."""
    return tensor.view(-1).numpy().data.cast("B")
