"""The slots of one MoE layer on a device: experts as bf16 matrices that lie apart.

An expert is installed by its addresses, so a slot changes in microseconds, an expert serves in
several slots at no cost, and no slot needs memory of its own. ``flights`` runs experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ep_kernels.bank import KeptExpert, LoadedExpert, SlotEmptyError, Slots
from ep_kernels.packed import Kind, Matrix, Storage
from ep_kernels.plane import IntArray
from ep_kernels.triton.device import Device, Stream
from ep_kernels.triton.grouped_gemm import ApartWeights, expert_ffn

DTYPE = torch.bfloat16
"""Of weights and rows."""


@dataclass(frozen=True, slots=True)
class DeviceExpert:
    """``gate_up [2 intermediate, hidden]`` (gate first) and ``down [hidden, intermediate]`` on the
    device. Immutable; in use by the device until nobody refers to it.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    loading: Stream
    """Where whoever loads experts proves them."""

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def kept(self) -> KeptExpert:
        """Copied back from the device. Any thread."""
        return KeptExpert(
            False,
            Matrix(Storage.BF16, self.gate_up.to("cpu", copy=True)),
            Matrix(Storage.BF16, self.down.to("cpu", copy=True)),
        )

    def ffn(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden] fp32 -> [rows, hidden]`` on the CPU, by the kernels that serve. On the
        loader thread, which waits for the device.
        """
        with self.loading:
            device = self.down.device
            hidden, inter = self.down.shape
            gate_up, down = (
                torch.tensor([part.data_ptr()]).to(device) for part in (self.gate_up, self.down)
            )
            slots = torch.zeros((x.shape[0], 1), dtype=torch.int32, device=device)
            ones = torch.ones((x.shape[0], 1), device=device)
            rows = x.to(device, DTYPE).contiguous()
            return expert_ffn(rows, slots, ones, ApartWeights(gate_up, down, hidden, inter)).cpu()


class DeviceBank(Slots):
    """See ``ep_kernels.bank.Bank``; ``flights`` says what computing with it needs."""

    kind: Kind = "auto"
    exact = False

    def __init__(
        self,
        num_slots: int,
        hidden: int,
        intermediate: int,
        *,
        top_k: int,
        device: Device,
        loading: Stream,
    ) -> None:
        """``top_k``: most slots that a token usually goes to. ``loading``: for the loader thread
        alone.
        """
        super().__init__(num_slots, hidden, intermediate)
        self.top_k = top_k
        self.experts: list[DeviceExpert | None] = [None] * num_slots
        self.addresses: npt.NDArray[np.int64] = np.zeros((2, num_slots), dtype=np.int64)
        """Of each slot's ``gate_up`` and ``down``; 0 where there is none."""
        self._device = device
        self._loading = loading

    @property
    def num_slots(self) -> int:
        return len(self.experts)

    @property
    def narrow(self) -> bool:
        """Rows between products are bf16."""
        return True

    def keep(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> KeptExpert:
        """See ``Bank``. bf16, whatever they are: lossless for most checkpoints."""
        self.check_shapes(gate, up, down)
        with torch.no_grad():
            return KeptExpert(
                False,
                Matrix(Storage.BF16, torch.cat([gate.to(DTYPE), up.to(DTYPE)])),
                Matrix(Storage.BF16, down.to(DTYPE, copy=True).contiguous()),
            )

    def pack(self, kept: KeptExpert) -> DeviceExpert:
        """Copy ``kept`` to the device. Raises ``ValueError`` for what this bank would not keep, and
        ``torch.OutOfMemoryError``.
        """
        shapes = [(2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)]
        for matrix, shape in zip((kept.gate_up, kept.down), shapes, strict=True):
            values = matrix.values
            if kept.small or matrix.storage is not Storage.BF16 or values.dtype is not DTYPE:
                raise ValueError(f"a device keeps bf16 matrices, not {matrix.storage.name}")
            if tuple(values.shape) != shape:
                raise ValueError(f"a matrix has shape {list(values.shape)}, expected {list(shape)}")
        with self._loading, torch.no_grad():
            gate_up, down = (
                matrix.values.to(self._device.place, copy=True)
                for matrix in (kept.gate_up, kept.down)
            )
        return DeviceExpert(gate_up, down, self._loading)

    def install(self, slot: int, logical_expert: int, weights: LoadedExpert) -> None:
        """Put a packed expert into ``slot``, replacing what it holds."""
        if logical_expert < 0:
            raise ValueError(f"a logical expert is counted from 0, got {logical_expert}")
        if not isinstance(weights, DeviceExpert):
            raise ValueError(f"{type(weights).__name__} was packed for a CPU")  # noqa: TRY004
        self.experts[slot] = weights
        self.addresses[:, slot] = weights.gate_up.data_ptr(), weights.down.data_ptr()
        self.holds[slot] = logical_expert

    def clear(self, slot: int) -> None:
        """Empty ``slot``."""
        self.holds[slot] = -1
        self.addresses[:, slot] = 0
        self.experts[slot] = None

    def resize(self, num_slots: int) -> None:
        """See ``Bank``."""
        holds = self.resized(num_slots)
        stay = min(num_slots, self.num_slots)
        addresses = np.zeros((2, num_slots), dtype=np.int64)
        addresses[:, :stay] = self.addresses[:, :stay]
        self.experts = self.experts[:stay] + [None] * (num_slots - stay)
        self.addresses = addresses
        self.holds = holds

    def check_filled(self, pair_slot: IntArray) -> None:
        """Raise ``SlotEmptyError`` for a pair ``[pairs]`` in range whose slot has no expert."""
        empty = np.flatnonzero(self.addresses[0, pair_slot] == 0)
        if empty.size:
            raise SlotEmptyError(int(pair_slot[empty[0]]))
