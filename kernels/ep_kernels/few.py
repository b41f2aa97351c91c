"""A few tokens against matrices that fit a core's cache, each as one call into C.

With torch the calls cost more than the products there: a layer of a small model is a dozen of them.
"""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np
import torch

from ep_kernels.gating import GateKernel
from ep_kernels.latent import DecodeCall
from ep_kernels.native_library import load
from ep_kernels.plane import FloatArray, IntArray
from ep_kernels.serve import function_address

FEW_TOKENS: Final = 4
"""Up to so many a call into C that takes one after another is faster than torch's products."""

_POINTER, _NUMBER, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Ffn(ctypes.Structure):
    _fields_ = (
        *(("hidden", _NUMBER), ("inner", _NUMBER)),
        *((name, _POINTER) for name in ("scratch", "expert")),
        ("slots", _LONG),
    )


class FewFfn:
    """SwiGLU experts in slots. One thread at a time. ``address`` is C's ``few_ffn``.

    The caller keeps the tensors alive that it puts into slots: only addresses are held.
    """

    __slots__ = ("_call", "_ffn", "_scratch", "_slots", "address")

    def __init__(self, hidden: int, inner: int, slots: int) -> None:
        self._scratch = torch.empty(2 * inner)
        self._ffn = _Ffn(hidden, inner, self._scratch.data_ptr())
        self.address = ctypes.addressof(self._ffn)
        self._call = load("few").moemesh_few_ffn
        self._call.restype = _LONG
        self._call.argtypes = (
            *(_POINTER, _POINTER, _LONG),
            *(_POINTER, _POINTER, _POINTER, _LONG),
            _POINTER,
        )
        self._slots = np.zeros((0, 2), dtype=np.uintp)
        self.resize(slots)

    def resize(self, slots: int) -> None:
        """Have so many slots: new ones are empty, the others stay as they are."""
        kept = np.zeros((slots, 2), dtype=np.uintp)
        stay = min(slots, len(self._slots))
        kept[:stay] = self._slots[:stay]
        self._slots = kept
        self._ffn.expert, self._ffn.slots = kept.ctypes.data, slots

    def put(self, slot: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """Fill a slot: ``gate_up`` ``[hidden, 2 inner]``, ``down`` ``[inner, hidden]``, fp32."""
        assert gate_up.is_contiguous(), "C reads it as it lies"
        assert down.is_contiguous(), "C reads it as it lies"
        self._slots[slot] = gate_up.data_ptr(), down.data_ptr()

    def clear(self, slot: int) -> None:
        self._slots[slot] = 0

    def __call__(
        self,
        x: torch.Tensor,
        pair_token: IntArray,
        pair_slot: IntArray,
        pair_weight: FloatArray,
        out: torch.Tensor,
    ) -> int | None:
        """``x [n, hidden]`` fp32 -> ``out [n, hidden]``: each token's weighted sum over its pairs,
        whose tokens lie in range. Returns the first pair's index whose slot is empty or not there:
        ``out`` is then worth nothing.
        """
        assert x.is_contiguous(), "C reads it as it lies"
        assert out.is_contiguous(), "C writes it as it lies"
        bad = self._call(
            self.address,
            x.data_ptr(),
            x.shape[0],
            pair_token.ctypes.data,
            pair_slot.ctypes.data,
            pair_weight.ctypes.data,
            pair_slot.size,
            out.data_ptr(),
        )
        return None if bad < 0 else int(bad)


class FewDense:
    """One SwiGLU expert that every token goes through. One thread at a time. ``address`` is C's
    ``few_ffn``.

    It keeps the weights as fp32, and pays up to ``MOST_BYTES`` of that.
    """

    MOST_BYTES: Final = 2 << 20

    __slots__ = ("_call", "_held", "_hidden", "address")

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """``gate_up`` ``[2 inner, hidden]``, ``down`` ``[hidden, inner]``."""
        hidden, inner = down.shape
        kept = (gate_up.float().t().contiguous(), down.float().t().contiguous())
        self._held = (ffn := FewFfn(hidden, inner, 1), kept)
        ffn.put(0, *kept)
        self.address = ffn.address
        self._hidden = hidden
        self._call = load("few").moemesh_few_dense
        self._call.restype = None
        self._call.argtypes = (_POINTER, _POINTER, _LONG, _POINTER)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x [n, hidden]`` fp32 -> ``[n, hidden]``."""
        assert x.is_contiguous(), "C reads it as it lies"
        tokens = x.shape[0]
        out = torch.empty((tokens, self._hidden))
        self._call(self.address, x.data_ptr(), tokens, out.data_ptr())
        return out


class _Gate(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("norm", "weight", "gate", "logits")),
        ("epsilon", ctypes.c_float),
        ("hidden", _NUMBER),
    )


class FewGate:
    """The norm before a layer's experts, and the gate. One thread at a time. ``address`` is C's
    ``few_gate``.
    """

    __slots__ = ("_call", "_held", "_top_k", "address")

    def __init__(
        self, norm: torch.Tensor, epsilon: float, weight: torch.Tensor, choose: GateKernel
    ) -> None:
        """``norm`` ``[hidden]``, ``weight`` ``[experts, hidden]``, of which ``choose`` takes the
        product.
        """
        logits = torch.empty(weight.shape[0])
        kept = (norm.float().contiguous(), weight.float().contiguous(), logits, choose)
        gate = _Gate(
            kept[0].data_ptr(),
            kept[1].data_ptr(),
            choose.address,
            logits.data_ptr(),
            epsilon,
            weight.shape[1],
        )
        self._held = (gate, kept)
        self.address = ctypes.addressof(gate)
        self._top_k = choose.top_k
        self._call = load("few").moemesh_few_gate
        self._call.restype = None
        self._call.argtypes = (_POINTER, _POINTER, _NUMBER, _POINTER, _POINTER, _POINTER)

    def __call__(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``h [n, hidden]`` fp32 -> ``h`` normed, experts ``[n, top_k]`` int32 and their weights
        ``[n, top_k]``, best first.
        """
        assert h.is_contiguous(), "C reads it as it lies"
        tokens = h.shape[0]
        x = torch.empty(h.shape)
        experts = torch.empty((tokens, self._top_k), dtype=torch.int32)
        weights = torch.empty((tokens, self._top_k))
        self._call(
            self.address,
            h.data_ptr(),
            tokens,
            x.data_ptr(),
            experts.data_ptr(),
            weights.data_ptr(),
        )
        return x, experts, weights


class _Latent(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("norm", "first", "source_norm", "query", "latent_norm")),
        ("out", _POINTER),
        *((name, ctypes.c_float) for name in ("epsilon", "latent_epsilon")),
        *((name, _NUMBER) for name in ("hidden", "source", "heads", "latent", "rotary")),
    )


