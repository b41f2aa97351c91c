"""A decode step's way to the experts and back without the host: for each MoE layer a message to
every lane that has tokens of it, and the sum of their answers, all in the order of one stream.

``StepRoutes`` knows where experts are, ``StepExchange`` has the tensors of one frame. Neither reads
anything back: what changes from step to step is written before it (``load``), what the host wants
to know lies there when it is over (``status``, ``ids``, ``counts``). So a step may be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ep_kernels.plane import IntArray, PlaneError
from ep_kernels.routing import Places
from ep_kernels.triton.all_to_all import combine, plan
from ep_kernels.triton.all_to_all.ahead import signature_of
from ep_kernels.triton.all_to_all.combine import add_up
from ep_kernels.triton.all_to_all.inbox import InboxLayout, InboxShape, Wire, lay_out
from ep_kernels.triton.all_to_all.plan import Lists, Pairs, list_pairs
from ep_kernels.triton.device import Device
from ep_kernels.triton.lane_messages import (
    FIELDS,
    MOST_LANES,
    MOST_NUMBERS,
    STAMPS,
    Field,
    await_answers,
    send,
)
from ep_kernels.triton.registry import Variant
from ep_kernels.triton.replicas import ReplicaSplit, Sent
from ep_kernels.triton.transfer import Fixed
from ep_kernels.triton.tuning import architecture_of, tile

_SLOT_BITS = 16


class StepRoutes:
    """The places of each layer's experts, on a device; ``lanes``: ranks that they are on, of which
    some may have none.
    """

    def __init__(self, layers: Sequence[Places], lanes: int, device: Device) -> None:
        """Raises ``PlaneError`` for more than kernels can tell apart."""
        if lanes > MOST_LANES or len(layers) > MOST_NUMBERS:
            raise PlaneError(
                f"a step goes ahead over at most {MOST_LANES} lanes and {MOST_NUMBERS} layers, not "
                f"{lanes} and {len(layers)}"
            )
        self.lanes = lanes
        sent = Sent.nothing(lanes, device.place)
        self._splits = [ReplicaSplit(places, _codes(places), sent) for places in layers]

    def replace(self, layers: Sequence[Places], lanes: int) -> bool:
        """Go by other places from now on, captured steps included; False where those have to be
        made anew, with other ``StepRoutes``.
        """
        return (
            lanes == self.lanes
            and len(layers) == len(self._splits)
            and all(
                split.replace(places, _codes(places))
                for split, places in zip(self._splits, layers, strict=True)
            )
        )

    def __len__(self) -> int:
        return len(self._splits)

    def split(self, number: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lane and slot of each pair of the ``number``-th layer, ``[tokens, top_k]`` int32; lanes
        of pairs that go nowhere are negative.
        """
        codes = self._splits[number](ids)
        return codes >> _SLOT_BITS, codes & ((1 << _SLOT_BITS) - 1)


def _answers(tokens: int, hidden: int) -> InboxLayout:
    """What an answer is like."""
    return lay_out(InboxShape(1, 1, tokens, 0, hidden, Wire.FP32))


def _codes(places: Places) -> IntArray:
    return (places.rank << _SLOT_BITS | places.slot).astype(np.int32)


@dataclass(frozen=True, slots=True)
class ExchangeShape:
    """What the tensors of a frame's exchange follow from: ``tokens`` rows of ``hidden`` values with
    ``top_k`` pairs each, the model's numbers of the MoE ``layers``, and of the lanes the ``wire``
    and the bytes from one pair array to the next.
    """

    tokens: int
    top_k: int
    hidden: int
    layers: tuple[int, ...]
    wire: torch.dtype
    pair_stride: int


