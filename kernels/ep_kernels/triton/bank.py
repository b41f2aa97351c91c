"""The slots of one MoE layer on a device: experts as bf16 or FP8 matrices that lie apart.

An expert is installed by its addresses, so a slot changes in microseconds, an expert serves in
several slots at no cost, and no slot needs memory of its own. ``flights`` runs experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ep_kernels.bank import KeptExpert, LoadedExpert, SlotEmptyError, Slots
from ep_kernels.fp8 import GROUP, BlockScaled, Weight, block_scaled, dense
from ep_kernels.packed import Kind, Matrix, Storage
from ep_kernels.plane import IntArray
from ep_kernels.triton.device import Device, Stream
from ep_kernels.triton.grouped_gemm import ApartWeights, expert_ffn
from ep_kernels.triton.tuning import fp8_architecture_of

DTYPE = torch.bfloat16
"""Of rows, and of weights that are not FP8."""


@dataclass(frozen=True, slots=True)
class DeviceExpert:
    """``gate_up [2 intermediate, hidden]`` (gate first) and ``down [hidden, intermediate]`` on the
    device, FP8 values with their scales right behind them. Immutable; in use by the device until
    nobody refers to it.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    loading: Stream
    """Where whoever loads experts proves them."""
    storage: Storage = Storage.BF16
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        scales = (self.gate_up_scale, self.down_scale)
        behind = sum(scale.nbytes for scale in scales if scale is not None)
        return self.gate_up.nbytes + self.down.nbytes + behind

    def kept(self) -> KeptExpert:
        """Copied back from the device. Any thread."""
        matrices = (
            Matrix(
                self.storage,
                values.to("cpu", copy=True),
                None if scales is None else scales.to("cpu", copy=True),
            )
            for values, scales in (
                (self.gate_up, self.gate_up_scale),
                (self.down, self.down_scale),
            )
        )
        return KeptExpert(False, *matrices)

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
            weights = ApartWeights(gate_up, down, hidden, inter, self.storage.dtype)
            return expert_ffn(rows, slots, ones, weights).cpu()


class DeviceBank(Slots):
    """See ``ep_kernels.bank.Bank``; ``flights`` says what computing with it needs."""

    kind: Kind = "auto"
    exact = False
    storage = Storage.BF16

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

    def table(self, gate_up: torch.Tensor, down: torch.Tensor) -> ApartWeights:
        """What the kernels take, for ``addresses`` that lie on the device, ``[num_slots]`` each."""
        return ApartWeights(gate_up, down, self.hidden, self.intermediate, self.storage.dtype)

    def keep(self, gate: Weight, up: Weight, down: Weight) -> KeptExpert:
        """See ``Bank``. bf16, whatever they are: lossless for most checkpoints."""
        self.check_shapes(gate, up, down)
        with torch.no_grad():
            return KeptExpert(
                False,
                Matrix(Storage.BF16, torch.cat([dense(gate).to(DTYPE), dense(up).to(DTYPE)])),
                Matrix(Storage.BF16, dense(down).to(DTYPE, copy=True).contiguous()),
            )

    def pack(self, kept: KeptExpert) -> DeviceExpert:
        """Copy ``kept`` to the device. Raises ``ValueError`` for what this bank would not keep, and
        ``torch.OutOfMemoryError``.
        """
        shapes = [(2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)]
        for matrix, shape in zip((kept.gate_up, kept.down), shapes, strict=True):
            values, wanted = matrix.values, self.storage
            if kept.small or matrix.storage is not wanted or values.dtype is not wanted.dtype:
                raise ValueError(
                    f"{matrix.storage.name} matrices where this device keeps {wanted.name}"
                )
            if tuple(values.shape) != shape:
                raise ValueError(f"a matrix has shape {list(values.shape)}, expected {list(shape)}")
            scales = None if matrix.scales is None else tuple(matrix.scales.shape)
            if scales != wanted.scales_of(*shape):
                raise ValueError(
                    f"a matrix has scales {scales}, expected {wanted.scales_of(*shape)}"
                )
        with self._loading, torch.no_grad():
            (gate_up, gate_up_scale), (down, down_scale) = (
                self._placed(matrix) for matrix in (kept.gate_up, kept.down)
            )
        return DeviceExpert(gate_up, down, self._loading, self.storage, gate_up_scale, down_scale)

    def _placed(self, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values and scales, one behind the other, on the device."""
        values, scales, place = matrix.values, matrix.scales, self._device.place
        if scales is None:
            return values.to(place, copy=True), None
        memory = torch.empty(values.nbytes + scales.nbytes, dtype=torch.uint8, device=place)
        return (
            memory[: values.nbytes].view(values.dtype).view(values.shape).copy_(values),
            memory[values.nbytes :].view(scales.dtype).view(scales.shape).copy_(scales),
        )

    def install(self, slot: int, logical_expert: int, weights: LoadedExpert) -> None:
        """Put a packed expert into ``slot``, replacing what it holds."""
        if logical_expert < 0:
            raise ValueError(f"a logical expert is counted from 0, got {logical_expert}")
        if not isinstance(weights, DeviceExpert):
            raise ValueError(f"{type(weights).__name__} was packed for a CPU")  # noqa: TRY004
        if weights.storage is not self.storage:
            raise ValueError(
                f"an expert of {weights.storage.name} in a bank of {self.storage.name}"
            )
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


class Fp8Bank(DeviceBank):
    """The same with e4m3 weights, a scale for each block of 128 x 128: an FP8 checkpoint's values
    as they are, others quantised when they are loaded. Activations are quantised by the kernels.
    """

    storage = Storage.FP8

    def __init__(self, num_slots: int, hidden: int, intermediate: int, **options: Any) -> None:
        """See ``DeviceBank``. Raises ``ValueError`` for sizes that are not divisible by 128, and
        ``UnsupportedArchitecture`` for a device without FP8.
        """
        super().__init__(num_slots, hidden, intermediate, **options)
        if hidden % GROUP or intermediate % GROUP:
            raise ValueError(
                f"FP8 experts of hidden {hidden}, intermediate {intermediate}: expected both "
                f"divisible by {GROUP}"
            )
        fp8_architecture_of(self._device.place)

    def keep(self, gate: Weight, up: Weight, down: Weight) -> KeptExpert:
        """See ``Bank``."""
        self.check_shapes(gate, up, down)
        with torch.no_grad():
            first, second, last = (block_scaled(weight) for weight in (gate, up, down))
            gate_up = BlockScaled(
                torch.cat([first.values, second.values]), torch.cat([first.scales, second.scales])
            )
            return KeptExpert(
                False,
                *(
                    Matrix(Storage.FP8, part.values.contiguous(), part.scales.contiguous())
                    for part in (gate_up, BlockScaled(last.values.clone(), last.scales.clone()))
                ),
            )
