"""Logical experts to physical slots: each expert's pairs split evenly over its places.

The numbers are those of ``ep_kernels.routing`` with the choice ``even``, down to its ties: every
place of an expert gets the same, and the odd pairs go one by one, the most wanted expert first, to
the rank that has least, then to the one that was sent less lately, then to the lower rank. Which
of an expert's pairs goes where differs: here the first place takes the first pairs, since a kernel
that weighed each token's other ranks would have to take one token after the other.

Four launches: two count the pairs of each expert, one program divides them, the last one looks up
each pair's place. What was sent lately stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from ep_kernels.plane import IntArray
from ep_kernels.routing import Places
from ep_kernels.triton.arguments import KernelArgumentError, check_positive, check_tensor
from ep_kernels.triton.counting import count_pairs, earlier_in_block, load_groups
from ep_kernels.triton.registry import Variant
from ep_kernels.triton.tuning import architecture_of, tile

FORGET_AFTER = 4096
"""Pairs after which what was sent before counts half, as in ``native/route.c``."""

_FORGET_AFTER = tl.constexpr(FORGET_AFTER)
_MANY = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, slots=True)
class Sent:
    """What a router lately sent to each rank; one for all its layers. Each split changes it."""

    recent: torch.Tensor
    """``[ranks]`` fp64 pairs, older ones counting less."""
    since_forgetting: torch.Tensor
    """``[1]`` int64 pairs."""

    @staticmethod
    def nothing(num_ranks: int, device: torch.device | str) -> Sent:
        return Sent(
            torch.zeros(num_ranks, dtype=torch.float64, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )


@triton.jit
def _divide(
    totals: tl.tensor,  # [BINS] int32: pairs of each expert
    place_expert: tl.tensor,  # [PLACES] int32, ascending
    place_rank: tl.tensor,  # [PLACES] int32
    place_copies: tl.tensor,  # [PLACES] int32: places of that expert
    recent: tl.tensor,  # [RANKS] fp64, in and out
    since_forgetting: tl.tensor,  # [1] int64, in and out
    until: tl.tensor,  # [PLACES] int32, out: pairs of this place and of all before
    pairs: tl.tensor,
    PLACES: tl.constexpr,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    REPLICATED: tl.constexpr,
    PLACES_P2: tl.constexpr,
) -> None:
    place = tl.arange(0, PLACES_P2)
    exists = place < PLACES
    expert = tl.load(place_expert + place, mask=exists, other=EXPERTS)
    rank = tl.load(place_rank + place, mask=exists, other=RANKS)
    copies = tl.load(place_copies + place, mask=exists, other=1)
    count = tl.load(totals + expert, mask=exists, other=0)
    share = count // copies
    over = count % copies
    lately = tl.load(recent + rank, mask=exists, other=0.0)
    # What a rank has is told to each of its places, so that nothing must be looked up by rank.
    load = tl.zeros([PLACES_P2], tl.int32)
    for r in range(RANKS):
        load = tl.where(rank == r, tl.sum(tl.where(rank == r, share, 0)), load)
    waiting = exists & (copies > 1)
    for _ in range(REPLICATED):
        most = tl.max(tl.where(waiting, count, -1))
        chosen = tl.min(tl.where(waiting & (count == most), expert, EXPERTS))
        own = expert == chosen
        odd = tl.max(tl.where(own, over, 0))
        while odd > 0:
            among = own & (load == tl.min(tl.where(own, load, _MANY)))
            among = among & (lately == tl.min(tl.where(among, lately, float("inf"))))
            to = tl.min(tl.where(among, rank, RANKS))
            share += (own & (rank == to)).to(tl.int32)
            load += (rank == to).to(tl.int32)
            odd -= 1
        waiting = waiting & (expert != chosen)
    tl.store(until + place, tl.cumsum(share, axis=0), mask=exists)
    passed = tl.load(since_forgetting) + pairs
    factor = tl.where(passed >= _FORGET_AFTER, 0.5, 1.0)
    for r in range(RANKS):
        sent = tl.max(tl.where(rank == r, load, 0))
        tl.store(recent + r, (tl.load(recent + r) + sent) * factor)
    tl.store(since_forgetting, tl.where(passed >= _FORGET_AFTER, 0, passed))


@triton.jit
def _assign(
    experts: tl.tensor,  # [pairs] int32
    before: tl.tensor,  # [blocks, BINS] int32
    first: tl.tensor,  # [EXPERTS + 1] int32
    until: tl.tensor,  # [places] int32
    physical: tl.tensor,  # [places] int32
    slots: tl.tensor,  # [pairs] int32, out
    pairs: tl.tensor,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST_COPIES: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = load_groups(experts, pairs, EXPERTS, BLOCK)
    number = tl.load(before + tl.program_id(0) * BINS + expert) + earlier_in_block(expert, BLOCK)
    known = expert < EXPERTS
    begin = tl.load(first + expert, mask=known, other=0)
    end = tl.load(first + expert + 1, mask=known, other=0)
    number += tl.load(until + begin - 1, mask=begin > 0, other=0)
    place = begin
    for copy in range(MOST_COPIES):
        full = tl.load(until + begin + copy, mask=begin + copy < end, other=_MANY)
        place += (full <= number).to(tl.int32)
    slot = tl.load(physical + place, mask=place < end, other=-1)
    tl.store(slots + at, slot, mask=at < pairs)


class ReplicaSplit:
    """The places of one layer's experts, on a device. Calls change ``sent``, in the order of the
    device's stream.
    """

    def __init__(self, places: Places, physical: IntArray, sent: Sent) -> None:
        """``physical [places]`` int32: the physical slot at each place, as the result is to name
        it. Raises ``KernelArgumentError`` for places that do not belong together.
        """
        self.sent = sent
        tables = self._tables(places, physical)
        self.num_experts = places.first.size - 1
        self._shape = _shape_of(places)
        self._most_copies, self._replicated, _ = self._shape
        device = sent.recent.device
        self._expert, self._rank, self._copies, self._first, self._physical = (
            table.to(device=device, dtype=torch.int32) for table in tables
        )

    def replace(self, places: Places, physical: IntArray) -> bool:
        """Go by other places from now on, with the same tensors: captured work goes by them too.
        False, and nothing is changed, where they are not as many or otherwise shared out. Raises
        ``KernelArgumentError``.
        """
        tables = self._tables(places, physical)
        if places.first.size - 1 != self.num_experts or _shape_of(places) != self._shape:
            return False
        own = (self._expert, self._rank, self._copies, self._first, self._physical)
        for into, table in zip(own, tables, strict=True):
            into.copy_(table)
        return True

    def _tables(self, places: Places, physical: IntArray) -> tuple[torch.Tensor, ...]:
        num_ranks, count = self.sent.recent.shape[0], places.rank.size
        if physical.shape != (count,) or places.first[-1] != count:
            raise KernelArgumentError(
                "physical", f"for {physical.size} places", f"a slot for each of {count}"
            )
        if count and not 0 <= places.rank.min() <= places.rank.max() < num_ranks:
            raise KernelArgumentError(
                "places", f"on ranks up to {places.rank.max()}", f"ranks 0 to {num_ranks - 1}"
            )
        copies = torch.from_numpy(places.first).diff()
        check_positive("experts", copies.shape[0])
        expert = torch.arange(copies.shape[0], dtype=torch.int32).repeat_interleave(copies)
        return (
            expert,
            torch.from_numpy(places.rank),
            copies.repeat_interleave(copies),
            torch.from_numpy(places.first),
            torch.from_numpy(physical),
        )

    def __call__(self, experts: torch.Tensor) -> torch.Tensor:
        """``experts [tokens, k]`` int32 -> the physical slots of their pairs, ``[tokens, k]``
        int32; -1 for an expert that has no place. Raises ``KernelArgumentError``.
        """
        check_tensor("experts", experts, (None, None), torch.int32, like=self._first)
        slots = torch.empty_like(experts)
        pairs, places = experts.numel(), self._rank.shape[0]
        if not pairs:
            return slots
        if not places:
            return slots.fill_(-1)
        architecture = architecture_of(experts.device)
        counting, shape = tile("counting", architecture), tile("replicas.divide", architecture)
        counts = count_pairs(experts, self.num_experts)
        until = torch.empty(places, dtype=torch.int32, device=experts.device)
        _divide[(1,)](
            counts.totals,
            self._expert,
            self._rank,
            self._copies,
            self.sent.recent,
            self.sent.since_forgetting,
            until,
            pairs,
            PLACES=places,
            RANKS=self.sent.recent.shape[0],
            EXPERTS=self.num_experts,
            REPLICATED=self._replicated,
            PLACES_P2=triton.next_power_of_2(places),
            num_warps=shape.num_warps,
        )
        _assign[(triton.cdiv(pairs, counting["BLOCK"]),)](
            experts,
            counts.before,
            self._first,
            until,
            self._physical,
            slots,
            pairs,
            EXPERTS=self.num_experts,
            BINS=counts.bins,
            BLOCK=counting["BLOCK"],
            MOST_COPIES=self._most_copies,
            num_warps=counting.num_warps,
        )
        return slots


def _shape_of(places: Places) -> tuple[int, int, int]:
    """What kernels are compiled for: the most places of an expert, experts with several, places."""
    copies = np.diff(places.first)
    return int(copies.max(initial=0)), int((copies > 1).sum()), places.rank.size


def reference_split(
    experts: torch.Tensor, places: Places, physical: IntArray, sent: Sent
) -> torch.Tensor:
    """What a ``ReplicaSplit`` computes, pair by pair. Changes ``sent`` likewise."""
    recent = sent.recent.tolist()
    load = [0] * len(recent)
    flat = experts.flatten().tolist()
    counts = [flat.count(expert) for expert in range(places.first.size - 1)]
    of_expert = [
        list(range(begin, end))
        for begin, end in zip(places.first[:-1].tolist(), places.first[1:].tolist(), strict=True)
    ]
    left: dict[int, int] = {}
    for own, count in zip(of_expert, counts, strict=True):
        for place in own:
            left[place] = count // len(own)
            load[places.rank[place]] += left[place]
    for expert in sorted(range(len(counts)), key=lambda e: (-counts[e], e)):
        own = of_expert[expert]
        for _ in range(counts[expert] % len(own) if own else 0):
            to = min(own, key=lambda p: (load[places.rank[p]], recent[places.rank[p]], p))
            left[to] += 1
            load[places.rank[to]] += 1
    slots = []
    for expert in flat:
        open_places = [place for place in of_expert[expert] if left[place]]
        for place in open_places[:1]:
            left[place] -= 1
        slots.append(int(physical[open_places[0]]) if open_places else -1)
    passed = int(sent.since_forgetting) + len(flat)
    factor = 0.5 if passed >= FORGET_AFTER else 1.0
    sent.recent.copy_((sent.recent + torch.tensor(load, dtype=torch.float64)) * factor)
    sent.since_forgetting.fill_(0 if passed >= FORGET_AFTER else passed)
    return torch.tensor(slots, dtype=torch.int32).reshape(experts.shape)


def variants(architecture: int) -> tuple[Variant, ...]:
    """DeepSeek-V3 with 32 redundant experts on 32 ranks (section 3.4.1 of its report)."""
    counting, shape = tile("counting", architecture), tile("replicas.divide", architecture)
    return (
        Variant(
            kernel="replicas.divide",
            name="256 experts and 32 more, 32 ranks",
            function=_divide,
            signature={
                "totals": "*i32:16",
                "place_expert": "*i32:16",
                "place_rank": "*i32:16",
                "place_copies": "*i32:16",
                "recent": "*fp64:16",
                "since_forgetting": "*i64:16",
                "until": "*i32:16",
                "pairs": "i32",
            },
            constexprs={
                "PLACES": 288,
                "RANKS": 32,
                "EXPERTS": 256,
                "REPLICATED": 32,
                "PLACES_P2": 512,
            },
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            hot=True,
        ),
        Variant(
            kernel="replicas.assign",
            name="256 experts and 32 more",
            function=_assign,
            signature={
                "experts": "*i32:16",
                "before": "*i32:16",
                "first": "*i32:16",
                "until": "*i32:16",
                "physical": "*i32:16",
                "slots": "*i32:16",
                "pairs": "i32",
            },
            constexprs={"EXPERTS": 256, "BINS": 512, "BLOCK": counting["BLOCK"], "MOST_COPIES": 2},
            num_warps=counting.num_warps,
            num_stages=counting.num_stages,
            hot=True,
        ),
    )
