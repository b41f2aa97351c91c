"""Multi-head latent attention of decoding sequences, as one call into C.

It is what ``half``, ``rows`` and ``attend`` do one after the other; asked for step by step they
take a dozen calls a layer, which cost a lone sequence as much as a third of its weights.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

from ep_kernels.attend import VisibleKeys
from ep_kernels.half import HalfMatrices, HalfMatrix
from ep_kernels.native_library import load
from ep_kernels.rows import LatentRows, RmsNorm
from ep_kernels.serve import function_address

_POINTER, _LONG, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Steps(ctypes.Structure):
    _fields_ = tuple(
        (name, _POINTER) for name in ("linear", "norm", "rows", "turn", "attend", "share")
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("by", "norm", "rows")),
        *((name, _POINTER) for name in ("first", "query", "key_up", "value_up", "out")),
        ("epsilon", ctypes.c_float),
        *((name, _NUMBER) for name in ("hidden", "source", "heads", "nope", "latent", "rotary")),
        ("value", _NUMBER),
    )


class StepFields(ctypes.Structure):
    """C's ``latent_step``."""

    _fields_ = (
        *((name, _POINTER) for name in ("query_turn", "key_turn", "at")),
        *((name, _POINTER) for name in ("blocks", "offset", "skip", "keys", "cache")),
        *((name, _LONG) for name in ("stride", "cache_rows", "block_size")),
    )


_STEPS = _Steps(
    function_address("half", "moemesh_half_linear"),
    function_address("rows", "moemesh_rms_norm"),
    function_address("rows", "moemesh_latent_rows"),
    function_address("rows", "moemesh_turn"),
    function_address("attend", "moemesh_attend"),
    function_address("half", "moemesh_crew_do"),
)


class DecodeCall:
    """Norm and latent attention of one layer, for up to ``most_rows`` single tokens of any
    sequences. ``run`` is the address of the function in C, ``address`` that of what it takes first.
    """

    __slots__ = ("_call", "_held", "_hidden", "_query", "_rotary", "address", "most_rows", "run")

    def __init__(
        self,
        call: Any,
        run: int,
        layer: ctypes.Structure,
        held: object,
        *,
        hidden: int,
        query: int,
        rotary: int,
        most_rows: int,
    ) -> None:
        """``call``: the function in C. ``query`` and ``rotary``: values of a head's query and of a
        rotary key. ``held``: what ``layer`` has the addresses of.
        """
        self._call = call
        self._call.restype = _LONG
        self._call.argtypes = (_POINTER, _POINTER, _POINTER, _LONG, _NUMBER, _POINTER)
        self._hidden, self._query, self._rotary = hidden, query, rotary
        self._held = (layer, held)
        self.run = run
        self.address = ctypes.addressof(layer)
        self.most_rows = most_rows

    def __call__(
        self,
        h: torch.Tensor,
        query_turn: torch.Tensor,
        key_turn: torch.Tensor,
        cache: torch.Tensor,
        at: torch.Tensor,
        block_size: int,
        visible: VisibleKeys,
        *,
        add: bool,
    ) -> torch.Tensor:
        """``h [n, hidden]`` fp32 -> attention on its norm, plus ``h`` with ``add``; as wide.

        Turns, ``cache [rows, at least latent + rotary]`` and ``at [n]`` as ``LatentRows`` has them;
        ``visible`` of ``n`` queries includes the rows written here. Raises ``IndexError`` for a
        row that the cache does not have.
        """
        rows, hidden = h.shape
        assert rows <= self.most_rows, "no more than it is made for"
        assert hidden == self._hidden, "not a row of this attention"
        assert h.is_contiguous(), "C reads rows as they lie"
        assert query_turn.shape[-1] == self._query // 2, "a turn for each pair of a query"
        assert key_turn.shape[-1] == self._rotary // 2, "a turn for each pair of a key"
        step = StepFields(
            *(query_turn.data_ptr(), key_turn.data_ptr(), at.data_ptr()),
            *(visible.blocks.data_ptr(), visible.offset.data_ptr()),
            *(visible.skip.data_ptr(), visible.keys.data_ptr()),
            *(cache.data_ptr(), cache.stride(0), cache.shape[0], block_size),
        )
        out = torch.empty((rows, hidden))
        bad = self._call(
            self.address, ctypes.addressof(step), h.data_ptr(), rows, add, out.data_ptr()
        )
        if bad >= 0:
            raise IndexError(f"cache row {int(at[bad])} is not in 0 to {cache.shape[0] - 1}")
        return out


class LatentDecode(DecodeCall):
    """With 16-bit weights, for any number of tokens. Thread-safe. ``address`` is C's
    ``latent_layer``.
    """

    __slots__ = ()

    def __init__(
        self,
        *,
        norm: RmsNorm,
        first: HalfMatrix,
        rows: LatentRows,
        query: HalfMatrix | None,
        key_up: HalfMatrices,
        value_up: HalfMatrices,
        out: HalfMatrix,
    ) -> None:
        """``first [source + latent + rotary, hidden]``, whose rows ``rows`` takes; ``query [heads *
        (nope + rotary), source]``, None where ``source`` are the queries; ``key_up [heads, latent,
        nope]``, ``value_up [heads, value, latent]``; ``out [hidden, heads * value]``.
        """
        heads, nope, latent = key_up.count, key_up.inputs, key_up.outputs
        queries = rows.query if query is None else query.outputs
        rotary = queries // heads - nope
        assert first.outputs == rows.query + latent + rotary, "a query, a latent and a key"
        assert value_up.count == heads, "as many heads"
        assert value_up.inputs == latent, "values are made of latents"
        assert out.inputs == heads * value_up.outputs, "the output reads every head's value"
        layer = _Layer(
            *(ctypes.addressof(_STEPS), norm.weight_address, rows.address),
            *(first.address, None if query is None else query.address),
            *(key_up.address, value_up.address, out.address),
            *(norm.epsilon, out.outputs, rows.query, heads, nope, latent, rotary),
            value_up.outputs,
        )
        super().__init__(
            load("latent", keeps_lock=False).moemesh_latent,
            function_address("latent", "moemesh_latent"),
            layer,
            (norm, first, rows, query, key_up, value_up, out),
            hidden=out.outputs,
            query=nope + rotary,
            rotary=rotary,
            most_rows=sys.maxsize,
        )
