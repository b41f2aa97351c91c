"""What is done to rows between matrix products, each as one call into C: with torch it is several,
and at few rows the calls cost the time.
"""

from __future__ import annotations

import ctypes

import torch

from ep_kernels.native_library import load


class RmsNorm:
    """``x [n, width] -> [n, width]``: each row over its root mean square, times ``weight [width]``
    (arXiv 1910.07467). A row depends on itself alone; rows of ``x`` may lie apart, as in a slice of
    columns.
    """

    __slots__ = ("_call", "_weight", "_width", "epsilon", "weight_address")

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self._weight = weight.float().contiguous()
        self.weight_address = self._weight.data_ptr()
        self._width = weight.shape[0]
        self.epsilon = epsilon
        self._call = load("rows").moemesh_rms_norm
        self._call.restype = None
        self._call.argtypes = (
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_float,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_void_p,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        stride, step = x.stride()
        if width != self._width or (step != 1 and width > 1):
            raise ValueError(f"expected rows of {self._width} values, got shape {list(x.shape)}")
        out = torch.empty((rows, width))
        self._call(
            x.data_ptr(), stride, self.weight_address, self.epsilon, rows, width, out.data_ptr()
        )
        return out


class _Latent(ctypes.Structure):
    _fields_ = (
        ("query_weight", ctypes.c_void_p),
        ("latent_weight", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("query", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("latent", ctypes.c_int32),
        ("rotary", ctypes.c_int32),
    )


class LatentRows:
    """From the first product of multi-head latent attention to queries and cache rows.

    The product's rows are a query, or its latent where there is a ``query_norm``, then the latent
    of key and value, then a rotary key. Rotations are complex numbers of modulus 1 and a scale.
    """

    __slots__ = ("_call", "_heads", "_held", "_turn", "_width", "address", "query")

    def __init__(
        self,
        query_norm: torch.Tensor | None,
        latent_norm: torch.Tensor,
        epsilon: float,
        *,
        query: int,
        heads: int,
        rotary: int,
    ) -> None:
        """``query``: width of a row's first part. ``rotary``: of its last."""
        weights = [latent_norm.float().contiguous()]
        if query_norm is not None:
            weights.append(query_norm.float().contiguous())
        latent = _Latent(
            None if query_norm is None else weights[1].data_ptr(),
            weights[0].data_ptr(),
            epsilon,
            query,
            heads,
            latent_norm.shape[0],
            rotary,
        )
        self._held = (latent, weights)
        self.address = ctypes.addressof(latent)
        """C's ``latent_rows``."""
        self.query = query
        self._heads = heads
        self._width = query + latent_norm.shape[0] + rotary
        library = load("rows")
        pointer, number, long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self._call = library.moemesh_latent_rows
        self._call.restype = number
        self._call.argtypes = (
            *(pointer, pointer, number),
            *(pointer,) * 4,
            *(long, long, pointer),
        )
        self._turn = library.moemesh_turn
        self._turn.restype = None
        self._turn.argtypes = (pointer, pointer, number, number, number)

    def __call__(
        self,
        x: torch.Tensor,
        query_turn: torch.Tensor,
        key_turn: torch.Tensor,
        cache: torch.Tensor,
        at: torch.Tensor,
    ) -> torch.Tensor:
        """``x [n, query + latent + rotary]`` -> queries ``[n, query]``: normed latents, or turned
        by ``query_turn [n, 1, head / 2]``. Writes normed latent and key, turned by
        ``key_turn [n, rotary / 2]``, to rows ``at [n]`` int64 of ``cache [rows, latent + rotary]``.

        Raises ``IndexError`` for a row that the cache does not have.
        """
        rows = x.shape[0]
        assert x.shape[1] == self._width, "not a row of this attention"
        assert x.is_contiguous(), "C reads it as it lies"
        query = torch.empty((rows, self.query))
        bad = self._call(
            self.address,
            x.data_ptr(),
            rows,
            query_turn.data_ptr(),
            key_turn.data_ptr(),
            at.data_ptr(),
            cache.data_ptr(),
            cache.stride(0),
            cache.shape[0],
            query.data_ptr(),
        )
        if bad >= 0:
            raise IndexError(f"cache row {int(at[bad])} is not in 0 to {cache.shape[0] - 1}")
        return query

    def turn(self, query: torch.Tensor, query_turn: torch.Tensor) -> None:
        """Turn queries ``[n, heads * head]`` by ``query_turn [n, 1, head / 2]``, in place."""
        assert query.is_contiguous(), "C reads it as it lies"
        rows, pairs = query_turn.shape[0], query_turn.shape[2]
        self._turn(query.data_ptr(), query_turn.data_ptr(), rows, self._heads, pairs)
