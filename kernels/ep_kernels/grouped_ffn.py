"""Grouped SwiGLU FFN over the expert slots of one MoE layer on one rank.

    y[pair] = down(silu(gate x) * up x),  x = the pair's token, weights = the pair's slot

``run`` adds the weighted rows per token (one partial sum a rank), ``run_rows`` returns them apart
(exact lanes: the router adds them in top-k order). Two layouts behind one bank: experts so small
that calls dominate stay transposed tensors, multiplied with as few calls as possible; larger ones
are packed (see ``ep_kernels.packed``) and run expert by expert while their rows are in cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import linear, silu

from ep_kernels.bank import KeptExpert, LoadedExpert, SlotEmptyError, Slots
from ep_kernels.few import FewFfn
from ep_kernels.fp8 import Weight, dense
from ep_kernels.half_ffn import HalfExpert, HalfFfn, half_expert
from ep_kernels.packed import (
    Kind,
    Matrix,
    PackedLinear,
    Storage,
    is_dispatch_bound,
    keep,
    pack,
    serial_rows,
    storage_fault,
)
from ep_kernels.plane import FloatArray, IntArray
from ep_kernels.serve import ServedBank, function_address

_FEW = 40
"""Up to this many pairs of small experts run in one call, one after another; beyond it a product
for all pairs of an expert is worth sorting them and a call each."""

_ANY_PAIRS = 2**31 - 1

_FEW_FFN = function_address("few", "moemesh_few_ffn")
_HALF_FFN = function_address("half", "moemesh_half_ffn")

_LINE_VALUES = 16
"""fp32 values in a cache line."""


@dataclass(frozen=True, slots=True)
class SmallExpert:
    """Transposed: ``gate_up`` ``[hidden, 2 intermediate]``, ``down`` ``[intermediate, hidden]``."""

    gate_up: torch.Tensor
    down: torch.Tensor

    @property
    def nbytes(self) -> int:
        return 4 * (self.gate_up.numel() + self.down.numel())

    def kept(self) -> KeptExpert:
        """The values that it was packed from, bit by bit. Shares memory: do not change them."""
        return KeptExpert(
            True, Matrix(Storage.PLAIN, self.gate_up), Matrix(Storage.PLAIN, self.down)
        )

    def ffn(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden] fp32 -> [rows, hidden]``, without a bank. Any thread."""
        return torch.mm(_swiglu(torch.mm(x, self.gate_up)), self.down)