class FewLatent(DecodeCall):
    """With fp32 weights that fit a core's cache, up to ``FEW_TOKENS`` tokens. The key and value
    projections are folded into their neighbours. One thread at a time. ``address`` is C's
    ``few_latent``.
    """

    __slots__ = ()

    def __init__(
        self,
        *,
        norm: torch.Tensor,
        first: torch.Tensor,
        source_norm: torch.Tensor | None,
        query: torch.Tensor | None,
        latent_norm: torch.Tensor,
        out: torch.Tensor,
        epsilon: float,
        latent_epsilon: float,
        heads: int,
    ) -> None:
        """``first`` ``[source + latent + rotary, hidden]``; ``query`` ``[heads * (latent +
        rotary), source]`` and ``source_norm`` where queries have a latent, else ``source`` are the
        queries; ``out`` ``[hidden, heads * latent]``. ``epsilon`` of ``norm``, ``latent_epsilon``
        of the other norms.
        """
        if (query is None) is not (source_norm is None):
            raise ValueError("a query latent has both a norm and a matrix, or there is none")
        width = first.shape[0] // (heads + 1) if query is None else query.shape[0] // heads
        given = (norm, first, source_norm, query, latent_norm, out)
        kept = [None if tensor is None else tensor.float().contiguous() for tensor in given]
        hidden, latent = norm.shape[0], latent_norm.shape[0]
        attention = _Latent(
            *(None if tensor is None else tensor.data_ptr() for tensor in kept),
            *(epsilon, latent_epsilon),
            *(hidden, first.shape[0] - width, heads, latent, width - latent),
        )
        super().__init__(
            load("few").moemesh_few_latent,
            function_address("few", "moemesh_few_latent"),
            attention,
            kept,
            hidden=hidden,
            query=width,
            rotary=width - latent,
            most_rows=FEW_TOKENS,
        )
