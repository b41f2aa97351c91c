"""The compute thread of a worker whose experts are on a device: it never waits for it.

Parts are checked and sent up while their slots are locked; a later change of the slots does not
reach them. While batches are under way the thread goes round: it takes arrivals, sends the next
batch up as soon as there is room, and publishes what has come down. Where a plane's rows lie on the
device they stay there, and only pairs go up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns, sleep

import numpy as np
import torch
from ep_kernels.bank import SlotEmptyError
from ep_kernels.plane import Arrival, ExpertPlane
from ep_kernels.triton.bank import DeviceBank
from ep_kernels.triton.device import Device
from ep_kernels.triton.flights import Flight, Flights

from expert_svc.slots import SlotTable
from expert_svc.worker import IDLE_WAIT_S, ComputeThread

_MOST_TOKENS = 4096
"""Of a batch, if its first part has not more: bounds the pinned memory."""


@dataclass(frozen=True, slots=True)
class _Batch:
    parts: list[Arrival]
    flight: Flight
    began_ns: int


class DeviceWorker(ComputeThread[DeviceBank]):
    """Computes on ``device``; lanes are not exact."""

    def __init__(self, plane: ExpertPlane, table: SlotTable[DeviceBank], device: Device) -> None:
        super().__init__(plane, table)
        self._device = device
        self._flights = Flights(device)
        self._trials = Flights(device)
        """The loader thread's own."""
        self._warm: set[int] = set()
        """Numbers of slots that kernels are compiled for."""
        self._under_way: deque[_Batch] = deque()

    def run(self) -> None:
        """See ``ComputeThread``. Raises ``DeviceHung``."""
        plane, tally, waiting, under_way = self._plane, self.tally, self._waiting, self._under_way
        with torch.inference_mode():
            woke = perf_counter_ns()
            while not self._stopping:
                tally.turns += 1
                self._line_up(plane.poll())
                if under_way and under_way[0].flight.done:
                    self._publish(under_way.popleft())
                elif waiting and self._flights.has_room:
                    self._send_up(self._next_group())
                elif under_way:
                    sleep(0)  # other threads of this process get the interpreter
                else:
                    slept = perf_counter_ns()
                    tally.awake_ns += slept - woke
                    plane.wait(IDLE_WAIT_S)
                    woke = perf_counter_ns()
                    tally.wait_ns += woke - slept

    def warm_up(self, progress: Callable[[float], None]) -> None:
        """Compile the kernels for the numbers of slots that are new, for few rows and for many."""
        if not self._device.compiles:
            return
        with torch.inference_mode():
            for bank in tuple(self._table.banks.values()):
                if bank.num_slots not in self._warm:
                    self._try_out(bank, progress)

    def _try_out(self, bank: DeviceBank, progress: Callable[[float], None]) -> None:
        # Not under the table's lock, as compiling takes seconds: only this thread fills slots, and
        # what another one empties meanwhile is kept here.
        experts = tuple(bank.experts)
        held = np.flatnonzero(bank.holds >= 0).astype(np.int32)
        if not held.size:
            return
        for tokens in self._trials.regimes(bank):
            progress(1.0)
            token, slot = np.arange(tokens, dtype=np.int32), np.resize(held, tokens)
            x, weight = torch.zeros(tokens, bank.hidden), np.ones(tokens, dtype=np.float32)
            try:
                flight = self._trials.begin(bank, [x], token, slot, weight)
            except SlotEmptyError:
                return
            self._trials.wait(flight)
            self._trials.end(flight)
        del experts
        self._warm.add(bank.num_slots)

    def _bank_for(self, part: Arrival) -> DeviceBank | None:
        return None if part.exact else super()._bank_for(part)

    def _next_group(self) -> list[Arrival]:
        """As many parts of the next group as make a batch; the others wait on, as they are."""
        parts = super()._next_group()
        tokens = 0
        for count, part in enumerate(parts):
            tokens += part.x.shape[0]
            if count and tokens > _MOST_TOKENS:
                self._waiting[part.layer, part.exact] = parts[count:]
                return parts[:count]
        return parts

    def _send_up(self, parts: list[Arrival]) -> None:
        with self._table.lock:
            bank, valid = self._sort_out(parts)
            if bank is None:
                return
            began = perf_counter_ns()
            firsts = np.cumsum([0] + [part.x.shape[0] for part in valid[:-1]], dtype=np.int32)
            flight = self._flights.begin(
                bank,
                [part.x for part in valid],
                np.concatenate([p.pair_token + f for p, f in zip(valid, firsts, strict=True)]),
                np.concatenate([part.pair_slot for part in valid]),
                np.concatenate([part.pair_weight for part in valid]),
                [part.out for part in valid] if self._plane.on_device else None,
            )
        self._under_way.append(_Batch(valid, flight, began))
        self.tally.calls += 1

    def _publish(self, batch: _Batch) -> None:
        flight, parts = batch.flight, batch.parts
        took_ns = perf_counter_ns() - batch.began_ns
        sizes = [part.x.shape[0] for part in parts]
        if not self._plane.on_device:
            for part, rows in zip(parts, torch.split_with_sizes(flight.rows, sizes), strict=True):
                part.out.copy_(rows)
        self._flights.end(flight)
        tokens = max(1, sum(sizes))
        for part, size in zip(parts, sizes, strict=True):
            self._answer(part, batch.began_ns, took_ns * size // tokens)
