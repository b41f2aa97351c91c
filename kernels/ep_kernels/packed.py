"""Weight matrices packed for a CPU's fastest linear kernel.

Several storages, one call. Reading weights bounds decoding, so 16 bits (fp32 arithmetic) halve its
time; a matrix that fits a core's cache is bound by the call itself and stays a plain tensor.

Packing has two steps: ``keep`` chooses the storage and rounds the values to it, ``pack`` lays them
out for the kernel. Unpacking (``PackedLinear.matrix``) gives the kept values back bit by bit, so
that a matrix can be packed again elsewhere and computes the same.

``exact`` storages give rows that do not depend on how many other rows share the call. The fp16
kernel is made so (see ``ep_kernels.half``). Whether oneDNN keeps that promise for a shape is probed
when the first matrix of that shape is packed; where it does not, one takes its place that works row
by row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, Literal

import torch
from torch.nn.functional import linear

from ep_kernels.fp8 import E4M3, GROUP
from ep_kernels.half import HalfMatrix, has_tiles
from ep_kernels.half import has_kernel as has_fp16_kernel

Kind = Literal["auto", "fp32", "fp16"]
StoredKind = Literal["fp32", "fp16", "bf16"]

DISPATCH_BOUND_BYTES = 256 * 1024
"""Up to this fp32 size calling a packed kernel costs more than it saves."""

_LOSSLESS = 2.0**-18
"""Largest rounding error, relative to the largest weight, that counts as lossless: bf16 values
below fp16's normal range lose a few bits (about 3e-8 absolute), true fp32 weights 2.4e-4."""

_SERIAL_VALUES = 32_767
"""An elementwise operation on fewer values than ATen's grain size is not split over threads."""

_PROBE_BATCHES = (2, 5, 16, 33, 64, 128)
_PROBE_VALUES = 1 << 24
"""A larger matrix (a vocabulary's) is probed on its first rows: 64 MiB."""


class Storage(IntEnum):
    """How a matrix lies in memory. The numbers are part of what a bundle says: never change one."""

    PLAIN = 1
    ROW_BY_ROW = 2
    ONEDNN = 3
    FP16 = 4
    BF16 = 5
    """Kept for a GPU; no kernel of a CPU takes it."""
    FP8 = 6
    """The same, with a scale for each block of 128 x 128 (see ``ep_kernels.fp8``)."""
    TILES = 7
    """bf16 that lost nothing, for a CPU's matrix unit."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the kept values."""
        return _DTYPES.get(self, torch.float32)

    def scales_of(self, rows: int, columns: int) -> tuple[int, int] | None:
        """Shape of the scales of a ``[rows, columns]`` matrix; None if it has none."""
        return (-(-rows // GROUP), -(-columns // GROUP)) if self is Storage.FP8 else None


_DTYPES = {
    Storage.FP16: torch.float16,
    Storage.BF16: torch.bfloat16,
    Storage.FP8: E4M3,
    Storage.TILES: torch.bfloat16,
}


_KINDS: dict[Storage, StoredKind] = {Storage.FP16: "fp16", Storage.TILES: "bf16"}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight as it is kept: ``values`` ``[out, in]`` of ``storage.dtype``, and ``scales`` of
    ``storage.scales_of`` them, fp32; contiguous.
    """

    storage: Storage
    values: torch.Tensor
    scales: torch.Tensor | None = None


class PackedLinear(ABC):
    """A linear map without bias: ``x [..., in] fp32 -> [..., out] fp32``. Immutable, thread-safe.

    ``storage`` and ``kind`` say how the weights are stored, ``nbytes`` how much memory they take.
    """

    __slots__ = ("in_features", "nbytes", "out_features")

    storage: Storage

    def __init__(self, out_features: int, in_features: int) -> None:
        self.out_features = out_features
        self.in_features = in_features
        self.nbytes = out_features * in_features * self.storage.dtype.itemsize

    @property
    def kind(self) -> StoredKind:
        return _KINDS.get(self.storage, "fp32")

    @property
    def half(self) -> HalfMatrix | None:
        """The matrix as C has it, where it is kept in 16 bits."""
        return None

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def matrix(self) -> Matrix:
        """The kept values, bit by bit as they were packed. May share memory: do not change them."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.out_features}x{self.in_features}, {self.kind})"


class _Plain(PackedLinear):
    """A tensor as it is: the least overhead per call."""

    __slots__ = ("_weight",)

    storage = Storage.PLAIN

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight.shape[0], weight.shape[1])
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weight)

    def matrix(self) -> Matrix:
        return Matrix(self.storage, self._weight)


