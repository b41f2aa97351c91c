"""Decode steps of a router on the CPU that C goes through from the first layer to the last, experts
included (``ep_kernels.ahead``).

What goes wrong on the way ends the step early, and its results are worth nothing: then whoever
wanted it runs the micro-batch anew, layer by layer. Nothing but rows of the KV cache that are
written again has changed until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from ep_kernels.ahead import Fault, Kind, StepCall, StepRows
from ep_kernels.few import FEW_TOKENS
from ep_kernels.routing import Choice, Counts, PairRouter, Places, used_ranks
from ep_kernels.shm.router import ShmRouterPlane

from moe_model.kv_cache import KVCache
from moe_model.model import RouterModel
from moe_model.plan import StepPlan

_MOST_SEQUENCES = 64
"""With more a step is long, and its gate better off with a product of all rows."""


@dataclass(frozen=True, slots=True)
class HostStep:
    """What came of a step of ``n`` tokens. Of one with a ``fault`` only that, and the ``peer`` at
    which it showed, mean anything.
    """

    fault: str
    """stale, timed_out, aborted (a lane was lost), corrupt or unplaced; empty if there is none."""
    peer: str
    hidden: torch.Tensor
    """``[n, hidden]``"""
    logits: None
    """Whoever wants them makes them of that."""
    spent: npt.NDArray[np.int64]
    """``[layers, ep_kernels.ahead.Kind]`` nanoseconds, valid until the next step."""
    ids: npt.NDArray[np.int32]
    """``[moe layers, n, top_k]``: experts."""
    sent: npt.NDArray[np.int32]
    """``[moe layers, ranks, 2]``: tokens and pairs; valid until the next step."""


class HostAhead:
    """Steps of ``model`` over the lanes of ``plane``. On the thread that computes."""

    on_device: bool = False
    most_wait_s: float = 5.0
    """Whoever watches this thread must not take it for hung."""

    def __init__(
        self, model: RouterModel, call: StepCall, plane: ShmRouterPlane, choice: Choice, most: int
    ) -> None:
        """``call``: of the model's layers and the plane, for up to ``most`` tokens."""
        self._model = model
        self._call = call
        self._plane = plane
        self._choice: Choice = choice
        self._most = most
        self._ranks: tuple[str | None, ...] = ()
        self.in_reach = True
        self._messages = len(model.spec.moe_layers)

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether chunks of ``counts`` tokens can go ahead."""
        return len(counts) <= self._most and max(counts) == 1

    def route_by(self, layers: Sequence[Places], ranks: Sequence[str]) -> None:
        """Send by these places of each MoE layer's experts from now on; every expert has one."""
        self._ranks = used_ranks(layers, ranks)
        self.in_reach = self._plane.in_memory(rank for rank in self._ranks if rank)
        routes = PairRouter(
            layers,
            num_ranks=len(ranks),
            capacity_tokens=self._plane.shape.capacity_tokens,
            choice=self._choice,
            counts=Counts(len(layers), self._model.spec.num_experts),  # counted by the caller
        )
        self._call.route_by(routes, len(ranks))

    def run(
        self,
        plan: StepPlan,
        kv: KVCache,
        *,
        step: int,
        epoch: int,
        limit_s: float,
        launched: Callable[[], None],
    ) -> HostStep | None:
        """Compute ``plan``, of chunks that ``fits`` says yes to, whose rows of ``kv`` are written.
        ``step`` and ``epoch`` go into the messages; an answer is waited for ``limit_s``.
        ``launched`` is called right before. None, and nothing was done, where a lane is not to be
        had.
        """
        plane, group = self._plane, plan.decodes
        assert group is not None, "single tokens of sequences"
        taken = plane.take(self._ranks, self._messages)
        if taken is None:
            return None
        launched()
        corrupt = -1
        try:
            h = self._model.embed(plan)
            rows = StepRows(
                plan.query_turn,
                plan.key_turn,
                plan.cache_rows,
                group.visible,
                kv.layers,
                kv.block_size,
            )
            done = self._call.run(h, rows, taken, step=step, epoch=epoch, limit_s=limit_s)
            if done.fault is Fault.CORRUPT:
                corrupt = done.lane
        finally:
            plane.give_back(taken, corrupt)
        if done.fault is Fault.NONE:
            spent = done.spent.sum(0)
            plane.copy_ns += int(spent[Kind.COPY])
            plane.signal_ns += int(spent[Kind.SIGNAL])
        return HostStep(
            fault="" if done.fault is Fault.NONE else done.fault.name.lower(),
            peer="" if done.fault is Fault.NONE else self._ranks[done.lane] or "",
            hidden=h,
            logits=None,
            spent=done.spent,
            ids=done.ids,
            sent=done.sent,
        )


def host_ahead(
    model: RouterModel, plane: ShmRouterPlane, *, choice: Choice, shares: bool
) -> HostAhead | None:
    """Steps of ``model`` over ``plane``, routed by ``choice``; ``shares``: see ``StepCall``. None
    where C does not know the model's kind of layer, or the plane's lanes.
    """
    layers, shape = model.step_layers(), plane.shape
    if layers is None or shape.exact or shape.wire is not torch.float32:
        return None
    takes = min(one.attention.most_rows for one in layers)
    most = min(takes, _MOST_SEQUENCES, shape.capacity_tokens)
    # Matrices of few tokens' attention are too small to be shared.
    call = StepCall(layers, plane, most_rows=most, shares=shares and takes > FEW_TOKENS)
    return HostAhead(model, call, plane, choice, most)