@dataclass(frozen=True, slots=True)
class PackedExpert:
    """``gate_up`` maps hidden to 2 x intermediate (gate first), ``down`` intermediate to hidden."""

    gate_up: PackedLinear
    down: PackedLinear
    half: HalfExpert | None
    """Both in one call, where both are fp16."""

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def kept(self) -> KeptExpert:
        """The values that it was packed from, bit by bit."""
        return KeptExpert(False, self.gate_up.matrix(), self.down.matrix())

    def ffn(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden] fp32 -> [rows, hidden]``, without a bank. Any thread."""
        return self.half(x) if self.half is not None else self.down(_swiglu(self.gate_up(x)))


ExpertWeights: TypeAlias = SmallExpert | PackedExpert
"""One expert, ready to run and immutable: built on any thread, installed on the compute thread."""


@dataclass(frozen=True, slots=True)
class _Groups:
    """Pairs that share a product: each group's slot and how many consecutive pairs it has, once
    the pairs are put in ``order`` (None: as they are).
    """

    order: npt.NDArray[np.int64] | None
    slots: list[int]
    sizes: list[int]


class ExpertBank(Slots):
    """The slots of one MoE layer on one rank.

    ``install``, ``clear``, ``resize``, ``run`` and ``run_rows`` exclude each other (their callers
    see to it); the first three take microseconds. ``keep``, ``pack`` and ``prepare`` may run on any
    thread at any time, so that loading never stops the compute thread.

    ``holds`` ``[num_slots]`` int32: the logical expert in each slot, or -1. ``resize`` puts another
    array in its place.
    """

    def __init__(
        self,
        num_slots: int,
        hidden: int,
        intermediate: int,
        *,
        kind: Kind = "auto",
        exact: bool = False,
    ) -> None:
        super().__init__(num_slots, hidden, intermediate)
        self.kind: Kind = kind
        self.exact = exact
        # Exact small experts multiply one row at a time; rows of whole cache lines are aligned
        # alike, which such products' bits may depend on.
        whole_lines = hidden % _LINE_VALUES == 0 and intermediate % _LINE_VALUES == 0
        self._small = is_dispatch_bound(2 * intermediate, hidden) and (whole_lines or not exact)
        self._experts: list[ExpertWeights | None] = [None] * num_slots
        self._few = FewFfn(hidden, intermediate, num_slots)
        self._half = HalfFfn(hidden, intermediate, num_slots)
        self._served = ServedBank(
            *(_FEW_FFN, self._few.address) if self._small else (_HALF_FFN, self._half.address),
            self.holds,
            most_pairs=_FEW if self._small else _ANY_PAIRS,
            brief=self._small,
        )

    @property
    def num_slots(self) -> int:
        return len(self._experts)

    @property
    def narrow(self) -> bool:
        """Never: fp16 weights are multiplied in fp32, so two holders of them agree."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of all weights held."""
        return sum(expert.nbytes for expert in self._experts if expert is not None)

    def keep(self, gate: Weight, up: Weight, down: Weight) -> KeptExpert:
        """What to keep of one expert: ``gate``, ``up`` ``[intermediate, hidden]``, ``down``
        ``[hidden, intermediate]``. Copies; raises ``ValueError`` on a wrong shape.
        """
        self.check_shapes(gate, up, down)
        down = dense(down)
        with torch.no_grad():
            gate_up = torch.cat([dense(gate), dense(up)]).float()  # [2 intermediate, hidden]
            if self._small:
                return KeptExpert(
                    True,
                    Matrix(Storage.PLAIN, gate_up.t().contiguous()),
                    Matrix(Storage.PLAIN, down.float().t().contiguous()),
                )
            return KeptExpert(
                False,
                keep(gate_up, self.kind, exact=self.exact),
                keep(down, self.kind, exact=self.exact),
            )

    def pack(self, kept: KeptExpert) -> ExpertWeights:
        """Make ``kept``, which another process's bank may have chosen, ready to run; its values are
        given away. Raises ``ValueError`` for what this bank would not keep or cannot run.
        """
        if kept.small is not self._small:
            raise ValueError("the expert was kept by a bank of another layout")
        shapes = [(2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)]
        for matrix, shape in zip((kept.gate_up, kept.down), shapes, strict=True):
            values, wanted = matrix.values, shape[::-1] if self._small else shape
            if tuple(values.shape) != wanted or values.dtype is not matrix.storage.dtype:
                raise ValueError(
                    f"a {matrix.storage.name} matrix has {values.dtype} {list(values.shape)}, "
                    f"expected {matrix.storage.dtype} {list(wanted)}"
                )
            if self._small and matrix.storage is not Storage.PLAIN:
                raise ValueError(f"a small expert's matrix is {matrix.storage.name}")
            if not self._small and (
                fault := storage_fault(matrix.storage, *shape, self.kind, exact=self.exact)
            ):
                raise ValueError(fault)
        if self._small:
            return SmallExpert(kept.gate_up.values, kept.down.values)
        gate_up, down = pack(kept.gate_up), pack(kept.down)
        return PackedExpert(gate_up, down, half_expert(gate_up, down))

    def prepare(self, gate: Weight, up: Weight, down: Weight) -> ExpertWeights:
        """``keep`` and ``pack`` in one call."""
        return self.pack(self.keep(gate, up, down))

    def install(self, slot: int, logical_expert: int, weights: LoadedExpert) -> None:
        """Put a prepared expert into ``slot``, replacing what it holds."""
        if logical_expert < 0:
            raise ValueError(f"a logical expert is counted from 0, got {logical_expert}")
        if not isinstance(weights, SmallExpert if self._small else PackedExpert):
            layout = type(weights).__name__
            raise ValueError(f"{layout} was prepared by a bank of another layout")  # noqa: TRY004
        self._experts[slot] = weights
        self.holds[slot] = logical_expert
        if isinstance(weights, SmallExpert):
            self._few.put(slot, weights.gate_up, weights.down)
        elif weights.half is not None:
            self._half.put(slot, weights.half)
        else:
            self._half.clear(slot)

    def load(
        self,
        slot: int,
        logical_expert: int,
        gate: Weight,
        up: Weight,
        down: Weight,
    ) -> None:
        """``prepare`` and ``install`` in one call."""
        self.install(slot, logical_expert, self.prepare(gate, up, down))

    def clear(self, slot: int) -> None:
        """Empty ``slot`` and free its weights."""
        self.holds[slot] = -1
        self._few.clear(slot)
        self._half.clear(slot)
        self._experts[slot] = None

    def resize(self, num_slots: int) -> None:
        """Have ``num_slots`` slots: new ones are empty, those beyond lose their expert, the others
        stay as they are.
        """
        holds = self.resized(num_slots)
        stay = min(num_slots, self.num_slots)
        self._few.resize(num_slots)
        self._half.resize(num_slots)
        self._served.hold(holds)
        self._experts = self._experts[:stay] + [None] * (num_slots - stay)
        self.holds = holds

    @property
    def served(self) -> ServedBank | None:
        """What serves parts by one call into C, if this bank's can be: sums, of few pairs where
        experts are small, and by fp16 experts where they are not.
        """
        return None if self.exact else self._served

    def run(
        self,
        x: torch.Tensor,
        pair_token: IntArray,
        pair_slot: IntArray,
        pair_weight: FloatArray,
        out: torch.Tensor,
    ) -> None:
        """Fill ``out`` ``[n, hidden]`` fp32 with each token's weighted sum over its pairs.

        ``x`` is ``[n, hidden]`` in any float dtype; the pair arrays have equal length and lie in
        range. A token without pairs gets zeros. Raises ``SlotEmptyError``.
        """
        pairs = pair_slot.size
        if pairs == 0:
            out.zero_()
            return
        if x.dtype is not torch.float32:
            x = x.float()
        if self._small and pairs <= _FEW and not self.exact:
            bad = self._few(x, pair_token, pair_slot, pair_weight, out)
            if bad is not None:
                raise SlotEmptyError(int(pair_slot[bad]))
            return
        # An empty slot, or one whose matrices are not fp16, leaves it to what follows.
        if not self._small and self._half(x, pair_token, pair_slot, pair_weight, out) is None:
            return
        groups = self._group(pair_slot)
        if groups.order is not None:
            pair_token, pair_weight = pair_token[groups.order], pair_weight[groups.order]
        token = torch.from_numpy(pair_token)
        rows = self._grouped(x.index_select(0, token), groups, pair_weight)
        out.zero_().index_add_(0, token, rows)

    def run_rows(
        self, x: torch.Tensor, pair_token: IntArray, pair_slot: IntArray, out: torch.Tensor
    ) -> None:
        """Fill ``out`` ``[pairs, hidden]`` fp32 with the unweighted row of each pair.

        In an ``exact`` bank a row's bits depend on its token and expert alone.
        """
        if pair_slot.size == 0:
            return
        if x.dtype is not torch.float32:
            x = x.float()
        if not self._small and self._half(x, pair_token, pair_slot, None, out) is None:
            return
        groups = self._group(pair_slot)
        if groups.order is None:
            token = torch.from_numpy(pair_token)
            out.copy_(self._grouped(x.index_select(0, token), groups, None))
        else:
            token = torch.from_numpy(pair_token[groups.order])
            rows = self._grouped(x.index_select(0, token), groups, None)
            out.index_copy_(0, torch.from_numpy(groups.order), rows)

    def _group(self, pair_slot: IntArray) -> _Groups:
        if self._small and self.exact:
            return _Groups(None, pair_slot.tolist(), [1] * pair_slot.size)
        order = np.argsort(pair_slot, kind="stable")
        slots = pair_slot[order]
        begins = np.flatnonzero(slots[1:] != slots[:-1]) + 1
        edges = [0, *begins.tolist(), slots.size]
        sizes = [end - begin for begin, end in pairwise(edges)]
        return _Groups(order, slots[edges[:-1]].tolist(), sizes)

    def _small_expert(self, slot: int) -> SmallExpert:
        expert = self._experts[slot]
        if expert is None:
            raise SlotEmptyError(slot)
        assert isinstance(expert, SmallExpert)  # install() let nothing else in
        return expert

    def _packed_expert(self, slot: int) -> PackedExpert:
        expert = self._experts[slot]
        if expert is None:
            raise SlotEmptyError(slot)
        assert isinstance(expert, PackedExpert)
        return expert

    def _grouped(
        self, rows: torch.Tensor, groups: _Groups, weight: FloatArray | None
    ) -> torch.Tensor:
        """``rows`` ``[pairs, hidden]`` in group order -> ``[pairs, hidden]``, scaled by weight."""
        if self._small:
            return self._grouped_small(rows, groups, weight)
        done = [
            expert.down(self._activate(expert.gate_up(group)))
            for expert, group in zip(
                map(self._packed_expert, groups.slots),
                torch.split_with_sizes(rows, groups.sizes),
                strict=True,
            )
        ]
        out = torch.cat(done)
        return out if weight is None else out.mul_(torch.from_numpy(weight).unsqueeze(1))

    def _grouped_small(
        self, rows: torch.Tensor, groups: _Groups, weight: FloatArray | None
    ) -> torch.Tensor:
        sizes = groups.sizes
        experts = [self._small_expert(slot) for slot in groups.slots]
        gate_up = rows.new_empty(rows.shape[0], 2 * self.intermediate)
        for expert, group, into in zip(
            experts,
            torch.split_with_sizes(rows, sizes),
            torch.split_with_sizes(gate_up, sizes),
            strict=True,
        ):
            torch.mm(group, expert.gate_up, out=into)
        act = self._activate(gate_up)  # [pairs, intermediate]
        if weight is not None:
            act.mul_(torch.from_numpy(weight).unsqueeze(1))
        # The gathered inputs have been read: their memory takes the results.
        for expert, group, into in zip(
            experts,
            torch.split_with_sizes(act, sizes),
            torch.split_with_sizes(rows, sizes),
            strict=True,
        ):
            torch.mm(group, expert.down, out=into)
        return rows

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up``: ``[rows, 2 intermediate] -> [rows, intermediate]``.

        Exact banks need silu's vector loop to treat a column alike in every row. It does so when
        the rows are not contiguous (as halves of ``gate_up``) and the call stays on one thread.
        """
        inter = self.intermediate
        if not self.exact:
            return silu(gate_up[:, :inter]).mul_(gate_up[:, inter:])
        out = gate_up.new_empty(gate_up.shape[0], inter)
        for rows in serial_rows(gate_up.shape[0], inter):
            torch.mul(silu(gate_up[rows, :inter]), gate_up[rows, inter:], out=out[rows])
        return out


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return silu(gate).mul_(up)


def reference_rows(
    x: torch.Tensor,
    pair_token: IntArray,
    experts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    pair_slot: IntArray,
) -> torch.Tensor:
    """Plain torch: the unweighted row of each pair, ``experts[slot] = (gate, up, down)``."""
    rows = []
    for token, slot in zip(pair_token.tolist(), pair_slot.tolist(), strict=True):
        gate, up, down = experts[slot]
        row = x[token].float()
        rows.append(linear(silu(linear(row, gate.float())) * linear(row, up.float()), down.float()))
    return torch.stack(rows) if rows else x.new_empty(0, x.shape[1], dtype=torch.float32)


def reference_sum(
    x: torch.Tensor,
    pair_token: IntArray,
    experts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    pair_slot: IntArray,
    pair_weight: FloatArray,
) -> torch.Tensor:
    """Plain torch: the weighted sum of each token, ``[n, hidden]`` fp32."""
    out = torch.zeros(x.shape[0], x.shape[1])
    rows = reference_rows(x, pair_token, experts, pair_slot)
    for row, token, weight in zip(rows, pair_token.tolist(), pair_weight.tolist(), strict=True):
        out[token] += weight * row
    return out
