"""Dispatches on their way: the ticket of each, and the messages it is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from ep_kernels.plane import Answer, IntArray, Part
from ep_kernels.routing import Message

if TYPE_CHECKING:
    from router_svc.experts import MeshExperts


class TicketAbandonedError(Exception):
    """``abandon`` was called."""


class ExpertsUnavailableError(Exception):
    """Nobody served some experts for ``expert_timeout_s``; the micro-batch cannot go on.

    Its requests fail; the engine and the other micro-batches go on.
    """

    def __init__(self, layer: int, experts: tuple[int, ...], waited_s: float) -> None:
        super().__init__(
            f"no expert worker served experts {list(experts)} of layer {layer} for {waited_s:.0f} s"
        )
        self.layer = layer
        self.experts = experts


@dataclass(slots=True, eq=False)
class Piece:
    """One message to one rank."""

    ticket: MeshTicket
    peer: str
    part: Part
    message: Message
    since: float | None
    """When its pairs were first sent again or parked, if they were."""
    sent_at: float = 0.0
    answer: Answer | None = None
    copied: torch.Tensor | None = None
    """The answer's rows once its ring slot had to be freed early."""

    @property
    def pairs(self) -> IntArray:
        """Which of the ticket's pairs it carries."""
        return self.message.pairs

    @property
    def rows(self) -> torch.Tensor:
        """The answer's rows."""
        if self.copied is not None:
            return self.copied
        assert self.answer is not None, "combined before it was answered"
        return self.answer.out


@dataclass(frozen=True, slots=True)
class Parked:
    """Pairs that nobody serves now."""

    ticket: MeshTicket
    pairs: IntArray
    since: float
    retry_at: float


@dataclass(slots=True, eq=False)
class MeshTicket:
    """One dispatch on its way. ``done`` once ``result`` will not have to wait."""

    experts: MeshExperts
    layer: int
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    """``[tokens, top_k]`` logical expert and gate weight of pair ``token * top_k + choice``."""
    sent_ns: int
    pieces: list[Piece] = field(default_factory=list)
    missing: int = 0
    """Pieces unanswered and sets of pairs parked."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """When workers computed its pieces."""
    error: ExpertsUnavailableError | TicketAbandonedError | None = None

    @property
    def done(self) -> bool:
        return not self.missing or self.error is not None

    def result(self) -> torch.Tensor:
        """The routed experts' weighted sum ``[tokens, hidden]`` fp32. Call once, when ``done``;
        raises ``ExpertsUnavailableError``.
        """
        return self.experts.combine(self)

    def abandon(self) -> None:
        """Free the ring slots of what has been answered, and pass over what will be."""
        if self.error is None:
            self.error = TicketAbandonedError()
        self.experts.release(self)


@dataclass(slots=True)
class LaneBytes:
    """Activations and pairs that went to a peer, and rows that came back, since start."""

    sent: int = 0
    received: int = 0


@dataclass(slots=True)
class Tally:
    """Counts since start."""

    dispatches: int = 0
    messages: int = 0
    stale: int = 0
    resent: int = 0
    """Pairs sent again after a lost lane or a stale answer."""
    ahead: int = 0
    """Steps that the device went through by itself."""
    again: dict[str, int] = field(default_factory=dict)
    """Such that came to nothing and were run again, by what went wrong."""
    away_ns: int = 0
    """Sum over dispatches of the time from the dispatch until all answers were seen."""