class _RowByRow(PackedLinear):
    """One matrix-vector product a row: slow, and exact on every platform."""

    __slots__ = ("_weight",)

    storage = Storage.ROW_BY_ROW

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight.shape[0], weight.shape[1])
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        out = rows.new_empty(rows.shape[0], self.out_features)
        for i in range(rows.shape[0]):
            # A new tensor: the product's bits may depend on how its input is aligned.
            torch.mv(self._weight, rows[i].clone(), out=out[i])
        return out.view(*x.shape[:-1], self.out_features)

    def matrix(self) -> Matrix:
        return Matrix(self.storage, self._weight)


class _OneDnn(PackedLinear):
    """fp32 in oneDNN's blocked layout."""

    __slots__ = ("_apply", "_packed")

    storage = Storage.ONEDNN

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight.shape[0], weight.shape[1])
        ops: Any = torch.ops.mkldnn
        self._packed = ops._reorder_linear_weight(weight)  # noqa: SLF001 - torch has no public name
        self._apply = ops._linear_pointwise.default  # noqa: SLF001

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._apply(x, self._packed, None, "none", [], "")
        return y

    def matrix(self) -> Matrix:
        return Matrix(self.storage, self._packed.to_dense())


class _Half(PackedLinear):
    """16-bit weights, multiplied to fp32's precision by a kernel of our own."""

    __slots__ = ("_half",)

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight.shape[0], weight.shape[1])
        self._half = HalfMatrix(weight.to(self.storage.dtype))

    @property
    def half(self) -> HalfMatrix:
        return self._half

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 2 and x.is_contiguous():
            return self._half(x)
        rows = x.reshape(-1, self.in_features).contiguous()
        return self._half(rows).view(*x.shape[:-1], self.out_features)

    def matrix(self) -> Matrix:
        return Matrix(self.storage, self._half.values())


class _Fp16(_Half):
    """Weights must lie in fp16's range."""

    __slots__ = ()

    storage = Storage.FP16


class _Tiles(_Half):
    """Weights must be bf16's."""

    __slots__ = ()

    storage = Storage.TILES


_LINEARS: dict[Storage, type[_Plain | _RowByRow | _OneDnn | _Fp16 | _Tiles]] = {
    Storage.PLAIN: _Plain,
    Storage.ROW_BY_ROW: _RowByRow,
    Storage.ONEDNN: _OneDnn,
    Storage.FP16: _Fp16,
    Storage.TILES: _Tiles,
}


def pack_linear(weight: torch.Tensor, kind: Kind = "auto", *, exact: bool = False) -> PackedLinear:
    """``pack(keep(...))``."""
    return pack(keep(weight, kind, exact=exact))


def keep(weight: torch.Tensor, kind: Kind = "auto", *, exact: bool = False) -> Matrix:
    """What to keep of ``weight`` ``[out, in]`` (any float dtype; copied, never kept as a view).

    ``fp32`` keeps every bit. ``fp16`` rounds, and falls back to fp32 where a value is out of
    fp16's range or the kernel is missing. ``auto`` takes fp16 only where that loses nothing and
    the matrix is large enough to gain; under ``exact`` it takes fp32. For either bf16 takes fp16's
    place where it loses nothing and the CPU has a matrix unit, but not under ``exact``, which makes
    each row independent of the batch.

    Raises ``ValueError`` for anything but a two-dimensional weight on the CPU.
    """
    if weight.dim() != 2:
        raise ValueError(f"a linear weight has shape [out, in], got {list(weight.shape)}")
    if weight.device.type != "cpu":
        raise ValueError(f"packed linears run on the CPU, the weight is on {weight.device}")
    with torch.no_grad():
        # A fresh tensor: a view would keep a memory-mapped checkpoint shard alive.
        dense = torch.empty(weight.shape, dtype=torch.float32).copy_(weight)
        if exact:
            return _keep_exact(dense, kind)
        if is_dispatch_bound(dense.shape[0], dense.shape[1]):
            return Matrix(Storage.PLAIN, dense)
        if kind != "fp32" and has_tiles() and (narrow := _as_bf16(weight, dense)) is not None:
            return Matrix(Storage.TILES, narrow)
        if _wants_fp16(dense, kind) and has_fp16_kernel():
            return Matrix(Storage.FP16, dense.half())
        return Matrix(Storage.ONEDNN if has_onednn_kernel() else Storage.PLAIN, dense)


def pack(matrix: Matrix) -> PackedLinear:
    """Lay ``matrix`` out for its kernel, which must exist here. May keep its values as they are:
    the caller gives them away.
    """
    with torch.no_grad():
        return _LINEARS[matrix.storage](matrix.values)


