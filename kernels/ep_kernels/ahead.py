"""A decode step of a router on the CPU, from embeddings through all layers, as one call into C.

It sends to expert workers over lanes in shared memory, and waits for them. Anything that is not as
it should be ends the step, and its results are worth nothing then; what was sent and not answered
stays with the lanes (``ShmRouterPlane.give_back``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ep_kernels.attend import VisibleKeys
from ep_kernels.few import FewDense, FewGate
from ep_kernels.half_ffn import HalfExpert
from ep_kernels.latent import DecodeCall, StepFields
from ep_kernels.native_library import load
from ep_kernels.routing import PairRouter
from ep_kernels.rows import RmsNorm
from ep_kernels.serve import function_address
from ep_kernels.shm.doorbell import Bell
from ep_kernels.shm.router import ShmRouterPlane, Taken

_POINTER, _LONG, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Fault(IntEnum):
    """Why a step came to nothing."""

    NONE = 0
    STALE = 1
    TIMED_OUT = 2
    ABORTED = 3
    CORRUPT = 4
    UNPLACED = 5


_BAD_ROW: Final = 6


class Kind(IntEnum):
    """What a layer's nanoseconds are spent on."""

    ATTENTION = 0
    GATE = 1
    ROUTE = 2
    COPY = 3
    SIGNAL = 4
    SHARED = 5
    WAIT = 6
    COMBINE = 7
    IDLE = 8
    """Of those from the dispatch until its answers were there: neither this router nor a worker
    computed."""


@dataclass(frozen=True, slots=True)
class StepLayer:
    """One decoder layer. A MoE layer has a ``gate`` and perhaps a shared expert, ``ffn``; a dense
    one the ``norm`` before its ``ffn``.
    """

    number: int
    attention: DecodeCall
    gate: FewGate | None
    norm: RmsNorm | None
    ffn: HalfExpert | FewDense | None


class StepRows(NamedTuple):
    """Single tokens of ``n`` sequences; see ``DecodeCall``."""

    query_turn: torch.Tensor
    key_turn: torch.Tensor
    at: torch.Tensor
    visible: VisibleKeys
    caches: Sequence[torch.Tensor]
    """Of each layer."""
    block_size: int


class Outcome(NamedTuple):
    """What came of a step of ``n`` tokens. Of one with a fault only that, and the index of the
    lane at which it showed, mean anything; the rest is valid until the next step.
    """

    fault: Fault
    lane: int
    ids: npt.NDArray[np.int32]
    """``[moe layers, n, top_k]``"""
    sent: npt.NDArray[np.int32]
    """``[moe layers, lanes, 2]``: tokens and pairs."""
    spent: npt.NDArray[np.int64]
    """``[layers, kinds]``: nanoseconds."""


class _Calls(ctypes.Structure):
    _fields_ = tuple((name, _POINTER) for name in ("norm", "gate", "route", "send", "share"))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("attend", "attention", "run", "ffn", "gate")),
        *((name, _POINTER) for name in ("norm", "routes")),
        ("number", _LONG),
        ("epsilon", ctypes.c_float),
    )


class _Lane(ctypes.Structure):
    _fields_ = (("at", _POINTER), ("bell", _POINTER), ("sequence", _LONG))


class _Router(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("by", "layers", "table", "message", "block")),
        *((name, _POINTER) for name in ("word", "asleep_on", "abort")),
        *((name, _LONG) for name in ("num_layers", "num_ranks", "hidden", "top_k")),
        *((name, _LONG) for name in ("spin_ns", "rest", "next_rest")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("attend", StepFields),
        *((name, _POINTER) for name in ("caches", "lanes")),
        *((name, _LONG) for name in ("rows", "step", "epoch", "limit_ns")),
        *((name, _POINTER) for name in ("h", "scratch", "spans", "ids", "sent", "spent")),
        ("where", _LONG),
    )


_RUNS: Final = {
    HalfExpert: function_address("half", "moemesh_half_expert"),
    FewDense: function_address("few", "moemesh_few_dense"),
    type(None): None,
}
_call: Any = load("ahead", keeps_lock=False).moemesh_ahead
_call.restype = _NUMBER
_call.argtypes = (_POINTER, _POINTER)


