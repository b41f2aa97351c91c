"""What a worker computes with: this CPU, or a device with the Triton kernels. Chosen at start."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from ep_kernels.grouped_ffn import ExpertBank
from ep_kernels.plane import ExpertPlane
from ep_kernels.triton.device import Device, DeviceUnavailable, open_device

from expert_svc.slots import SlotTable
from expert_svc.worker import ComputeThread, Worker
from mesh.service import CannotServe
from mesh.settings import Settings
from moe_model.architecture import ModelSpec
from moe_model.experts import new_bank
from moe_model.fp8 import experts_fault, refuse_on_cpu, serves_fp8


class Engine(Protocol):
    """Makes the banks of a worker's slots, and the thread that serves from such a table."""

    @property
    def device(self) -> Device | None:
        """Where experts are computed, if not on this CPU."""

    def new_bank(self, num_slots: int) -> Any: ...

    def new_worker(self, plane: ExpertPlane, table: SlotTable[Any]) -> ComputeThread[Any]: ...


def open_engine(settings: Settings, path: Path, spec: ModelSpec) -> Engine:
    """For ``expert.device`` and the checkpoint at ``path``. Raises ``DeviceUnavailable``,
    ``BadConfig`` for FP8 on a CPU, ``CannotServe`` for experts that cannot be FP8.
    """
    if settings.expert.device == "cpu":
        refuse_on_cpu(spec, path, "expert.device")
        return _Cpu(settings, spec)
    return _OnDevice(settings, spec)


class _Cpu:
    device = None

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        self._model = settings.model
        self._spec = spec

    def new_bank(self, num_slots: int) -> ExpertBank:
        model = self._model
        return new_bank(self._spec, num_slots, weights=model.weights, exact=model.exact)

    def new_worker(self, plane: ExpertPlane, table: SlotTable[ExpertBank]) -> Worker:
        return Worker(plane, table)


class _OnDevice:
    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        chosen = settings.expert.weights
        self._fp8 = serves_fp8(spec, chosen)
        if self._fp8 and (fault := experts_fault(spec)):
            raise CannotServe(f"expert.weights = {chosen!r}: {fault}; bf16 takes any")
        self.device = open_device(settings.expert.device)
        if self._fp8:
            self._check_fp8()
        self._loading = self.device.stream()
        self._spec = spec

    # Imported here: a worker on a CPU needs no Triton, and takes no time to load it.

    def _check_fp8(self) -> None:
        from ep_kernels.triton.tuning import (  # noqa: PLC0415
            UnsupportedArchitecture,
            fp8_architecture_of,
        )

        try:
            fp8_architecture_of(self.device.place)
        except UnsupportedArchitecture as error:
            lacks = f"FP8 ({error}); expert.weights = 'bf16' needs none"
            raise DeviceUnavailable(self.device.name, lacks) from error

    def new_bank(self, num_slots: int) -> Any:
        from ep_kernels.triton.bank import DeviceBank, Fp8Bank  # noqa: PLC0415

        spec, bank = self._spec, Fp8Bank if self._fp8 else DeviceBank
        return bank(
            num_slots,
            spec.hidden_size,
            spec.expert_intermediate,
            top_k=spec.experts_per_token,
            device=self.device,
            loading=self._loading,
        )

    def new_worker(self, plane: ExpertPlane, table: SlotTable[Any]) -> ComputeThread[Any]:
        from expert_svc.device_worker import DeviceWorker  # noqa: PLC0415

        return DeviceWorker(plane, table, self.device)
