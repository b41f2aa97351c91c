"""The compute thread: takes what has arrived, runs one layer as one grouped FFN, answers.

Every microsecond here is on a token's way through a layer, so one lone part (the usual case while
decoding) goes from lane to lane without a copy or a list. The layer with most waiting tokens runs
first, since one pass over its weights then serves most tokens; a part that has been passed over
``_MOST_PASSES`` times runs next whatever its size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Generic

import numpy as np
import torch
from ep_kernels.grouped_ffn import ExpertBank
from ep_kernels.plane import AnswerStatus, Arrival, ExpertPlane
from ep_kernels.serve import ServedBanks

from expert_svc.slots import B, SlotTable
from mesh.layer_groups import LayerGroups

IDLE_WAIT_S = 5.0
"""Longest sleep without work. Arrivals, dead lanes and ``stop`` all wake the thread by themselves;
this bounds the harm of a wake-up lost to a defect."""
_MOST_PASSES = 8


@dataclass(slots=True)
class Tally:
    """What the compute thread has done since start. Written by it alone, read by any thread."""

    turns: int = 0
    """Looks for arrivals: they go on, soon after a wake-up, without any."""
    calls: int = 0
    """Grouped FFN calls."""
    parts: int = 0
    tokens: int = 0
    pairs: int = 0
    stale: int = 0
    """Parts answered ``STALE``."""
    ffn_ns: int = 0
    signal_ns: int = 0
    """Publishing answers."""
    wait_ns: int = 0
    """Asleep or spinning for arrivals."""
    awake_ns: int = 0
    """Everything but ``wait_ns``; less ``ffn_ns`` and ``signal_ns`` it is Python's share."""


class ComputeThread(ABC, Generic[B]):
    """What serves ``plane`` from the slots of ``table`` until ``stop``, apart from how it computes:
    which parts come next, what is answered, and the tallies.
    """

    def __init__(self, plane: ExpertPlane, table: SlotTable[B]) -> None:
        self.tally = Tally()
        self.layers = LayerGroups(max(table.moe_layers, default=0) + 1)
        self.layer_ffn_ns = [0] * len(self.layers.labels)
        """``ffn_ns`` by group of layers."""
        self._plane = plane
        self._table = table
        self._stopping = False
        self._waiting: dict[tuple[int, bool], list[Arrival]] = {}
        self._passes = 0

    @abstractmethod
    def run(self) -> None:
        """The thread's body; calls everything of the plane but ``wake``. Returns after ``stop``."""

    def warm_up(self, progress: Callable[[float], None]) -> None:
        """Make ready what computing with the slots as they are now needs. On the loader thread, as
        is ``progress``, called now and then.
        """

    @property
    def corrupt_lanes(self) -> int:
        """Lanes dropped because a router wrote nonsense, since start. Any thread."""
        return self._plane.corrupt_lanes

    def wake(self) -> None:
        """Make a thread without work take a turn. Any thread."""
        self._plane.wake()

    def stop(self) -> None:
        """Make ``run`` return soon. Any thread."""
        self._stopping = True
        self._plane.wake()

    def _bank_for(self, part: Arrival) -> B | None:
        """The bank to run ``part`` in, or None when a slot does not hold what the part names.

        The rule that keeps every placement right: see "Placement, epochs" in the architecture.
        """
        bank = self._table.banks.get(part.layer)
        fits = bank is not None and bank.matches(part.pair_slot, part.pair_expert)
        return bank if fits else None

    def _sort_out(self, parts: Sequence[Arrival]) -> tuple[B | None, list[Arrival]]:
        """The bank of ``parts``, all of one layer, and those that can run in it; the others are
        refused. Under the table's lock, until they have run.
        """
        bank: B | None = None
        fitting = []
        for part in parts:
            found = self._bank_for(part)
            if found is None:
                self._refuse(part)
            else:
                bank = found
                fitting.append(part)
        return bank, fitting

    def _line_up(self, arrivals: list[Arrival]) -> None:
        # Apart from ``run``, whose frame would hold the last one, and with it the memory of its
        # lane, long after the router has gone.
        for arrival in arrivals:
            self._waiting.setdefault((arrival.layer, arrival.exact), []).append(arrival)

    def _next_group(self) -> list[Arrival]:
        """The parts of the layer with most waiting tokens, or those passed over too often."""
        waiting = self._waiting
        oldest = next(iter(waiting))
        if len(waiting) == 1 or self._passes >= _MOST_PASSES:
            chosen = oldest
        else:
            chosen = max(waiting, key=lambda key: sum(part.x.shape[0] for part in waiting[key]))
        self._passes = 0 if chosen == oldest else self._passes + 1
        return waiting.pop(chosen)

    def _answer(self, part: Arrival, began_ns: int, ffn_ns: int) -> None:
        tally = self.tally
        began = perf_counter_ns()
        self._plane.answer(part, AnswerStatus.OK, began_ns, ffn_ns)
        tally.signal_ns += perf_counter_ns() - began
        self._count(part.layer, ffn_ns, part.x.shape[0], part.pair_slot.size)

    def _count(self, layer: int, ffn_ns: int, tokens: int, pairs: int) -> None:
        """An answered part."""
        tally = self.tally
        tally.ffn_ns += ffn_ns
        self.layer_ffn_ns[self.layers.of(layer)] += ffn_ns
        tally.parts += 1
        tally.tokens += tokens
        tally.pairs += pairs

    def _refuse(self, part: Arrival) -> None:
        self.tally.stale += 1
        self._plane.answer(part, AnswerStatus.STALE, 0, 0)