class StepCall:
    """Steps through ``layers`` over the lanes of ``plane``. One thread at a time."""

    def __init__(
        self, layers: Sequence[StepLayer], plane: ShmRouterPlane, *, most_rows: int, shares: bool
    ) -> None:
        """Steps have up to ``most_rows`` tokens, no more than a message. ``shares``: whether the
        process has a crew, which then takes part while no token is with the experts.
        """
        shape, bell = plane.shape, plane.doorbell
        assert shape.wire is torch.float32, "C copies rows as they are"
        assert not shape.exact, "answers are sums"
        assert most_rows <= shape.capacity_tokens, "a rank gets one message"
        assert most_rows <= min(one.attention.most_rows for one in layers), "nor more than it takes"
        self._hidden, self._top_k, self._most_rows = shape.hidden, shape.top_k, most_rows
        self._num_moe = sum(layer.gate is not None for layer in layers)
        self._calls = _Calls(
            function_address("rows", "moemesh_rms_norm"),
            function_address("few", "moemesh_few_gate"),
            function_address("route", "moemesh_route"),
            function_address("lane", "moemesh_lane_send"),
            function_address("half", "moemesh_crew_share") if shares else None,
        )
        self._layers = (_Layer * len(layers))(*(_layer(one) for one in layers))
        self._scratch = torch.empty(most_rows * (2 * shape.hidden + shape.top_k))
        self._spent = np.zeros((len(layers), len(Kind)), dtype=np.int64)
        self._caches = (_POINTER * len(layers))()
        self._cached: Sequence[torch.Tensor] | None = None
        self._router = _Router(
            by=ctypes.addressof(self._calls),
            layers=ctypes.addressof(self._layers),
            word=bell.address,
            asleep_on=bell.asleep_on_address,
            abort=plane.abort_address,
            num_layers=len(layers),
            hidden=shape.hidden,
            top_k=shape.top_k,
            spin_ns=bell.spin_ns,
            next_rest=1,
        )
        self._step = _Step(scratch=self._scratch.data_ptr(), spent=self._spent.ctypes.data)
        self._held = (tuple(layers), plane)

    def route_by(self, routes: PairRouter, ranks: int) -> None:
        """Go by these routes, to so many ranks, from the next step on."""
        lent = routes.lend(self._most_rows * self._top_k)
        router, step = self._router, self._step
        router.table, router.message, router.block = lent.table, lent.message, lent.block
        router.num_ranks = ranks
        at = iter(lent.layers)
        for layer in self._layers:
            layer.routes = next(at) if layer.gate else None
        self._lanes = (_Lane * ranks)()
        self._spans = np.zeros((ranks + 1, 2), dtype=np.int64)
        self._sent = np.zeros((self._num_moe, ranks, 2), dtype=np.int32)
        step.lanes = ctypes.addressof(self._lanes)
        step.spans, step.sent = self._spans.ctypes.data, self._sent.ctypes.data
        self._routes = routes

    def run(
        self,
        h: torch.Tensor,
        rows: StepRows,
        taken: Taken,
        *,
        step: int,
        epoch: int,
        limit_s: float,
    ) -> Outcome:
        """``h [n, hidden]`` becomes the final hidden states. Writes the step's rows of the caches.
        ``step`` and ``epoch`` go into the messages, which ``taken`` has the ring slots of; they are
        waited for ``limit_s``. Raises ``IndexError`` for a row that a cache does not have.
        """
        count = h.shape[0]
        assert h.is_contiguous(), "C reads it as it lies"
        assert h.shape[1] == self._hidden, "not this model's"
        assert count <= self._most_rows, "no more than there is room for"
        for lane, entry in zip(self._lanes, taken.lanes, strict=True):
            if entry is None:
                lane.at = None
                continue
            to, slot, lane.sequence = entry
            assert isinstance(to.bell, Bell), "a lane in shared memory"
            lane.at, lane.bell = slot.at, to.bell.at
        ids = np.empty((self._num_moe, count, self._top_k), dtype=np.int32)
        cache, visible, at = rows.caches[0], rows.visible, self._step
        if self._cached is not rows.caches:
            self._caches[:] = [one.data_ptr() for one in rows.caches]
            self._cached = rows.caches
        at.attend = StepFields(
            *(rows.query_turn.data_ptr(), rows.key_turn.data_ptr(), rows.at.data_ptr()),
            *(visible.blocks.data_ptr(), visible.offset.data_ptr()),
            *(visible.skip.data_ptr(), visible.keys.data_ptr()),
            *(None, cache.stride(0), cache.shape[0], rows.block_size),
        )
        at.caches = ctypes.addressof(self._caches)
        at.rows, at.step, at.epoch, at.limit_ns = count, step, epoch, int(limit_s * 1e9)
        at.h, at.ids = h.data_ptr(), ids.ctypes.data
        code = _call(ctypes.addressof(self._router), ctypes.addressof(at))
        if code == _BAD_ROW:
            row = int(rows.at[at.where])
            raise IndexError(f"cache row {row} is not in 0 to {cache.shape[0] - 1}")
        return Outcome(Fault(code), at.where, ids, self._sent, self._spent)


def _layer(given: StepLayer) -> _Layer:
    gate, norm, ffn = given.gate, given.norm, given.ffn
    assert gate is not None or (norm is not None and ffn is not None), "a dense layer has an FFN"
    return _Layer(
        *(given.attention.run, given.attention.address),
        *(_RUNS[type(ffn)], None if ffn is None else ffn.address),
        None if gate is None else gate.address,
        None if norm is None else norm.weight_address,
        None,
        given.number,
        0.0 if norm is None else norm.epsilon,
    )
