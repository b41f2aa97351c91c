"""Where the time of engine steps goes, measured on the compute thread at a few dozen points a step.

Computation is split by what the model is asked for; ``send`` routes, copies into lanes and signals;
``wait`` is the time with nothing to do but await experts, and reading their answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from ep_kernels.ahead import Kind

from mesh.layer_groups import LayerGroups
from mesh.metrics import REQUEST_SECONDS, Buckets
from moe_model.forward import MakeClient, ServedModel
from moe_model.plan import Chunk
from moe_model.sampler import TokenSampler

_SPANS = 32
"""As many tensor operations as other micro-batches run between a dispatch and its combine."""


class Phases:
    """Seconds that sequences of gateways spent in each phase of their life here."""

    def __init__(self) -> None:
        self.queue = Buckets(REQUEST_SECONDS)
        """From its arrival until its first tokens were scheduled."""
        self.prefill = Buckets(REQUEST_SECONDS)
        """From there until its first token was drawn."""
        self.decode = Buckets(REQUEST_SECONDS)
        """From there until its last."""


class LayerTimes:
    """Nanoseconds of the compute thread by activity, ``[groups of layers]`` each."""

    __slots__ = ("combine", "compute", "dispatch", "groups", "wait")

    def __init__(self, groups: LayerGroups) -> None:
        self.groups = groups
        count = len(groups.labels)
        self.compute = [0] * count
        """Attention, gate, shared experts and dense layers."""
        self.dispatch = [0] * count
        self.wait = [0] * count
        self.combine = [0] * count

    def computed(self, layer: int, ns: int) -> None:
        self.compute[self.groups.of(layer)] += ns


@dataclass(slots=True)
class Times:
    """Sums in nanoseconds since start; written by the compute thread alone, read by any."""

    steps: int = 0
    tokens: int = 0
    """Tokens computed, prompts and decodes."""
    step_ns: int = 0
    """From the choice of a step's chunks until its results are handed over."""
    plan_ns: int = 0
    attention_ns: int = 0
    gate_ns: int = 0
    """Norm before the experts, and the gate."""
    shared_ns: int = 0
    """Shared experts and dense layers."""
    head_ns: int = 0
    send_ns: int = 0
    wait_ns: int = 0
    combine_ns: int = 0
    sampling_ns: int = 0
    ahead_ns: int = 0
    """Steps that the device went through by itself: launching them, and waiting for their end. And
    those of C that came to nothing."""
    idle_ns: int = 0
    """From dispatches until their answers were added up, the time in which neither this router ran
    tensor operations nor any worker computed a part of what was added up."""
    spans: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_SPANS))
    """Begin and end of the newest tensor operations for layers, oldest first."""
    away_to_ns: int = 0
    """Up to when ``idle_ns`` has been counted."""
    layers: LayerTimes = field(default_factory=lambda: LayerTimes(LayerGroups(1)))
    """What of all this belongs to layers."""
    layer: int = 0
    """The layer dispatched last: what the thread waits for when it waits."""

    def computed(self, layer: int, begin_ns: int, end_ns: int) -> int:
        """Note a tensor operation for a layer; returns how long it took."""
        took_ns = end_ns - begin_ns
        self.layers.computed(layer, took_ns)
        self.spans.append((begin_ns, end_ns))
        return took_ns

    def was_away(self, sent_ns: int, end_ns: int, parts: Iterable[tuple[int, int]]) -> None:
        """Count what was idle between a dispatch and its combine; ``parts``: when workers computed.

        Where dispatches of several micro-batches overlap, no moment is counted twice.
        """
        begin_ns = max(sent_ns, self.away_to_ns)
        own = [span for span in self.spans if span[1] > begin_ns]
        self.idle_ns += uncovered_ns(begin_ns, end_ns, [*parts, *own])
        self.away_to_ns = end_ns

    def went_ahead(self, spent: npt.NDArray[np.int64]) -> int:
        """Note what the layers of a step took, ``[layers, kinds]`` as ``ep_kernels.ahead`` has
        them; returns how long its tokens were with the experts.
        """
        of = self.layers.groups.of
        for layer, kinds in enumerate(spent.tolist()):
            attention, gate, route, copy, signal, shared, wait, combine, idle = kinds
            send, group = route + copy + signal, of(layer)
            self.attention_ns += attention
            self.gate_ns += gate
            self.send_ns += send
            self.shared_ns += shared
            self.wait_ns += wait
            self.combine_ns += combine
            self.idle_ns += idle
            self.layers.compute[group] += attention + gate + shared
            self.layers.dispatch[group] += send
            self.layers.wait[group] += wait
            self.layers.combine[group] += combine
        moe = spent[spent[:, Kind.GATE] > 0]
        return int(moe[:, Kind.ROUTE : Kind.COMBINE].sum())

    @property
    def python_ns(self) -> int:
        """What is in no other part: scheduling, switching, messages."""
        own = self.plan_ns + self.attention_side_ns + self.head_ns + self.sampling_ns
        own += self.ahead_ns
        mesh = self.send_ns + self.wait_ns + self.combine_ns
        return max(0, self.step_ns - own - mesh)

    @property
    def attention_side_ns(self) -> int:
        """All that the router computes for a layer itself."""
        return self.attention_ns + self.gate_ns + self.shared_ns


