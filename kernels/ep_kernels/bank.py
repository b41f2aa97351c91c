"""What a table of expert slots asks of a bank, whatever computes behind it; what banks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ep_kernels.fp8 import Weight
from ep_kernels.packed import Kind, Matrix
from ep_kernels.plane import IntArray

_EMPTY_SLOT = np.int32(-1).tobytes()


@dataclass(frozen=True, slots=True)
class KeptExpert:
    """One expert's values as a bank keeps them, before they are packed: all that another process
    needs to compute the same.

    ``gate_up`` has gate's rows first: ``[2 intermediate, hidden]``, and ``down`` ``[hidden,
    intermediate]``; both transposed when ``small``. On the CPU.
    """

    small: bool
    gate_up: Matrix
    down: Matrix


class LoadedExpert(Protocol):
    """One expert, ready to run and immutable: built on any thread, installed by a bank of the kind
    that packed it.
    """

    @property
    def nbytes(self) -> int: ...

    def kept(self) -> KeptExpert:
        """The values that it was packed from, bit by bit. May share memory: do not change them."""

    def ffn(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden] fp32 -> [rows, hidden] fp32``, on the CPU, without a bank."""


class Bank(Protocol):
    """The slots of one MoE layer on one rank, apart from how they are computed.

    ``install``, ``clear``, ``resize`` and whatever runs experts exclude each other (their callers
    see to it); these three take microseconds. ``keep`` and ``pack`` may run on any thread at any
    time, so that loading never stops the compute thread.
    """

    hidden: int
    intermediate: int
    kind: Kind
    exact: bool
    holds: IntArray
    """``[num_slots]``: the logical expert in each slot, or -1. ``resize`` puts another array in
    its place."""

    @property
    def num_slots(self) -> int: ...

    def matches(self, pair_slot: IntArray, pair_expert: IntArray) -> bool:
        """Whether every pair's slot holds the pair's logical expert. Both ``[pairs]``. Never
        raises: numbers from a peer may be out of range.
        """

    @property
    def narrow(self) -> bool:
        """Whether weights or activations are rounded to 16 bits on purpose: answers of two holders
        of an expert then differ by that much.
        """

    def keep(self, gate: Weight, up: Weight, down: Weight) -> KeptExpert:
        """What to keep of one expert: ``gate``, ``up`` ``[intermediate, hidden]``, ``down``
        ``[hidden, intermediate]``. Copies; raises ``ValueError`` on a wrong shape.
        """

    def pack(self, kept: KeptExpert) -> LoadedExpert:
        """Make ``kept``, which another process's bank may have chosen, ready to run; its values are
        given away. Raises ``ValueError`` for what this bank would not keep or cannot run.
        """

    def install(self, slot: int, logical_expert: int, weights: LoadedExpert) -> None:
        """Put a packed expert into ``slot``, replacing what it holds."""

    def clear(self, slot: int) -> None:
        """Empty ``slot`` and let go of its weights."""

    def resize(self, num_slots: int) -> None:
        """Have ``num_slots`` slots: new ones are empty, those beyond lose their expert, the others
        stay as they are.
        """


class SlotEmptyError(LookupError):
    """A pair names a slot that holds no expert; the caller must check ``holds`` first."""

    def __init__(self, slot: int) -> None:
        super().__init__(f"expert slot {slot} holds no expert")
        self.slot = slot


class Slots:
    """Which logical expert each slot of a bank holds: ``holds``, as ``Bank`` has it."""

    def __init__(self, num_slots: int, hidden: int, intermediate: int) -> None:
        """Raises ``ValueError`` for sizes that are not positive."""
        if min(num_slots + 1, hidden, intermediate) < 1:
            raise ValueError(
                f"an expert bank needs positive sizes, got {num_slots} slots of "
                f"hidden {hidden}, intermediate {intermediate}"
            )
        self.hidden = hidden
        self.intermediate = intermediate
        self.holds: IntArray = np.full(num_slots, -1, dtype=np.int32)

    def matches(self, pair_slot: IntArray, pair_expert: IntArray) -> bool:
        """See ``Bank``.

        Comparing bytes costs a microsecond; numpy's reductions cost ten.
        """
        try:
            # As unsigned numbers, negative slots are out of range as well.
            found = self.holds[pair_slot.view(np.uint32)].tobytes()
        except IndexError:
            return False
        # Four bytes of ones cannot straddle two experts' numbers, so they are an empty slot.
        return found == pair_expert.tobytes() and _EMPTY_SLOT not in found

    def resized(self, num_slots: int) -> IntArray:
        """``holds`` for ``num_slots`` slots: those that stay, and new ones that are empty."""
        holds = np.full(num_slots, -1, dtype=np.int32)
        stay = min(num_slots, self.holds.size)
        holds[:stay] = self.holds[:stay]
        return holds

    def check_shapes(self, gate: Weight, up: Weight, down: Weight) -> None:
        """Raise ``ValueError`` unless these are one expert's matrices."""
        inner, outer = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        for name, tensor, shape in (
            ("gate", gate, inner),
            ("up", up, inner),
            ("down", down, outer),
        ):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
