"""Steps that the router's device, or on the CPU its C, goes through by itself, and when it may.

Such a step is tried where nothing stands against it: only decodes, every expert with a lane whose
worker is neither slow nor silent, nothing parked. It is a try: when an answer is stale or late, or
a lane is lost meanwhile, its results are dropped, and the same micro-batch runs by ``forward``,
which knows what to do. After a try that came to nothing some steps go that way at once, more of
them each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from ep_kernels.routing import Places
from ep_kernels.triton.device import DeviceHung
from structlog.typing import FilteringBoundLogger

from router_svc.experts import PAIR_BYTES, MeshExperts
from router_svc.profile import Times
from router_svc.routing import RouteTable
from router_svc.scheduler import Chunk
from router_svc.tickets import LaneBytes

FAULTS = ("stale", "timed_out", "aborted", "corrupt", "unplaced")
"""What makes a step come to nothing."""
_LONGEST_REST = 64
"""Steps that are not tried after tries that came to nothing (doubling up to this)."""
_SUM_BYTES = 4
"""A value of an answer."""


class Step(Protocol):
    """See ``moe_model.device.ahead.AheadStep`` and ``moe_model.ahead.HostStep``."""

    @property
    def fault(self) -> str: ...

    @property
    def peer(self) -> str: ...

    @property
    def hidden(self) -> torch.Tensor: ...

    @property
    def logits(self) -> torch.Tensor | None: ...

    @property
    def spent(self) -> npt.NDArray[np.int64] | None: ...

    @property
    def ids(self) -> npt.NDArray[np.int32]: ...

    @property
    def sent(self) -> npt.NDArray[np.int32]: ...


class StepsAhead(Protocol):
    """See ``moe_model.device.ahead.DeviceAhead`` and ``moe_model.ahead.HostAhead``."""

    on_device: bool
    """Whether it is a device's, of which the host does not know what the layers take."""
    most_wait_s: float
    """The longest that a step may wait for an answer."""

    @property
    def in_reach(self) -> bool:
        """Whether its messages get to where they go by ``route_by``."""

    def fits(self, counts: Sequence[int]) -> bool: ...

    def route_by(self, layers: Sequence[Places], ranks: Sequence[str]) -> None: ...

    def run(
        self,
        plan: Any,
        kv: Any,
        *,
        step: int,
        epoch: int,
        limit_s: float,
        launched: Callable[[], None],
    ) -> Step | None: ...


class Ahead:
    """Tries steps, and counts what they did as the host's way counts it. On the compute thread."""

    def __init__(
        self,
        device: StepsAhead,
        experts: MeshExperts,
        *,
        pump: Callable[[], None],
        launched: Callable[[], None],
        times: Times,
        log: FilteringBoundLogger,
        wire_bytes: int,
    ) -> None:
        """``pump()`` takes what came of the mesh between steps; ``launched()`` is called while the
        device computes. ``wire_bytes``: of one activation on the way to a worker.
        """
        self._wire_bytes = wire_bytes
        self._device: StepsAhead | None = device
        self._experts = experts
        self._pump = pump
        self._launched = launched
        self._times = times
        self._log = log
        self._routes: RouteTable | None = None
        """What the device goes by."""
        self._rest = 0
        self._next_rest = 1

    def may(self, chunks: Sequence[Chunk]) -> bool:
        """Whether to try a step of ``chunks``."""
        device = self._device
        if device is None or not device.fits([chunk.count for chunk in chunks]):
            return False
        self._pump()
        experts = self._experts
        if not experts.can_go_ahead or experts.patience_s > device.most_wait_s:
            return False
        if self._rest > 0:
            self._rest -= 1
            return False
        try:
            self._go_by(device, experts.routes)
        except DeviceHung:
            raise
        except Exception:  # noqa: BLE001 - the boundary: the host's way is there
            self._failed()
            return False
        return device.in_reach

    @property
    def on_device(self) -> bool:
        return self._device is not None and self._device.on_device

    def run(
        self, plan: Any, kv: Any, decodes: bytes
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Final hidden states ``[n, hidden]`` and logits ``[n, vocab]``, if they were made too, of
        a step that ``may`` be tried, right after that said so; None where it has to be run another
        way.
        """
        device, experts, began = self._device, self._experts, perf_counter_ns()
        assert device is not None, "may said yes"
        try:
            limit_s = experts.patience_s
            step = device.run(
                plan,
                kv,
                step=experts.step,
                epoch=experts.epoch,
                limit_s=limit_s,
                launched=self._launched,
            )
        except DeviceHung:
            raise
        except Exception:  # noqa: BLE001 - the boundary: the host's way is there
            self._failed()
            return None
        took_ns = perf_counter_ns() - began
        if step is None or step.fault or step.spent is None:
            self._times.ahead_ns += took_ns
        else:
            self._experts.tally.away_ns += self._times.went_ahead(step.spent)
        if step is None:
            return None
        if step.fault:
            self._came_to_nothing(step, limit_s)
            return None
        self._next_rest = 1
        experts.took(took_ns / 1e9)  # no part took longer than all of them
        self._count(step, decodes)
        return step.hidden, step.logits

    def _failed(self) -> None:
        self._log.exception("ahead.failed", reason="steps go the host's way from now on")
        self._device = None

    def _go_by(self, device: StepsAhead, routes: RouteTable) -> None:
        if routes is not self._routes:
            self._routes = None
            device.route_by(routes.layers, routes.ranks)
            self._routes = routes

    def _count(self, step: Step, decodes: bytes) -> None:
        experts, ids, sent = self._experts, step.ids, step.sent
        counts = experts.counts
        tokens = _counted(ids, counts.tokens.shape[1])
        counts.tokens += tokens
        if 0 in decodes:
            is_decode = np.frombuffer(decodes, dtype=np.bool_)
            tokens = _counted(ids[:, is_decode], counts.tokens.shape[1])
        counts.decodes += tokens
        hidden = step.hidden.shape[1]
        for rank, name in enumerate(experts.routes.ranks):
            rows, pairs = sent[:, rank].sum(0).tolist()
            if not rows:
                continue
            lane = experts.lane_bytes.setdefault(name, LaneBytes())
            lane.sent += rows * hidden * self._wire_bytes + pairs * PAIR_BYTES
            lane.received += rows * hidden * _SUM_BYTES
            own = experts.rank_pairs.setdefault(name, [0] * len(ids))
            for layer, of_layer in enumerate(sent[:, rank, 1].tolist()):
                own[layer] += of_layer
        tally = experts.tally
        tally.ahead += 1
        tally.dispatches += len(ids)
        tally.messages += int(np.count_nonzero(sent[:, :, 0]))

    def _came_to_nothing(self, step: Step, limit_s: float) -> None:
        again = self._experts.tally.again
        again[step.fault] = again.get(step.fault, 0) + 1
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        if step.fault == "timed_out" and self._experts.found_slow(step.peer, limit_s):
            reason = "what others serve goes to them"
            self._log.warning("worker.slow", peer=step.peer, reason=reason)
        self._pump()


def _counted(ids: npt.NDArray[np.int32], num_experts: int) -> npt.NDArray[np.int64]:
    """``[layers, ..]`` -> how often each expert is there ``[layers, experts]``."""
    layers = ids.shape[0]
    first = np.arange(layers).reshape(-1, 1) * num_experts
    places = (ids.reshape(layers, -1) + first).ravel()
    return np.bincount(places, minlength=layers * num_experts).reshape(layers, num_experts)