class Worker(ComputeThread[ExpertBank]):
    """Computes on this thread, in the lanes' own memory."""

    def __init__(self, plane: ExpertPlane, table: SlotTable[ExpertBank]) -> None:
        super().__init__(plane, table)
        self._banks = ServedBanks(max(table.moe_layers, default=-1) + 1)
        self._noted = 0

    def run(self) -> None:
        """See ``ComputeThread``."""
        plane, tally, waiting = self._plane, self.tally, self._waiting
        with torch.inference_mode():
            woke = perf_counter_ns()
            while not self._stopping:
                tally.turns += 1
                if not waiting and self._serve_lone():
                    continue
                arrivals = plane.poll()
                if len(arrivals) == 1 and not waiting:
                    self._serve_alone(arrivals[0])
                elif arrivals or waiting:
                    self._line_up(arrivals)
                    self._serve_together(self._next_group())
                else:
                    slept = perf_counter_ns()
                    tally.awake_ns += slept - woke
                    plane.wait(IDLE_WAIT_S)
                    woke = perf_counter_ns()
                    tally.wait_ns += woke - slept

    def _serve_lone(self) -> bool:
        """Serve the part that has come, if it is the only one, by one call into C, if it can."""
        began = perf_counter_ns()
        with self._table.lock:
            if len(self._table.banks) != self._noted:
                self._note_banks()
            served = self._plane.serve(self._banks)
        if served is None:
            return False
        tally, took_ns = self.tally, served.took_ns
        tally.calls += 1
        tally.signal_ns += perf_counter_ns() - began - took_ns
        self._count(served.layer, took_ns, served.tokens, served.pairs)
        return True

    def _note_banks(self) -> None:
        banks = self._table.banks  # it only grows
        self._noted = len(banks)
        for layer, bank in banks.items():
            if bank.served is not None:
                self._banks.set(layer, bank.served)

    def _serve_alone(self, part: Arrival) -> None:
        """The part's own memory is input and output."""
        with self._table.lock:
            bank = self._bank_for(part)
            if bank is None:
                self._refuse(part)
                return
            began = perf_counter_ns()
            if part.exact:
                bank.run_rows(part.x, part.pair_token, part.pair_slot, part.out)
            else:
                bank.run(part.x, part.pair_token, part.pair_slot, part.pair_weight, part.out)
        self._answer(part, began, perf_counter_ns() - began)
        self.tally.calls += 1

    def _serve_together(self, parts: list[Arrival]) -> None:
        """One grouped FFN over parts of one layer from several senders or micro-batches."""
        if len(parts) == 1:
            self._serve_alone(parts[0])
            return
        with self._table.lock:
            bank, valid = self._sort_out(parts)
            if bank is None:
                return
            began = perf_counter_ns()
            _run_joined(bank, valid)
        ffn_ns = perf_counter_ns() - began
        tokens = sum(part.x.shape[0] for part in valid)
        for part in valid:
            self._answer(part, began, ffn_ns * part.x.shape[0] // max(tokens, 1))
        self.tally.calls += 1


def _run_joined(bank: ExpertBank, parts: Sequence[Arrival]) -> None:
    """Run ``parts`` (all exact or none) as one and write each one's answer into its ``out``."""
    x = torch.cat([part.x for part in parts])  # [tokens, hidden], all senders
    firsts = np.cumsum([0] + [part.x.shape[0] for part in parts[:-1]], dtype=np.int32)
    pair_token = np.concatenate(
        [part.pair_token + first for part, first in zip(parts, firsts, strict=True)]
    )
    pair_slot = np.concatenate([part.pair_slot for part in parts])
    if parts[0].exact:
        out = torch.empty(pair_slot.size, bank.hidden)
        bank.run_rows(x, pair_token, pair_slot, out)
    else:
        pair_weight = np.concatenate([part.pair_weight for part in parts])
        out = torch.empty(x.shape[0], bank.hidden)
        bank.run(x, pair_token, pair_slot, pair_weight, out)
    for part, rows in zip(
        parts, torch.split_with_sizes(out, [part.out.shape[0] for part in parts]), strict=True
    ):
        part.out.copy_(rows)
