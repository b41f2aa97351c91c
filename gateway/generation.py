"""One request's sequences from admission to the last piece of text.

    async with Generation(...) as generation:      # submits
        while pieces := await generation.next():   # [] when all choices are done
            ...
Leaving the block, however it is left, cancels on the routers whatever still runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from types import TracebackType

from gateway.admission import Admission
from gateway.errors import ApiError, TimedOut
from gateway.meters import Meters
from gateway.output import Choice, Piece
from gateway.sequences import Mailbox, Sequence, SequenceTable
from gateway.tenants import Tenant


class ClientGone(Exception):
    """The client disconnected: nobody reads the answer any more."""


class Generation:
    """Runs ``sequences[i]`` for ``choices[i]``; all share ``mailbox``.

    ``arrived``, ``deadline``: monotonic seconds; after the deadline ``next`` raises ``TimedOut``.
    ``admission`` has already admitted the sequences of ``tenant`` and gets them back at the end.
    """

    def __init__(
        self,
        *,
        table: SequenceTable,
        admission: Admission,
        tenant: Tenant,
        meters: Meters,
        mailbox: Mailbox,
        sequences: Seq[Sequence],
        choices: Seq[Choice],
        arrived: float,
        deadline: float,
    ) -> None:
        self._table = table
        self._admission = admission
        self._tenant = tenant
        self._meters = meters
        self._mailbox = mailbox
        self._sequences: Mapping[int, Sequence] = {s.choice: s for s in sequences}
        self.choices = choices
        self._arrived = arrived
        self._deadline = deadline
        self._open = len(choices)
        self._last_at = [0.0] * len(choices)  # when each choice's newest token came
        self._counted = [0] * len(choices)  # tokens of each choice that are in the meters
        self._timer: asyncio.TimerHandle | None = None

    def abandon(self) -> None:
        """The client is gone: ``next`` raises ``ClientGone``."""
        self._mailbox.fail(ClientGone())

    @property
    def generated_tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        return sum(choice.cached_tokens for choice in self.choices)

    async def __aenter__(self) -> Generation:
        now = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(
            self._deadline - now, self._mailbox.fail, TimedOut("The request took too long.")
        )
        for sequence in self._sequences.values():
            self._table.open(sequence, now)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        now = time.monotonic()
        self._table.close(list(self._sequences.values()), now)
        self._admission.finish(self._tenant, len(self._sequences), now)
        if kind is ClientGone:
            self._meters.disconnects.inc()
        elif isinstance(error, ApiError):
            self._meters.request_failures.labels(str(error.status)).inc()
        elif kind is None:
            self._meters.e2e_request_latency.observe(now - self._arrived)

    async def next(self) -> list[Piece]:
        """The next pieces, at least one; an empty list when every choice is done.

        Raises ``ApiError`` when a sequence failed or time is up, ``ClientGone``.
        """
        pieces: list[Piece] = []
        while not pieces and self._open:
            deltas = await self._mailbox.get()
            now = time.monotonic()
            for index, delta in deltas:
                choice = self.choices[index]
                if choice.done:
                    continue  # what followed a stop string
                piece = choice.feed(delta)
                if piece is None:
                    continue
                pieces.append(piece)
                if piece.finish is not None:
                    self._finish(index, piece.finish, now)
            for index in {index for index, _ in deltas}:
                self._measure(index, now)
        return pieces

    def _finish(self, index: int, reason: str, now: float) -> None:
        self._open -= 1
        self._meters.request_success.labels(reason).inc()
        if self.choices[index].stopped:
            self._table.close([self._sequences[index]], now)

    def _measure(self, index: int, now: float) -> None:
        """Count what a choice has gained; tokens that were read at once came evenly."""
        meters, total = self._meters, self.choices[index].tokens
        gained = total - self._counted[index]
        if not gained:
            return
        last = self._last_at[index]
        self._counted[index], self._last_at[index] = total, now
        meters.generation_tokens.inc(gained)
        if last:
            for _ in range(gained):
                meters.inter_token_latency.observe((now - last) / gained)
        else:
            meters.time_to_first_token.observe(now - self._arrived)
            meters.request_queue_time.observe(self._sequences[index].queued_s)
