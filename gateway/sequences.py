"""Every sequence this gateway has in the mesh, and where: submit, follow, move, cancel.

No I/O and no clock: ``send`` is given and time is an argument (monotonic seconds), so that
losses and refusals are tested without a network. A new sequence waits for its tenant's turn until
the routers have room. One that lost its router waits for another, ahead of the new ones; it is
submitted again with the tokens it already has, under a new name, so that a late message of its old
router cannot reach it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from gateway.errors import ApiError, GenerationFailed, InvalidValue, Overloaded, Unavailable
from gateway.fairness import FairQueue
from gateway.routers import Routers
from gateway.tenants import Tenant
from mesh.messages import Cancel, Delta, Rejected, Sampling, Submit, Tokens, ToRouter

_MAX_MOVES = 8
"""A sequence that loses its router this often may be what kills them."""
_MAX_QUIET_MOVES = 3
"""A sequence that has moved this often stays with a router that may only be slow."""
_ROUTER_DEADLINE_SLACK_S = 1.0
"""The router gives a sequence up a little after the gateway has, which knows how to say it."""
_RELOAD_S = 5.0
"""About how long a restarted expert worker takes to load its weights again."""


class Mailbox:
    """Deltas of one request's sequences, for its one consumer.

    Holds at most what its sequences may produce (``max_tokens`` each), whatever the client's
    speed. Event-loop thread only.
    """

    __slots__ = ("_error", "_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[tuple[int, Delta]] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, choice: int, delta: Delta) -> None:
        self._items.append((choice, delta))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """Let the consumer raise ``error`` after what it has not read yet; the first one counts."""
        self._error = self._error or error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> list[tuple[int, Delta]]:
        """Everything that arrived, waiting for at least one; raises what ``fail`` was given."""
        if not self._items and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._items:
            items, self._items = self._items, []
            return items
        assert self._error is not None
        raise self._error


class Sequence:
    """One sequence of a request: ``choice`` is its place there.

    ``priority``: among its tenant's, the lower comes first. ``router_priority``: as of ``Submit``.
    """

    __slots__ = (
        "attempts",
        "choice",
        "deadline",
        "id",
        "mailbox",
        "moves",
        "opened_at",
        "output",
        "priority",
        "prompt",
        "prompt_seen",
        "queued_s",
        "refused_by",
        "router",
        "router_priority",
        "sampling",
        "tenant",
        "trace",
        "wait_until",
        "wire",
    )

    def __init__(
        self,
        *,
        id_: str,
        choice: int,
        prompt: tuple[int, ...],
        sampling: Sampling,
        trace: str,
        mailbox: Mailbox,
        deadline: float,
        tenant: Tenant,
        priority: int = 0,
        router_priority: int = 0,
    ) -> None:
        self.id = id_
        self.choice = choice
        self.prompt = prompt
        self.sampling = sampling
        self.trace = trace
        self.mailbox = mailbox
        self.deadline = deadline
        self.tenant = tenant
        self.priority = priority
        self.router_priority = router_priority
        self.opened_at = 0.0
        self.output: list[int] = []
        self.prompt_seen = False  # the first delta has come
        self.router = ""  # where it runs; empty while it has none
        self.wire = ""  # its name there
        self.attempts = 0  # times submitted
        self.queued_s = 0.0  # how long it had no router before the first
        self.moves = 0  # times taken over from a lost router
        self.refused_by: set[str] = set()
        self.wait_until = 0.0  # when waiting for a router has lasted too long

    def submit(self, now: float) -> Submit:
        """The message that starts it, or goes on with it, on a router."""
        sampling = self.sampling
        if self.prompt_seen and sampling.prompt_logprobs >= 0:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
        return Submit(
            request=self.wire,
            trace=self.trace,
            prompt=self.prompt,
            sampling=sampling,
            output=tuple(self.output),
            priority=self.router_priority,
            deadline_ms=max(1, round((self.deadline + _ROUTER_DEADLINE_SLACK_S - now) * 1000)),
        )


class SequenceTable:
    """All open sequences.

    ``send(router, message) -> bool``: False when it could not be sent. ``router_wait_s``: how
    long a sequence waits for the first router that takes it, where none is ready. One that lost
    its router waits for another to its own deadline: its client may already read, and a pause is
    better than a broken answer.
    """

    def __init__(
        self, routers: Routers, send: Callable[[str, ToRouter], bool], *, router_wait_s: float
    ) -> None:
        self._routers = routers
        self._send = send
        self._router_wait_s = router_wait_s
        self._queue: FairQueue[Sequence] = FairQueue()  # new ones, until the routers have room
        self._running: dict[str, Sequence] = {}
        self._waiting: dict[Sequence, None] = {}  # begun ones without a router, oldest first
        self._unready_since: float | None = None  # since when no router takes work
        self.moved = 0
        """Sequences taken over from a lost router since start."""

    def __len__(self) -> int:
        return len(self._running) + self.waiting

    @property
    def waiting(self) -> int:
        """Sequences that have no router now."""
        return len(self._queue) + len(self._waiting)

    def open(self, sequence: Sequence, now: float) -> None:
        """Run ``sequence`` when it is its tenant's turn; its mailbox gets deltas, the last with
        ``finish``, or an error.
        """
        sequence.wait_until = now + self._router_wait_s
        sequence.opened_at = now
        self._queue.push(
            sequence,
            sequence.tenant.name,
            weight=sequence.tenant.limits.weight,
            priority=sequence.priority,
        )
        self._next(now)

    def close(self, sequences: list[Sequence], now: float) -> None:
        """Forget ``sequences``; those that have not finished are cancelled on their routers."""
        cancels: dict[str, list[str]] = {}
        for sequence in sequences:
            self._queue.remove(sequence)
            self._waiting.pop(sequence, None)
            if sequence.router:
                cancels.setdefault(sequence.router, []).append(sequence.wire)
                self._take_away(sequence)
        for router, wires in cancels.items():
            self._send(router, Cancel(requests=tuple(wires)))
        if cancels:
            self._next(now)

    def on_tokens(self, message: Tokens, now: float) -> None:
        """Hand each delta to its sequence; deltas of unknown sequences are late and dropped."""
        running = self._running
        ended = False
        for delta in message.deltas:
            sequence = running.get(delta.request)
            if sequence is None:
                continue
            if delta.finish is not None:
                ended = True
                self._take_away(sequence)
                if delta.finish == "cancelled":
                    # Not by us, or it would be unknown: the router gave it up.
                    self._move(sequence, now)
                    continue
                if delta.finish == "error":
                    sequence.mailbox.fail(_failure(delta))
                    continue
            sequence.prompt_seen = True
            sequence.output.extend(delta.tokens)
            self._spend(sequence, len(delta.tokens))
            sequence.mailbox.put(sequence.choice, delta)
        if ended:
            self._next(now)

    def on_rejected(self, message: Rejected, now: float) -> None:
        """Try the next router, wait for one that is ready, or tell the client."""
        sequence = self._running.get(message.request)
        if sequence is None:
            return
        router = sequence.router
        self._take_away(sequence)
        if message.not_ready:
            self._routers.refused(router, message.reason)
            self._place(sequence, now)
            return
        sequence.refused_by.add(router)
        if message.retry_after_s <= 0:
            sequence.mailbox.fail(InvalidValue(message.reason))
        elif self._routers.pick(sequence.prompt, sequence.refused_by) is not None:
            self._place(sequence, now)
        elif sequence.moves:
            sequence.refused_by.clear()
            self._wait(sequence, now)
        else:
            sequence.mailbox.fail(Overloaded(message.reason, retry_after_s=message.retry_after_s))

    def on_router_lost(self, router: str, now: float) -> None:
        """Move everything that ran on ``router``."""
        self._move_all([s for s in self._running.values() if s.router == router], router, now)

    def on_router_quiet(self, router: str, now: float) -> int:
        """Move what ran on ``router`` and can go on elsewhere at once; returns how many that are.
        The rest waits for it: it may only be slow.
        """
        moving = [
            s
            for s in self._running.values()
            if s.router == router
            and s.moves < _MAX_QUIET_MOVES
            and self._routers.pick(s.prompt) is not None
        ]
        self._move_all(moving, router, now)
        return len(moving)

    def _move_all(self, sequences: list[Sequence], router: str, now: float) -> None:
        if sequences:
            # In case it only hangs; a dead one cannot be reached anyway.
            self._send(router, Cancel(requests=tuple(s.wire for s in sequences)))
        for sequence in sequences:
            self._take_away(sequence)
            self._move(sequence, now)

    def fail_all(self, error: ApiError) -> None:
        """Let every open sequence's request end with ``error``."""
        for sequence in (*self._running.values(), *self._waiting, *self._queue):
            sequence.mailbox.fail(error)

    def place_waiting(self, now: float) -> None:
        """Place what waits for a router; call when one became ready, and about once a second."""
        waiting, self._waiting = self._waiting, {}
        for sequence in waiting:
            self._place(sequence, now)
        self._next(now)

    def _next(self, now: float) -> None:
        """Send as many of those whose turn it is as the routers have room for."""
        if why := self._routers.why_not_ready():
            self._give_up(why, now)
            return
        self._unready_since = None
        room = self._routers.room() - len(self._waiting)
        while room > 0 and (sequence := self._queue.pop()) is not None:
            room -= 1
            sequence.wait_until = now + self._router_wait_s
            self._spend(sequence, len(sequence.prompt))
            self._place(sequence, now)

    def _give_up(self, why: str, now: float) -> None:
        """Tell those for whom no router has become ready in time."""
        if self._unready_since is None:
            self._unready_since = now
        if now < self._unready_since + self._router_wait_s:
            return
        for sequence in [s for s in self._queue if now >= s.wait_until]:
            self._queue.remove(sequence)
            sequence.mailbox.fail(_unready(why))

    def _spend(self, sequence: Sequence, tokens: int) -> None:
        self._queue.charge(sequence.tenant.name, tokens)
        sequence.tenant.spend(tokens)

    def _place(self, sequence: Sequence, now: float) -> None:
        router = self._routers.pick(sequence.prompt, sequence.refused_by)
        if router is not None:
            if not sequence.attempts:
                sequence.queued_s = now - sequence.opened_at
            sequence.wire = f"{sequence.id}.{sequence.attempts}"
            sequence.attempts += 1
            if self._send(router, sequence.submit(now)):
                sequence.router = router
                self._running[sequence.wire] = sequence
                self._routers.taken(router, sequence.prompt)
                return
        self._wait(sequence, now)

    def _wait(self, sequence: Sequence, now: float) -> None:
        if now < sequence.wait_until:
            self._waiting[sequence] = None
            return
        why = self._routers.why_not_ready() or "no router could take the request"
        sequence.mailbox.fail(_unready(why))

    def _move(self, sequence: Sequence, now: float) -> None:
        sequence.moves += 1
        self.moved += 1
        sequence.refused_by.clear()
        sequence.wait_until = sequence.deadline
        if sequence.moves > _MAX_MOVES:
            sequence.mailbox.fail(
                GenerationFailed(f"The sequence lost its router {sequence.moves} times.")
            )
        else:
            self._place(sequence, now)

    def _take_away(self, sequence: Sequence) -> None:
        del self._running[sequence.wire]
        self._routers.left(sequence.router)
        sequence.router = ""


def _unready(why: str) -> Unavailable:
    return Unavailable(f"The mesh cannot run a token now: {why}.")


def _failure(delta: Delta) -> ApiError:
    message = delta.error or "The mesh could not finish this sequence."
    if delta.error_kind == "unavailable":
        return Unavailable(message, retry_after_s=_RELOAD_S)
    return GenerationFailed(message)
