"""The mesh as an expert client: dispatch to expert ranks, gather, send again what went astray.

``MeshExperts`` makes ``moe_model.experts.ExpertClient``s, each for a micro-batch, over lanes.
A dispatch becomes *pieces*, one message to one rank each. A piece is on its way, queued behind a
full ring, or parked because nobody serves its experts; it comes back as an answer, or is routed
again when its lane dies, the worker is found hung, or it answers ``STALE``. The ticket keeps the
layer's input until then, so nothing is lost with a lane.

A worker that is slow to answer is gone round until it does: what others serve too goes to them. It
may be hung, which takes seconds to be sure of; a part that is computed twice costs little.

An answer stays in its ring slot until its ticket is combined or abandoned, or the slot is needed:
then it is copied out. So a full ring always waits for the worker, never for this router.

The order in which answers are added is that of the pieces, not of their arrival; so the same
placement gives the same bits. One thread calls everything here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from time import perf_counter_ns

import numpy as np
import torch
from ep_kernels.crew import Crew
from ep_kernels.plane import Answer, AnswerStatus, IntArray, LaneLost, Part, RouterPlane
from ep_kernels.routing import Choice, Counts

from mesh.messages import Placement
from moe_model.experts import combine_rows
from router_svc.profile import Times
from router_svc.routing import RouteTable, no_routes
from router_svc.tickets import (
    ExpertsUnavailableError,
    LaneBytes,
    MeshTicket,
    Parked,
    Piece,
    Tally,
)

_STALE_RETRY_S = 0.02
"""Pause before a stale part goes out again when no newer placement has come: the worker may be
about to finish loading what it was told to."""

_LOOKS = 8
"""How often overdue parts are looked for within the time a worker may take."""

_SLOW_S = 1.0
_SLOW_FACTOR = 4
"""A worker is slow that takes this long for a part, and so many times as long as the longest that
any took lately."""
PAIR_BYTES = 16
"""Token, slot, expert and weight."""
_FORGETS = 0.99
"""How much of that longest time is left after another answer."""


class MicroBatchExperts:
    """``ExpertClient`` of one micro-batch, which is known to have these ``decodes``."""

    __slots__ = ("_decodes", "_experts")

    def __init__(self, experts: MeshExperts, decodes: bytes) -> None:
        self._experts = experts
        self._decodes = decodes

    @property
    def on_device(self) -> bool:
        return self._experts.on_device

    def dispatch(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> MeshTicket:
        """See ``MeshExperts.dispatch``."""
        return self._experts.dispatch(layer, x, topk_ids, topk_weights, self._decodes)


class MeshExperts:
    """All expert ranks of the mesh behind one ``dispatch``."""

    def __init__(
        self,
        plane: RouterPlane,
        *,
        num_experts: int,
        moe_layers: tuple[int, ...],
        capacity_tokens: int,
        replica_choice: Choice,
        exact: bool,
        timeout_s: float,
        answer_timeout_s: float,
        clock: Callable[[], float],
        times: Times,
        crew: Crew,
        wire_bytes: int = 4,
    ) -> None:
        """``timeout_s``: how long pairs may be parked. ``answer_timeout_s``: how long a worker may
        take for a part. ``clock``: monotonic seconds. ``wire_bytes``: of one activation on the way
        to a worker. ``crew`` shares no work while a dispatch is out.
        """
        self._plane = plane
        self.on_device = plane.on_device
        """Whether ``x`` and results lie on the device that the router computes on."""
        self._layer_index = {layer: index for index, layer in enumerate(moe_layers)}
        self._capacity_tokens = capacity_tokens
        self._replica_choice: Choice = replica_choice
        self._exact = exact
        self._timeout_s = timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._look_s = min(answer_timeout_s, _SLOW_S) / _LOOKS
        self._look_at = 0.0  # when to look for overdue parts again
        self._longest_s = 0.0  # time that a part has taken lately
        self._clock = clock
        self._times = times
        self._crew = crew
        self._wire_bytes = wire_bytes
        self.counts = Counts(len(moe_layers), num_experts)
        """Tokens routed to each expert since start."""
        self._routes = no_routes(moe_layers, self.counts, capacity_tokens)
        self._serving: Collection[str] = ()
        self._coming: Collection[str] = ()
        self._silent: Collection[str] = ()
        self._slow: dict[str, float] = {}  # rank that is gone round -> since when it owes an answer
        self._in_flight: dict[str, dict[int, Piece]] = {}
        self._queued: dict[str, deque[Piece]] = {}
        self._holding: dict[int, Piece] = {}  # by the answer's ticket: in a ring slot still
        self._parked: list[Parked] = []
        self.rank_pairs: dict[str, list[int]] = {}
        """Rank -> (token, expert) pairs that it has answered since start, ``[moe layers]``."""
        self.lane_bytes: dict[str, LaneBytes] = {}
        """Rank -> what has gone over its lane since start."""
        self.step = 0
        """Written into headers; the engine counts it."""
        self.tally = Tally()

    @property
    def epoch(self) -> int:
        return self._routes.placement.epoch

    @property
    def ranks(self) -> tuple[str, ...]:
        """Ranks of the placement in use."""
        return self._routes.ranks

    @property
    def unserved(self) -> dict[int, tuple[int, ...]]:
        """MoE layer -> experts that no rank serves now. All of them before the first placement."""
        return self._routes.unserved

    @property
    def routes(self) -> RouteTable:
        """What pairs are routed by now."""
        return self._routes

    @property
    def can_go_ahead(self) -> bool:
        """Whether every expert has a place, and nothing says that a worker would not answer."""
        routes = self._routes
        waits = self._slow or self._queued or self._parked
        return bool(
            routes.used and not (waits or routes.unserved) and routes.used.isdisjoint(self._silent)
        )

    @property
    def patience_s(self) -> float:
        """How long a worker may take for a part before it counts as slow."""
        return min(max(_SLOW_S, _SLOW_FACTOR * self._longest_s), self._answer_timeout_s)

    @property
    def parked(self) -> bool:
        """Whether some pairs wait for a worker that serves their experts."""
        return bool(self._parked)

    def route_by(
        self,
        placement: Placement,
        serving: Collection[str],
        coming: Collection[str] = (),
        silent: Collection[str] = (),
    ) -> None:
        """Use a placement and the ranks that serve it from the next dispatch on, and send what
        was parked, and what slow ranks have and others now serve too. What only ``coming`` ranks
        are about to serve waits for them without limit. ``silent`` ranks are slow as soon as they
        owe an answer.
        """
        # Time counts only while nobody is about to serve them.
        now = self._clock()
        parked = [replace(i, since=now) if self._will_be_served(i) else i for i in self._parked]
        self._serving, self._coming, self._silent = serving, coming, silent
        self._set_routes(placement)
        self._parked = []
        for item in parked:
            self._send_parked(item)
        for peer in self._slow:
            self._send_round(peer)
        self._look_at = 0.0

    def _set_routes(self, placement: Placement) -> None:
        self._routes = RouteTable(
            placement,
            self._serving,
            self._coming,
            self._slow,
            counts=self.counts,
            capacity_tokens=self._capacity_tokens,
            choice=self._replica_choice,
            before=self._routes,
        )

    def lane_lost(self, peer: str) -> None:
        """Route everything again that was under way to ``peer``. Call ``route_by`` first."""
        self._slow.pop(peer, None)
        pieces = [*self._in_flight.pop(peer, {}).values(), *self._queued.pop(peer, ())]
        for piece in pieces:
            self._send_again(piece)

    def micro_batch(self, decodes: bytes) -> MicroBatchExperts:
        """These experts for one micro-batch. ``decodes``: a byte a token, 1 if the token belongs
        to a decode step, 0 if to a prompt.
        """
        return MicroBatchExperts(self, decodes)

    def dispatch(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        decodes: bytes,
    ) -> MeshTicket:
        """Send each token to its experts' ranks. ``x`` ``[tokens, hidden]`` fp32 where the plane
        has its rows, ids int32 and weights fp32 ``[tokens, top_k]`` on the host; none may change
        until the ticket's ``result``.
        """
        started = perf_counter_ns()
        self._crew.keep()  # workers of this host are about to need their cores
        ticket = MeshTicket(self, layer, x, topk_ids, topk_weights, started)
        if decodes:
            try:
                self._send_pairs(ticket, None, None, decodes)
            except BaseException:
                ticket.abandon()
                raise
        self.tally.dispatches += 1
        times, took_ns = self._times, perf_counter_ns() - started
        times.send_ns += took_ns
        times.layer = layer
        times.layers.dispatch[times.layers.groups.of(layer)] += took_ns
        return ticket

    def took(self, seconds: float) -> None:
        """A worker may have taken that long for a part."""
        self._longest_s = max(seconds, self._longest_s * _FORGETS)

    def found_slow(self, peer: str, since_s: float) -> bool:
        """``peer`` owes an answer since ``since_s`` seconds: go round it until that comes. False if
        it is gone round, or gone, already.
        """
        if peer in self._slow or peer not in self._plane.peers():
            return False
        self._slow[peer] = self._clock() - since_s
        self._set_routes(self._routes.placement)
        self._send_round(peer)
        return True

    def pump(self) -> list[LaneLost]:
        """Take what has arrived, send what was queued, fail what waited too long. Never blocks.

        Returns the lanes found lost: the caller updates ``route_by`` and calls ``lane_lost``.
        """
        for answer in self._plane.poll():
            self._take(answer)
        if self._queued:
            self._send_queued()
        if self._parked:
            self._retry_parked()
        return self._plane.lost()

    def overdue(self) -> tuple[list[str], list[str]]:
        """Peers whose compute thread hangs, whatever their heartbeats say: they have had a part for
        longer than ``answer_timeout_s``. And those newly found slow: they get nothing more that
        others serve until they answer, and what they have of that kind is on its way to others.
        Call after ``pump``; treat the former as lost lanes.
        """
        now = self._clock()
        if now < self._look_at:
            return [], []
        self._look_at = now + self._look_s
        owing = self._owing()
        hung = [peer for peer, since in owing.items() if now - since >= self._answer_timeout_s]
        patience_s = self.patience_s
        slow = [
            peer
            for peer, since in owing.items()
            if peer not in self._slow and (now - since >= patience_s or peer in self._silent)
        ]
        if slow:
            self._slow |= {peer: owing[peer] for peer in slow}
            self._set_routes(self._routes.placement)
            for peer in slow:
                self._send_round(peer)
        return hung, slow

    def _send_round(self, peer: str) -> None:
        """Send a slow worker's pieces again, as far as others serve them."""
        in_flight = self._in_flight.get(peer, {}).items()
        self._in_flight[peer] = {n: p for n, p in in_flight if not self._sent_elsewhere(p)}
        queued = [p for p in self._queued.pop(peer, ()) if not self._sent_elsewhere(p)]
        if queued:
            self._queued[peer] = deque(queued)

    def _owing(self) -> dict[str, float]:
        """Since when peers owe an answer to a part, whether that has been sent again or not."""
        oldest = {  # the oldest is first
            peer: next(iter(pieces.values())).sent_at
            for peer, pieces in self._in_flight.items()
            if pieces
        }
        return oldest | self._slow

    def _sent_elsewhere(self, piece: Piece) -> bool:
        """Send a slow worker's piece again if others serve all of it; False if not."""
        ticket = piece.ticket
        if ticket.error is not None or not self._routes.goes_round(
            ticket.layer, piece.part.block.pair_expert.tolist()
        ):
            return False
        self.tally.resent += piece.part.block.num_pairs
        self._withdraw(piece)
        self._send_pairs(ticket, piece.pairs, piece.since)
        return True

    def next_retry_s(self, most_s: float) -> float:
        """Seconds until ``pump`` or ``overdue`` has something to do by itself, at most
        ``most_s``.
        """
        most_s = min(most_s, self._look_s)
        if not self._parked:
            return most_s
        due = min(min(item.retry_at, item.since + self._timeout_s) for item in self._parked)
        return min(most_s, max(0.001, due - self._clock()))

    def combine(self, ticket: MeshTicket) -> torch.Tensor:
        """``MeshTicket.result``: add the answers up and free their ring slots."""
        started = perf_counter_ns()
        self._times.was_away(ticket.sent_ns, started, ticket.spans)
        try:
            if ticket.error is not None:
                raise ticket.error
            assert not ticket.missing, "a ticket was combined before its answers came"
            return self._sum_in_choice_order(ticket) if self._exact else self._sum(ticket)
        finally:
            self.release(ticket)
            times, took_ns = self._times, perf_counter_ns() - started
            times.combine_ns += took_ns
            times.spans.append((started, started + took_ns))
            times.layers.combine[times.layers.groups.of(ticket.layer)] += took_ns

    def release(self, ticket: MeshTicket) -> None:
        """Free the ring slots that a ticket's answers lie in."""
        for piece in ticket.pieces:
            if piece.answer is not None:
                del self._holding[piece.answer.ticket]
                self._plane.release(piece.answer)
                piece.answer = None

    def _sum(self, ticket: MeshTicket) -> torch.Tensor:
        """Partial sums ``[n, hidden]`` of each piece -> ``[tokens, hidden]``."""
        pieces = ticket.pieces
        tokens = ticket.x.shape[0]
        if pieces and all(piece.part.block.num_tokens == tokens for piece in pieces):
            if len(pieces) == 1:
                return pieces[0].rows.clone()
            out = pieces[0].rows + pieces[1].rows
            for piece in pieces[2:]:
                out += piece.rows
            return out
        out = torch.zeros(ticket.x.shape, device=ticket.x.device)
        for piece in pieces:
            out.index_add_(0, piece.part.rows, piece.rows)
        return out

    def _sum_in_choice_order(self, ticket: MeshTicket) -> torch.Tensor:
        """Unweighted rows ``[pairs, hidden]`` of each piece -> ``[tokens, hidden]``, added in the
        order of the gate's choices, so that no placement or failure changes a bit.
        """
        tokens, top_k = ticket.ids.shape
        hidden = ticket.x.shape[1]
        rows = torch.empty(tokens * top_k, hidden)
        for piece in ticket.pieces:
            rows[torch.from_numpy(piece.pairs)] = piece.rows
        return combine_rows(rows.view(tokens, top_k, hidden), ticket.weights)

    def _send_pairs(
        self,
        ticket: MeshTicket,
        pairs: IntArray | None,
        since: float | None,
        decodes: bytes | None = None,
    ) -> None:
        """Route pairs of a ticket (None: all, and count them) and send or park them; ``since`` is
        when they were first parked, if they were.
        """
        routes = self._routes
        messages, nowhere = routes.route(
            ticket.layer, ticket.ids, ticket.weights, pairs=pairs, decodes=decodes
        )
        epoch = routes.placement.epoch
        with self._plane.together():
            for message in messages:
                part = Part(self.step, ticket.layer, epoch, ticket.x, message.block)
                peer = routes.ranks[message.rank]
                piece = Piece(ticket, peer, part, message, since)
                ticket.pieces.append(piece)
                ticket.missing += 1
                if peer in self._queued or not self._try_send(piece):
                    self._queued.setdefault(peer, deque()).append(piece)
        if nowhere is not None:
            self._park(ticket, nowhere, self._clock() if since is None else since, np.inf)

    def _try_send(self, piece: Piece) -> bool:
        """False while the ring is full. A lane that turns out dead parks the piece's pairs."""
        try:
            number = self._plane.try_send(piece.peer, piece.part)
            while number is None and self._free_slot(piece.peer):
                number = self._plane.try_send(piece.peer, piece.part)
        except LaneLost:
            self._park_piece(piece)
            return True
        if number is None:
            return False
        self.tally.messages += 1
        lane = self.lane_bytes.get(piece.peer)
        if lane is None:
            lane = self.lane_bytes[piece.peer] = LaneBytes()
        block = piece.part.block
        row_bytes = piece.part.x.shape[1] * self._wire_bytes
        lane.sent += block.num_tokens * row_bytes + block.num_pairs * PAIR_BYTES
        piece.sent_at = self._clock()
        in_flight = self._in_flight.get(piece.peer)
        if in_flight is None:
            in_flight = self._in_flight[piece.peer] = {}
        in_flight[number] = piece
        return True

    def _free_slot(self, peer: str) -> bool:
        """Copy one answer of ``peer`` out of its ring; False when none lies there."""
        for number, piece in self._holding.items():
            if piece.peer == peer:
                assert piece.answer is not None, "only answered pieces are held"
                piece.copied = piece.answer.out.clone()
                self._plane.release(piece.answer)
                piece.answer = None
                del self._holding[number]
                return True
        return False

    def _take(self, answer: Answer) -> None:
        if self._slow and self._slow.pop(answer.peer, None) is not None:
            self._set_routes(self._routes.placement)
        piece = self._in_flight.get(answer.peer, {}).pop(answer.ticket, None)
        if piece is None:  # sent again since: its lane was given up
            self._plane.release(answer)
            return
        self.took(self._clock() - piece.sent_at)
        ticket = piece.ticket
        if ticket.error is not None:
            self._plane.release(answer)
        elif answer.status is AnswerStatus.STALE:
            self._plane.release(answer)
            self.tally.stale += 1
            self._send_again(piece)
        else:
            piece.answer = answer
            self._holding[answer.ticket] = piece
            ticket.missing -= 1
            self.lane_bytes[answer.peer].received += answer.out.nbytes
            self._count_pairs(piece)
            ticket.spans.append((answer.began_ns, answer.began_ns + answer.compute_ns))
            if not ticket.missing:
                self.tally.away_ns += perf_counter_ns() - ticket.sent_ns

    def _count_pairs(self, piece: Piece) -> None:
        counts = self.rank_pairs.get(piece.peer)
        if counts is None:
            counts = self.rank_pairs[piece.peer] = [0] * len(self._layer_index)
        counts[self._layer_index[piece.ticket.layer]] += piece.part.block.num_pairs

    def _send_queued(self) -> None:
        for peer, queue in tuple(self._queued.items()):
            while queue and (queue[0].ticket.error is not None or self._try_send(queue[0])):
                queue.popleft()
            if not queue:
                del self._queued[peer]

    def _send_again(self, piece: Piece) -> None:
        """Route an unanswered piece's pairs again: at once under another placement than the one
        they were sent by, else after a pause.
        """
        ticket = piece.ticket
        if ticket.error is not None:
            return
        self.tally.resent += piece.part.block.num_pairs
        if piece.part.epoch == self.epoch and piece.peer in self._plane.peers():
            self._park_piece(piece)
        else:
            self._withdraw(piece)
            since = self._clock() if piece.since is None else piece.since
            self._send_pairs(ticket, piece.pairs, since)

    def _withdraw(self, piece: Piece) -> None:
        piece.ticket.pieces.remove(piece)
        piece.ticket.missing -= 1

    def _park_piece(self, piece: Piece) -> None:
        self._withdraw(piece)
        now = self._clock()
        since = now if piece.since is None else piece.since
        self._park(piece.ticket, piece.pairs, since, now + _STALE_RETRY_S)

    def _park(self, ticket: MeshTicket, pairs: IntArray, since: float, retry_at: float) -> None:
        ticket.missing += 1
        self._parked.append(Parked(ticket, pairs, since, retry_at))

    def _will_be_served(self, item: Parked) -> bool:
        return self._routes.will_serve(item.ticket.layer, _experts_of(item))

    def _send_parked(self, item: Parked) -> None:
        if item.ticket.error is None:
            item.ticket.missing -= 1
            self._send_pairs(item.ticket, item.pairs, item.since)

    def _retry_parked(self) -> None:
        now = self._clock()
        parked, self._parked = self._parked, []
        for item in parked:
            ticket = item.ticket
            if ticket.error is not None:
                continue
            if now - item.since >= self._timeout_s:
                if self._will_be_served(item):
                    self._parked.append(replace(item, since=now))
                else:
                    ticket.error = ExpertsUnavailableError(
                        ticket.layer, _experts_of(item), now - item.since
                    )
            elif now >= item.retry_at:
                self._send_parked(item)
            else:
                self._parked.append(item)


def _experts_of(item: Parked) -> tuple[int, ...]:
    return tuple(np.unique(item.ticket.ids.numpy().reshape(-1)[item.pairs]).tolist())