class StepExchange:
    """A frame's messages of a step. All but ``load`` may be captured, in the order ``begin``, then
    ``dispatch`` and ``combine`` for each layer.
    """

    def __init__(self, shape: ExchangeShape, routes: StepRoutes, device: Device) -> None:
        place, lanes, tokens = device.place, routes.lanes, shape.tokens

        def ints(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=place)

        self._shape = shape
        self._routes = routes
        self._architecture = architecture_of(place)
        self._answers = _answers(tokens, shape.hidden)
        self._loaded = Fixed(
            device,
            torch.zeros((FIELDS, lanes), dtype=torch.int64),
            torch.zeros((STAMPS,), dtype=torch.int64),
            torch.zeros((tokens, 1), dtype=torch.bool),
        )
        self._lanes, self._stamp, self._live = self._loaded.views
        self._lists = Lists(lanes, tokens, shape.top_k, place)
        self._counter, self._answered = ints(lanes), ints(lanes)
        self._nowhere = ints(1) - 1
        self._pairs: Pairs | None = None
        self.status = ints(1)
        """What went wrong first: see ``Verdict``."""
        self.ids = ints(len(shape.layers), tokens, shape.top_k)
        """Experts chosen in each layer; -1 for tokens that are none."""
        self.counts = ints(len(shape.layers), lanes, 2)
        """Tokens and pairs that each lane was sent in each layer."""

    def load(self, lanes: np.ndarray, stamp: Sequence[int], live: int) -> None:
        """Say what the next step is to use: ``lanes`` int64 ``[FIELDS, lanes]``, a ``stamp`` of
        ``STAMPS`` words, and how many rows are tokens.
        """
        rows = torch.zeros((self._shape.tokens, 1), dtype=torch.bool)
        rows[:live] = True
        self._loaded.send(torch.from_numpy(lanes), torch.tensor(stamp, dtype=torch.int64), rows)

    def begin(self) -> None:
        self.status.zero_()

    def dispatch(
        self, number: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Send the ``number``-th MoE layer's rows ``x [tokens, hidden]`` fp32 to the lanes of the
        places of ``ids``; ids int32 and weights fp32 ``[tokens, top_k]``.
        """
        shape, lists = self._shape, self._lists
        chosen, lists.counts = self.ids[number], self.counts[number]
        torch.where(self._live, ids, self._nowhere, out=chosen)
        lane, slot = self._routes.split(number, chosen)
        self._pairs = Pairs(lane, slot, chosen, weights)
        list_pairs(lists, self._pairs, self._architecture)
        send(
            x,
            lists,
            self._lanes,
            self._stamp,
            self.status,
            self._counter,
            number,
            shape.layers[number],
            wire=shape.wire,
            pair_stride=shape.pair_stride,
            post=True,
            architecture=self._architecture,
        )

    def combine(self, number: int) -> torch.Tensor:
        """What the lanes answer to the ``number``-th layer, added up: ``[tokens, hidden]`` fp32.
        Zeros, or what is there, once something went wrong.
        """
        pairs, lists = self._pairs, self._lists
        assert pairs is not None, "nothing was dispatched"
        await_answers(
            self.counts[number],
            self._lanes,
            self._stamp,
            self.status,
            self._answered,
            number,
            top_k=self._shape.top_k,
            architecture=self._architecture,
        )
        out_of = self._lanes[Field.OUT]
        return add_up(pairs, lists, self._answered, out_of, self._answers, self._architecture)


def variants(architecture: int) -> tuple[Variant, ...]:
    """The exchange's kernels as steps use them: a frame of 64 tokens of DeepSeek-V3."""
    listing, adding = tile("plan", architecture), tile("combine", architecture)
    answers = _answers(64, 7168)
    return (
        Variant(
            kernel="all_to_all.plan",
            name="64 tokens, lists alone",
            function=plan.plan_kernel,
            signature=signature_of(plan.plan_kernel, {"pair_weight_ptr": "*fp32:16"}),
            constexprs=plan.list_constants(64, 8, listing),
            num_warps=listing.num_warps,
            num_stages=listing.num_stages,
            hot=True,
        ),
        Variant(
            kernel="all_to_all.combine",
            name="64 tokens, sums that are there",
            function=combine.combine_kernel,
            signature=signature_of(combine.combine_kernel, {}),
            constexprs=combine.constants_of(answers, adding, top_k=8, exact=False, streamed=True),
            num_warps=adding.num_warps,
            num_stages=adding.num_stages,
            hot=True,
            expects=r"LDG\.E\.128\S*",
        ),
    )
