"""The slots of one expert worker: weights by (MoE layer, local slot), changed while they serve.

Two threads meet here. The compute thread looks a bank up, checks what its slots hold and runs it,
all while holding ``lock``. The loader thread changes slots by ``apply``: reading and packing an
expert, which takes milliseconds, happens outside the lock; putting it into its slot, or emptying
one, takes microseconds inside it. So a slot never changes between check and use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from ep_kernels.grouped_ffn import ExpertBank

from mesh.placement import EMPTY

ReadExpert = Callable[[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""``(layer, logical expert) -> gate [inter, hidden], up [inter, hidden], down [hidden, inter]``."""


class SlotError(Exception):
    """The planner asked for slots that this model or worker does not have; nothing was changed.

    The planner decides what to do about it; the worker goes on with what it holds.
    """


class SupersededError(Exception):
    """A newer assignment arrived while this one was being applied; the newer one finishes it."""


class SlotTable:
    """All slots of this worker.

    ``banks`` maps a MoE layer to its ``ExpertBank``; hold ``lock`` from looking a bank up until
    done with it. ``epoch`` is that of the placement applied last.
    """

    def __init__(
        self,
        moe_layers: tuple[int, ...],
        num_experts: int,
        new_bank: Callable[[int], ExpertBank],
        read_expert: ReadExpert,
        *,
        max_slots: int = 0,
    ) -> None:
        """``new_bank(num_slots)`` makes an empty bank; ``max_slots`` a layer, 0 for any number."""
        self.lock = threading.Lock()
        self.banks: dict[int, ExpertBank] = {}
        self.epoch = 0
        self._moe_layers = moe_layers
        self._num_experts = num_experts
        self._max_slots = max_slots
        self._new_bank = new_bank
        self._read_expert = read_expert

    def held(self) -> tuple[tuple[int, ...], ...]:
        """``[moe layers, local slots]`` logical experts, -1 for an empty slot. Any thread.

        Each slot's value is true; two slots may be from moments apart while ``apply`` runs.
        """
        banks = [self.banks.get(layer) for layer in self._moe_layers]
        return tuple(() if bank is None else tuple(bank.holds.tolist()) for bank in banks)

    def resident_bytes(self) -> int:
        """Bytes of expert weights in memory. Any thread."""
        return sum(bank.nbytes for bank in tuple(self.banks.values()))

    def apply(
        self,
        moe_layers: Sequence[int],
        slots: Sequence[Sequence[int]],
        epoch: int,
        *,
        progress: Callable[[float], None],
        superseded: Callable[[], bool],
    ) -> int:
        """Hold exactly ``slots[i][s]`` in slot ``s`` of layer ``moe_layers[i]``.

        Loads only what is missing and frees what is gone; idempotent. Runs on the loader thread.
        ``progress`` is told the share of the wanted experts that are in place. Returns how many
        experts were loaded. Raises ``SlotError`` before anything changes, ``SupersededError``
        between two experts, or whatever reading the checkpoint raises.
        """
        wanted = self._checked(moe_layers, slots)
        total = sum(expert != EMPTY for experts in wanted.values() for expert in experts)
        in_place = loaded = 0
        for layer, experts in wanted.items():
            bank = self._bank(layer, len(experts))
            missing = self._free(bank, experts)
            in_place += sum(expert != EMPTY for expert in experts) - len(missing)
            for slot, expert in missing:
                progress(in_place / total)
                if superseded():
                    raise SupersededError
                weights = bank.prepare(*self._read_expert(layer, expert))
                with self.lock:
                    bank.install(slot, expert, weights)
                in_place += 1
                loaded += 1
            with self.lock:
                self.banks[layer] = bank
        self.epoch = epoch
        progress(1.0)
        return loaded

    def _checked(
        self, moe_layers: Sequence[int], slots: Sequence[Sequence[int]]
    ) -> dict[int, Sequence[int]]:
        if tuple(moe_layers) != self._moe_layers or len(slots) != len(moe_layers):
            raise SlotError(f"MoE layers {list(moe_layers)}, this model has {self._moe_layers}")
        for layer, experts in zip(moe_layers, slots, strict=True):
            if self._max_slots and len(experts) > self._max_slots:
                raise SlotError(
                    f"{len(experts)} slots in layer {layer}, this worker offers {self._max_slots}"
                )
            if bad := [e for e in experts if not EMPTY <= e < self._num_experts]:
                raise SlotError(
                    f"experts {bad} in layer {layer}, this model has {self._num_experts}"
                )
        return dict(zip(moe_layers, slots, strict=True))

    def _bank(self, layer: int, num_slots: int) -> ExpertBank:
        """The layer's bank, or a new one that takes its place only when it is filled."""
        bank = self.banks.get(layer)
        if bank is not None and bank.num_slots == num_slots:
            return bank
        new = self._new_bank(num_slots)
        if bank is None:
            with self.lock:
                self.banks[layer] = new
        return new

    def _free(self, bank: ExpertBank, experts: Sequence[int]) -> list[tuple[int, int]]:
        """Empty the slots whose expert is gone; returns the ``(slot, expert)`` to be loaded."""
        missing = []
        with self.lock:
            for slot, (old, new) in enumerate(zip(bank.holds.tolist(), experts, strict=True)):
                if old != new:
                    if old != EMPTY:
                        bank.clear(slot)
                    if new != EMPTY:
                        missing.append((slot, new))
        return missing
