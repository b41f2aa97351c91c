"""Which rank and slot each (token, expert) pair goes to, and what each rank is sent.

Pure, on numpy arrays. A ``RouteTable`` is built once per placement and set of serving ranks;
``choose`` and ``split`` are on the path of every layer of every step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from ep_kernels.plane import IntArray

from mesh.messages import Placement
from mesh.placement import Place, replicas

Index = npt.NDArray[np.int64]

NOWHERE = -1
"""Rank of an expert that nobody serves now."""

_FORGET_AFTER = 4096
"""Tokens sent after which what was sent before counts half."""


class Share(NamedTuple):
    """What one rank gets of a micro-batch: each token once, with its pairs in order."""

    rank: int
    rows: Index
    """Tokens of the micro-batch, ascending."""
    chosen: Index
    """Which of the pairs given to ``split`` these are, ascending."""
    pair_token: IntArray
    """Row of each chosen pair within ``rows``."""


@dataclass(frozen=True, slots=True)
class _LayerRoutes:
    rank_of: Index
    """``[experts]`` first serving rank, or ``NOWHERE``."""
    slot_of: IntArray
    """``[experts]`` local slot at that rank."""
    replicas: dict[int, list[tuple[int, int]]]
    """Experts with more than one serving rank -> (rank, local slot) of each."""


class RouteTable:
    """Where the experts of one placement can be reached while ``serving`` ranks are. ``coming``
    ranks are about to serve.
    """

    def __init__(
        self, placement: Placement, serving: Collection[str], coming: Collection[str] = ()
    ) -> None:
        self.placement = placement
        self.ranks: Sequence[str] = placement.ranks
        self._recent = [0.0] * len(self.ranks)
        self._since_forgetting = 0
        self._layers: dict[int, _LayerRoutes] = {}
        self.unserved: dict[int, tuple[int, ...]] = {}
        """MoE layer -> experts that no serving rank holds, for layers that have such."""
        self._coming: dict[int, frozenset[int]] = {}
        up = [rank in serving for rank in self.ranks]
        soon = [rank in coming for rank in self.ranks]
        for layer, homes in zip(placement.moe_layers, replicas(placement), strict=True):
            found = [_one_per_rank(at for at in home if up[at.rank]) for home in homes]
            self._layers[layer] = _LayerRoutes(
                np.array([at[0][0] if at else NOWHERE for at in found], dtype=np.int64),
                np.array([at[0][1] if at else 0 for at in found], dtype=np.int32),
                {expert: at for expert, at in enumerate(found) if len(at) > 1},
            )
            missing = tuple(expert for expert, at in enumerate(found) if not at)
            if missing:
                self.unserved[layer] = missing
                self._coming[layer] = frozenset(
                    expert for expert in missing if any(soon[at.rank] for at in homes[expert])
                )

    def will_serve(self, layer: int, experts: Iterable[int]) -> bool:
        """Whether all these experts, which nobody serves now, have a rank that is about to."""
        return self._coming.get(layer, frozenset()).issuperset(experts)

    def choose(self, layer: int, experts: Index) -> tuple[Index, IntArray]:
        """Rank (or ``NOWHERE``) and local slot of each pair, from its logical expert ``[pairs]``.

        An expert with several serving ranks is divided over them so that the tokens lately sent
        to each even out; the same history gives the same choice.
        """
        routes = self._layers[layer]
        rank, slot = routes.rank_of[experts], routes.slot_of[experts]
        if routes.replicas:
            self._divide(routes.replicas, experts, rank, slot)
        return rank, slot

    def _divide(
        self,
        replicas: dict[int, list[tuple[int, int]]],
        experts: Index,
        rank: Index,
        slot: IntArray,
    ) -> None:
        """Overwrite ``rank`` and ``slot`` of the replicated experts' pairs, and remember."""
        recent = self._recent
        replicated = []
        for expert, count in enumerate(np.bincount(experts).tolist()):
            if not count:
                continue
            if expert in replicas:
                replicated.append((count, expert))
            else:
                pair = int(np.flatnonzero(experts == expert)[0])
                if rank[pair] != NOWHERE:
                    recent[rank[pair]] += count
        # The largest first, as in any packing; ties by id.
        for count, expert in sorted(replicated, key=lambda item: (-item[0], item[1])):
            at = replicas[expert]
            shares = even_out([recent[r] for r, _slot in at], count)
            pairs = np.flatnonzero(experts == expert)
            start = 0
            for (to_rank, to_slot), share in zip(at, shares, strict=True):
                chosen = pairs[start : start + share]
                rank[chosen] = to_rank
                slot[chosen] = to_slot
                recent[to_rank] += share
                start += share
        self._since_forgetting += len(experts)
        if self._since_forgetting >= _FORGET_AFTER:
            self._since_forgetting = 0
            self._recent = [value / 2 for value in recent]


def _one_per_rank(places: Iterable[Place]) -> list[tuple[int, int]]:
    """(rank, local slot). Two replicas on one rank share its time: the first is as good as both."""
    slots: dict[int, int] = {}
    for place in places:
        slots.setdefault(place.rank, place.local_slot)
    return list(slots.items())


def even_out(loads: Sequence[float], count: int) -> list[int]:
    """Divide ``count`` tokens over ranks of these loads so that the highest sum is least."""
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    used, level = 0, 0.0
    for used in range(1, len(order) + 1):  # pour into the lowest ones until they reach the next
        level = (sum(loads[i] for i in order[:used]) + count) / used
        if used == len(order) or level <= loads[order[used]]:
            break
    shares = [0] * len(loads)
    left = count
    for i in order[:used]:
        shares[i] = min(left, int(level - loads[i]))
        left -= shares[i]
    for position in range(left):  # what rounding down left over
        shares[order[position % used]] += 1
    return shares


def split(rank: Index, token: Index, capacity_tokens: int) -> list[Share]:
    """Group pairs by rank, each rank's in messages of at most ``capacity_tokens`` tokens.

    ``rank`` and ``token`` ``[pairs]`` are each pair's rank and its token, tokens ascending. Pairs
    that go ``NOWHERE`` are left out.
    """
    shares = []
    for to in range(int(rank.max()) + 1):
        chosen = (rank == to).nonzero()[0]
        if not chosen.size:
            continue
        own = token[chosen]
        if own[0] == own[-1]:
            shares.append(Share(to, own[:1], chosen, np.zeros(chosen.size, dtype=np.int32)))
            continue
        first = np.empty(own.size, dtype=np.bool_)
        first[0] = True
        np.not_equal(own[1:], own[:-1], out=first[1:])
        rows = own[first]
        pair_token = first.cumsum(dtype=np.int32)
        pair_token -= 1
        if rows.size <= capacity_tokens:
            shares.append(Share(to, rows, chosen, pair_token))
            continue
        for start in range(0, rows.size, capacity_tokens):
            end = start + capacity_tokens
            low, high = np.searchsorted(pair_token, (start, end)).tolist()
            shares.append(
                Share(to, rows[start:end], chosen[low:high], pair_token[low:high] - np.int32(start))
            )
    return shares
