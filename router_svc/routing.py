"""Where the experts of a placement can be reached, and the messages that a layer's pairs make.

A ``RouteTable`` is built once per placement and set of serving ranks; ``route`` is on the path of
every layer of every step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt
import torch
from ep_kernels.plane import IntArray
from ep_kernels.routing import Choice, Counts, Message, PairRouter, Places

from mesh.messages import Placement
from mesh.placement import EMPTY

_Mask = npt.NDArray[np.bool_]


class RouteTable:
    """The routes of one placement while ``serving`` ranks are. ``coming`` ranks are about to
    serve. ``slow`` ones get only what nobody else serves. ``before`` is the table that this one
    replaces: what its ranks were sent lately counts on.
    """

    def __init__(
        self,
        placement: Placement,
        serving: Collection[str],
        coming: Collection[str] = (),
        slow: Collection[str] = (),
        *,
        counts: Counts,
        capacity_tokens: int,
        choice: Choice,
        before: RouteTable | None = None,
    ) -> None:
        self.placement = placement
        self.ranks = placement.ranks
        self._index = {layer: index for index, layer in enumerate(placement.moe_layers)}
        self.unserved: dict[int, tuple[int, ...]] = {}
        """MoE layer -> experts that no serving rank holds, for layers that have such."""
        self._coming: dict[int, frozenset[int]] = {}
        self._slow: dict[int, frozenset[int]] = {}  # experts that only slow ranks serve
        slots = np.array(placement.slots_per_rank, dtype=np.int32)
        rank = np.repeat(np.arange(len(slots), dtype=np.int32), slots)  # [physical slots]
        local = np.concatenate([np.arange(n, dtype=np.int32) for n in (0, *slots)])
        up = np.array([name in serving for name in self.ranks], dtype=np.bool_)[rank]
        late = up & np.array([name in slow for name in self.ranks], dtype=np.bool_)[rank]
        soon = np.array([name in coming for name in self.ranks], dtype=np.bool_)[rank]
        layers = []
        for layer, row in zip(placement.moe_layers, placement.physical_to_logical, strict=True):
            experts = np.array(row, dtype=np.int32)  # [physical slots]
            used = up
            if late.any():
                alone = late & ~np.isin(experts, experts[up & ~late])
                used = up & ~late | alone
                self._slow[layer] = frozenset(experts[alone].tolist())
            places = _places(experts, rank, local, used, placement.num_experts)
            layers.append(places)
            missing = tuple(np.flatnonzero(np.diff(places.first) == 0).tolist())
            if missing:
                self.unserved[layer] = missing
                self._coming[layer] = frozenset(experts[soon].tolist()).intersection(missing)
        self.layers: tuple[Places, ...] = tuple(layers)
        """Where each MoE layer's experts are reached."""
        self.used = frozenset(
            self.ranks[r] for places in layers for r in np.unique(places.rank).tolist()
        )
        """Ranks that get any."""
        self._router = PairRouter(
            layers,
            num_ranks=len(self.ranks),
            capacity_tokens=capacity_tokens,
            choice=choice,
            counts=counts,
        )
        if before is not None:
            lately = before.lately
            self._router.recent[:] = [lately.get(name, 0.0) for name in self.ranks]

    @property
    def lately(self) -> dict[str, float]:
        """Rank -> pairs lately sent to it, older ones counting less."""
        return dict(zip(self.ranks, self._router.recent.tolist(), strict=True))

    def will_serve(self, layer: int, experts: Iterable[int]) -> bool:
        """Whether all these experts, which nobody serves now, have a rank that is about to."""
        return self._coming.get(layer, frozenset()).issuperset(experts)

    def goes_round(self, layer: int, experts: Iterable[int]) -> bool:
        """Whether ranks that are not slow serve all these experts."""
        stuck = self._slow.get(layer, frozenset()).union(self.unserved.get(layer, ()))
        return stuck.isdisjoint(experts)

    def route(
        self,
        layer: int,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        pairs: IntArray | None = None,
        decodes: bytes | None = None,
    ) -> tuple[list[Message], IntArray | None]:
        """Messages for the pairs of a micro-batch, and the pairs that go nowhere: see
        ``PairRouter.route``. ``layer`` is the model's number.
        """
        return self._router.route(self._index[layer], ids, weights, pairs=pairs, decodes=decodes)


def no_routes(moe_layers: tuple[int, ...], counts: Counts, capacity_tokens: int) -> RouteTable:
    """Before the first placement: no rank, and nobody serves anything."""
    num_experts = counts.tokens.shape[1]
    nowhere = Placement(
        epoch=0,
        moe_layers=moe_layers,
        num_experts=num_experts,
        ranks=(),
        slots_per_rank=(),
        physical_to_logical=((),) * len(moe_layers),
    )
    return RouteTable(
        nowhere, (), counts=counts, capacity_tokens=capacity_tokens, choice="water-fill"
    )


def _places(
    experts: IntArray, rank: IntArray, local: IntArray, up: _Mask, num_experts: int
) -> Places:
    """Of each expert the slots at ranks that are up, all but the first of two at one rank left
    out: they share its time, so the first is as good as both.
    """
    slots = np.flatnonzero(up & (experts != EMPTY))
    slots = slots[np.argsort(experts[slots], kind="stable")]  # by expert, then rank
    expert, at = experts[slots], rank[slots]
    again = np.zeros(slots.size, dtype=np.bool_)
    again[1:] = (expert[1:] == expert[:-1]) & (at[1:] == at[:-1])
    slots = slots[~again]
    first = np.searchsorted(experts[slots], np.arange(num_experts + 1)).astype(np.int32)
    return Places(first, rank[slots], local[slots])