def uncovered_ns(begin: int, end: int, spans: Iterable[tuple[int, int]]) -> int:
    """Length of ``begin .. end`` that none of the ``spans`` (begin, end) covers."""
    if end <= begin:
        return 0
    uncovered, at = 0, begin
    for low, high in sorted(spans):
        if low >= end:
            break
        if low > at:
            uncovered += low - at
        at = max(at, high)
    return uncovered + max(0, end - at)


class TimedModel:
    """A router's model with a clock beside each call."""

    def __init__(self, model: ServedModel, times: Times) -> None:
        self.spec = model.spec
        self._model = model
        self._times = times

    def clients(self, make: MakeClient) -> MakeClient:
        """See ``RouterModel``; called once."""
        return self._model.clients(make, self._computed)

    def _computed(self, layer: int, began_ns: int, ended_ns: int) -> None:
        self._times.attention_ns += self._times.computed(layer, began_ns, ended_ns)

    def plan(self, chunks: Sequence[Chunk], block_size: int = 16) -> Any:
        started = perf_counter_ns()
        plan = self._model.plan(chunks, block_size)
        self._times.plan_ns += perf_counter_ns() - started
        return plan

    def embed(self, plan: Any) -> torch.Tensor:
        started = perf_counter_ns()
        h = self._model.embed(plan)
        self._times.attention_ns += perf_counter_ns() - started
        return h

    def attend(self, layer: int, h: torch.Tensor, plan: Any, kv: Any) -> torch.Tensor:
        started = perf_counter_ns()
        h = self._model.attend(layer, h, plan, kv)
        self._times.attention_ns += self._times.computed(layer, started, perf_counter_ns())
        return h

    def gate(self, layer: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        started = perf_counter_ns()
        gated = self._model.gate(layer, h)
        self._times.gate_ns += self._times.computed(layer, started, perf_counter_ns())
        return gated

    def shared(self, layer: int, x: torch.Tensor) -> torch.Tensor | None:
        started = perf_counter_ns()
        out = self._model.shared(layer, x)
        self._times.shared_ns += self._times.computed(layer, started, perf_counter_ns())
        return out

    def dense(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        started = perf_counter_ns()
        h = self._model.dense(layer, h)
        self._times.shared_ns += self._times.computed(layer, started, perf_counter_ns())
        return h

    def sampler(self) -> TokenSampler:
        return self._model.sampler()

    def logits(self, h_rows: torch.Tensor) -> torch.Tensor:
        started = perf_counter_ns()
        out = self._model.logits(h_rows)
        self._times.head_ns += perf_counter_ns() - started
        return out