def storage_fault(
    storage: Storage, out_features: int, in_features: int, kind: Kind, *, exact: bool
) -> str:
    """Why this process may not pack a matrix that another one keeps so, in words; empty when it
    may: the kernel must exist here, and the same ``kind`` and ``exact`` allow it.
    """
    if storage in {Storage.BF16, Storage.FP8}:
        return f"{storage.name} weights are kept for a GPU"
    if storage in {Storage.FP16, Storage.TILES}:
        if kind == "fp32" or (exact and kind != "fp16"):
            return f"{storage.name} weights where fp32 is asked for"
        works = has_fp16_kernel() if storage is Storage.FP16 else has_tiles()
    else:
        works = storage is not Storage.ONEDNN or has_onednn_kernel()
    if not works:
        return f"this CPU has no kernel for {storage.name} weights"
    if not exact or storage is Storage.ROW_BY_ROW:
        return ""
    independent = storage is Storage.FP16 or (
        storage is Storage.ONEDNN
        and _rows_are_independent(out_features, in_features, torch.get_num_threads())
    )
    return "" if independent else f"rows of {storage.name} weights depend on the batch here"


def serial_rows(rows: int, width: int) -> Iterator[slice]:
    """Slices of ``rows`` so small that an elementwise operation on ``[slice, width]`` stays on one
    thread: its vector and remainder loops then treat a column alike in every row.
    """
    step = max(1, _SERIAL_VALUES // max(1, width))
    return (slice(begin, begin + step) for begin in range(0, rows, step))


def is_dispatch_bound(out_features: int, in_features: int) -> bool:
    """Whether a matrix is so small that the call, not the weights, costs the time."""
    return out_features * in_features * 4 <= DISPATCH_BOUND_BYTES


def is_lossless_fp16(weight: torch.Tensor) -> bool:
    """Whether fp16 holds ``weight`` to within 2^-18 of its largest value."""
    if weight.numel() == 0:
        return True
    rounded = weight.to(torch.float16).to(torch.float32)
    largest = weight.abs().max().item()
    # An overflow rounds to infinity; the comparison is false for it and for NaN.
    return (weight - rounded).abs().max().item() <= _LOSSLESS * largest


@lru_cache(maxsize=1)
def has_onednn_kernel() -> bool:
    """Whether oneDNN's packed linear exists here and multiplies correctly."""
    try:
        weight = torch.linspace(-1, 1, 37 * 19).view(37, 19)
        x = torch.linspace(-1, 1, 5 * 19).view(5, 19)
        got = _OneDnn(weight)(x)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(got, linear(x, weight), atol=1e-4)


def _wants_fp16(dense: torch.Tensor, kind: Kind) -> bool:
    if kind == "fp16":
        return _fits_fp16(dense)
    return kind == "auto" and is_lossless_fp16(dense)


def _as_bf16(weight: torch.Tensor, dense: torch.Tensor) -> torch.Tensor | None:
    """``dense``, made of ``weight``, as bf16; None where that loses anything."""
    narrow = dense.bfloat16()
    same = weight.dtype is torch.bfloat16 or torch.equal(narrow.float(), dense)
    return narrow if same else None


def _fits_fp16(dense: torch.Tensor) -> bool:
    return dense.numel() == 0 or dense.abs().max().item() <= torch.finfo(torch.float16).max


def _keep_exact(dense: torch.Tensor, kind: Kind) -> Matrix:
    out_features, in_features = dense.shape
    threads = torch.get_num_threads()
    if kind == "fp16" and _fits_fp16(dense) and has_fp16_kernel():
        return Matrix(Storage.FP16, dense.half())
    if has_onednn_kernel() and _rows_are_independent(out_features, in_features, threads):
        return Matrix(Storage.ONEDNN, dense)
    return Matrix(Storage.ROW_BY_ROW, dense)


@lru_cache(maxsize=4096)
def _rows_are_independent(out_features: int, in_features: int, threads: int) -> bool:
    """Compare rows that oneDNN computes together with the same rows computed alone, bit by bit.

    ``threads`` belongs to the key because kernels split their sums by thread.
    """
    del threads
    generator = torch.Generator().manual_seed(0)
    probed = min(out_features, max(1, _PROBE_VALUES // max(1, in_features)))
    weight = torch.randn(probed, in_features, generator=generator)
    packed = _OneDnn(weight)
    x = torch.randn(_PROBE_BATCHES[-1], in_features, generator=generator)
    alone = torch.cat([packed(x[i : i + 1]) for i in range(x.shape[0])])
    return all(torch.equal(packed(x[:rows]), alone[:rows]) for rows in _PROBE_BATCHES)
