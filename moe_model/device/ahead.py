"""Decode steps that a device goes through by itself, from embedding to logits, experts included.

The host takes a slot of each lane, launches the step and waits for its end, once. A frame's step is
run kernel by kernel the first time, which compiles what it needs, and is one captured graph from
then on. What goes wrong on the way ends the step early, and its results are worth nothing: then
whoever wanted it runs the micro-batch anew by another way. Nothing but rows of the KV cache that
are written again has changed until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic_ns
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from ep_kernels.routing import Places, used_ranks
from ep_kernels.triton.ahead import ExchangeShape, StepExchange, StepRoutes
from ep_kernels.triton.device import TIMEOUT_S, Device, DeviceHung, wait_for
from ep_kernels.triton.lane_messages import Fault, Verdict
from ep_kernels.triton.symm import SymmRouterPlane
from ep_kernels.triton.transfer import download

from moe_model.device.decode import Frame, fits
from moe_model.device.model import DeviceModel
from moe_model.device.plan import DevicePlan

_MOST_WAIT_S = TIMEOUT_S / 2
"""For one answer: whoever waits for the device must not take it for hung meanwhile."""


@dataclass(frozen=True, slots=True)
class AheadStep:
    """What came of a step of ``n`` tokens. Of one with a ``fault`` only that, and the ``peer`` at
    which it showed, mean anything.
    """

    fault: str
    """stale, timed_out, aborted (a lane was lost), corrupt or unplaced; empty if there is none."""
    peer: str
    hidden: torch.Tensor
    """``[n, hidden]`` on the device, valid until the next step."""
    logits: torch.Tensor
    """``[n, vocab]`` fp32 on the device, the caller's to change until the next step."""
    spent: None
    """The host knows nothing of a device's layers."""
    ids: npt.NDArray[np.int32]
    """``[moe layers, n, top_k]``: experts."""
    sent: npt.NDArray[np.int32]
    """``[moe layers, ranks, 2]``: tokens and pairs."""


class _Frame:
    """A frame's step: its exchange, and where its results lie."""

    def __init__(
        self, model: DeviceModel, frame: Frame, exchange: StepExchange, device: Device
    ) -> None:
        spec = model.spec
        self.exchange = exchange
        self.hidden = torch.zeros(frame.size, spec.hidden_size, device=device.place)
        self.logits = torch.zeros(frame.size, spec.vocab_size, device=device.place)
        self._model = model
        self._plan = frame.plan
        self._graphs = device.graphs()
        self._ran = False
        self._replay: Callable[[], None] | None = None

    def launch(self) -> None:
        if not self._ran:
            self._run()
            self._ran = True
            return
        if self._replay is None:
            self._replay = self._graphs.record(self._run)
        self._replay()

    def _run(self) -> None:
        self.exchange.begin()
        hidden, logits = self._model.through(self._plan, self.exchange)
        self.hidden.copy_(hidden)
        self.logits.copy_(logits)


class DeviceAhead:
    """Steps of ``model`` over the lanes of ``plane``. On the thread that computes."""

    on_device: bool = True
    most_wait_s: float = inf  # it gives up by itself
    in_reach: bool = True  # all lanes of its plane are

    def __init__(self, model: DeviceModel, plane: SymmRouterPlane, device: Device) -> None:
        """``device``: the model's."""
        self._model = model
        self._plane = plane
        self._device = device
        self._stream = model.stream
        self._ranks: tuple[str | None, ...] = ()
        self._routes: StepRoutes | None = None
        self._frames: WeakKeyDictionary[Frame, _Frame] = WeakKeyDictionary()

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether chunks of ``counts`` tokens can go ahead."""
        return fits(counts) and len(counts) <= self._plane.shape.capacity_tokens

    def route_by(self, layers: Sequence[Places], ranks: Sequence[str]) -> None:
        """Send by these places of each MoE layer's experts from now on; every expert has one."""
        self._ranks = used_ranks(layers, ranks)
        if self._routes is None or not self._routes.replace(layers, len(ranks)):
            self._routes = StepRoutes(layers, len(ranks), self._device)
            self._frames.clear()

    def run(
        self,
        plan: DevicePlan,
        kv: object,
        *,
        step: int,
        epoch: int,
        limit_s: float,
        launched: Callable[[], None],
    ) -> AheadStep | None:
        """Compute ``plan``, of chunks that ``fits`` says yes to. ``step`` and ``epoch`` go into the
        messages; an answer is waited for ``limit_s``. ``launched`` is called when the device has
        its work. None, and nothing was done, where a lane is not to be had. Raises ``DeviceHung``.
        """
        del kv  # a frame knows its cache
        plane, device, routes = self._plane, self._device, self._routes
        loan = plan.loan
        assert loan is not None, "only what a frame holds"
        assert routes is not None, "route_by comes first"
        taken = plane.take(self._ranks, len(routes))
        if taken is None:
            return None
        corrupt, count = -1, plan.num_tokens
        try:
            own = self._own(loan.frame, routes)
            limit_ns = int(min(limit_s, _MOST_WAIT_S) * 1e9)
            stamp = (step, epoch, monotonic_ns(), limit_ns, count, plane.abort_address)
            exchange = own.exchange
            exchange.load(taken.fields, stamp, count)
            own.launch()
            launched()
            ids, sent, status = download(
                device, self._stream, exchange.ids, exchange.counts, exchange.status
            )
            verdict = Verdict.of(int(status))
            if verdict.fault is Fault.CORRUPT:
                corrupt = verdict.lane
        except DeviceHung:
            raise
        except BaseException:
            plane.abort()
            wait_for(device, device.mark())
            raise
        finally:
            plane.give_back(taken, corrupt)
        return AheadStep(
            fault="" if verdict.fault is Fault.NONE else verdict.fault.name.lower(),
            peer=self._ranks[verdict.lane] or "",
            hidden=own.hidden[:count],
            logits=own.logits[:count],
            spent=None,
            ids=ids[:, :count].numpy(),
            sent=sent.numpy(),
        )

    def _own(self, frame: Frame, routes: StepRoutes) -> _Frame:
        own = self._frames.get(frame)
        if own is None:
            spec, plane = self._model.spec, self._plane
            shape = ExchangeShape(
                tokens=frame.size,
                top_k=spec.experts_per_token,
                hidden=spec.hidden_size,
                layers=spec.moe_layers,
                wire=plane.shape.wire,
                pair_stride=plane.pair_stride,
            )
            exchange = StepExchange(shape, routes, self._device)
            own = self._frames[frame] = _Frame(self._model, frame, exchange, self._device)
        return own
