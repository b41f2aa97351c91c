"""The slots of one expert worker: weights by (MoE layer, local slot), changed while they serve.

Two threads meet here. The compute thread looks a bank up, checks what its slots hold and runs it,
all while holding ``lock``. The loader thread changes slots by ``apply``: fetching, packing and
proving an expert, which takes milliseconds, happens outside the lock; putting it into its slot,
emptying one, or changing their number takes microseconds inside it. So a slot never changes between
check and use, and a slot that keeps its expert serves throughout.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, TypeVar

from ep_kernels.bank import Bank

from expert_svc.loading import (
    FaultKind,
    Fetch,
    Held,
    LoadError,
    PeerError,
    ReadExpert,
    SupersededError,
    from_checkpoint,
    from_peer,
)
from expert_svc.pace import Pace
from mesh.messages import SlotFault, Source
from mesh.placement import EMPTY

B = TypeVar("B", bound=Bank)
"""The kind of bank: what a compute thread takes."""


class SlotError(Exception):
    """The planner asked for slots that this model or worker does not have; nothing was changed.

    The planner decides what to do about it; the worker goes on with what it holds.
    """


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an expert could not be had from ``peer`` or, when that is empty, from the checkpoint."""

    layer: int
    slot: int
    expert: int
    kind: FaultKind
    reason: str
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Applied:
    """What one assignment took."""

    loaded: int = 0
    """Experts brought into memory."""
    from_peers: int = 0
    loaded_bytes: int = 0
    faults: tuple[SlotFault, ...] = ()
    """Slots that are empty because their expert could not be had."""


@dataclass(slots=True)
class LoadTally:
    """Since start, of all assignments. Written by the loader thread, read by any."""

    loaded: Counter[str] = field(default_factory=Counter)
    """Experts by source: ``peer`` or ``checkpoint``."""
    loaded_bytes: Counter[str] = field(default_factory=Counter)
    faults: Counter[FaultKind] = field(default_factory=Counter)
    """Attempts that failed, also those that another source made good."""


class _Job:
    """One assignment under way: where its experts may come from, and what it has taken so far."""

    def __init__(
        self,
        superseded: threading.Event,
        on_fault: Callable[[Fault], None],
        sources: Iterable[Source],
    ) -> None:
        self.superseded = superseded
        self.on_fault = on_fault
        self.sources: defaultdict[tuple[int, int], list[Source]] = defaultdict(list)
        """By layer and local slot."""
        for source in sources:
            self.sources[source.layer, source.slot].append(source)
        self.silent: set[str] = set()
        """Addresses of peers that are gone, which are not asked again."""
        self.faults: list[SlotFault] = []
        self.loaded = self.from_peers = self.loaded_bytes = 0


class SlotTable(Generic[B]):
    """All slots of this worker.

    ``banks`` maps a MoE layer to its bank; hold ``lock`` from looking a bank up until
    done with it. ``epoch`` is that of the placement applied last.
    """

    def __init__(
        self,
        moe_layers: tuple[int, ...],
        num_experts: int,
        new_bank: Callable[[int], B],
        read_expert: ReadExpert,
        *,
        fetch: Fetch | None = None,
        max_slots: int = 0,
    ) -> None:
        """``new_bank(num_slots)`` makes an empty bank; ``max_slots`` a layer, 0 for any number.
        Without ``fetch`` no expert comes from a peer.
        """
        self.lock = threading.Lock()
        self.banks: dict[int, B] = {}
        self.epoch = 0
        self.tally = LoadTally()
        self.to_load = 0
        """Empty slots that the assignment under way has still to fill. Any thread may read it."""
        self._moe_layers = moe_layers
        self._num_experts = num_experts
        self._max_slots = max_slots
        self._new_bank = new_bank
        self._read_expert = read_expert
        self._fetch = fetch
        self._held: dict[int, dict[int, Held]] = {layer: {} for layer in moe_layers}
        """Layer -> logical expert -> what its slots hold; an expert is here before it serves. The
        inner dicts are replaced under ``lock``, never changed, so that any thread may read them."""

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The model's layers with experts."""
        return self._moe_layers

    def held(self) -> tuple[tuple[int, ...], ...]:
        """``[moe layers, local slots]`` logical experts, -1 for an empty slot. Any thread.

        Each slot's value is true; two slots may be from moments apart while ``apply`` runs.
        """
        banks = [self.banks.get(layer) for layer in self._moe_layers]
        return tuple(() if bank is None else tuple(bank.holds.tolist()) for bank in banks)

    def find(self, layer: int, slot: int, expert: int) -> Held | None:
        """What ``slot`` holds if that is ``expert``. Any thread, never waits; a moment later the
        slot may hold something else, and what was found stays whole.
        """
        bank = self.banks.get(layer)
        holds = [] if bank is None else bank.holds.tolist()
        if not 0 <= slot < len(holds) or holds[slot] != expert:
            return None
        return self._held[layer].get(expert)

    def resident_bytes(self) -> int:
        """Bytes of expert weights in memory. Any thread."""
        return sum(
            held.weights.nbytes for experts in self._held.values() for held in experts.values()
        )

    def apply(
        self,
        moe_layers: Sequence[int],
        slots: Sequence[Sequence[int]],
        epoch: int,
        *,
        superseded: threading.Event,
        progress: Callable[[float], None] = lambda _share: None,
        on_fault: Callable[[Fault], None] = lambda _fault: None,
        sources: Iterable[Source] = (),
        bytes_per_s: int = 0,
    ) -> Applied:
        """Hold exactly ``slots[i][s]`` in slot ``s`` of layer ``moe_layers[i]``.

        Loads only what no slot of the layer holds, from ``sources`` in their order and else from
        the checkpoint, at most ``bytes_per_s`` (0: no limit), and frees what is gone; idempotent.
        A slot whose expert cannot be had is left empty, and the others go on. Runs on the loader
        thread, as do ``progress``, told the share of the wanted experts that are in place, and
        ``on_fault``, told of each source that failed; it may raise to give up.

        Raises ``SlotError`` before anything changes, or ``SupersededError`` between two experts.
        """
        wanted = self._checked(moe_layers, slots)
        total = sum(expert != EMPTY for experts in wanted.values() for expert in experts)
        missing = [
            (layer, slot, expert)
            for layer, experts in wanted.items()
            for slot, expert in self._arrange(layer, experts)
        ]
        job = _Job(superseded, on_fault, sources)
        pace = Pace(bytes_per_s)
        in_place = total - len(missing)
        for done, (layer, slot, expert) in enumerate(missing):
            self.to_load = len(missing) - done
            progress(in_place / total)
            if superseded.wait(pace.delay(monotonic())):
                raise SupersededError
            held = self._held[layer].get(expert)  # loaded a moment ago for another slot
            if held is None:
                began, before = monotonic(), job.loaded_bytes
                held = self._load(job, layer, slot, expert)
                pace.loaded(job.loaded_bytes - before, began)
                if held is None:
                    continue
            with self.lock:
                self._held[layer] = self._held[layer] | {expert: held}
                self.banks[layer].install(slot, expert, held.weights)
            in_place += 1
        self.to_load = 0
        self.epoch = epoch
        progress(1.0)
        return Applied(job.loaded, job.from_peers, job.loaded_bytes, tuple(job.faults))

    def discard(self, layer: int, expert: int, held: Held) -> None:
        """Empty the slots that hold ``held``, which is no longer right: better ``STALE`` than a
        wrong answer. Any thread; ``apply`` loads the expert again.
        """
        with self.lock:
            if self._held[layer].get(expert) is not held:
                return
            bank = self.banks[layer]
            for slot, holds in enumerate(bank.holds.tolist()):
                if holds == expert:
                    bank.clear(slot)
            self._held[layer] = {e: h for e, h in self._held[layer].items() if e != expert}

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

    def _arrange(self, layer: int, experts: Sequence[int]) -> list[tuple[int, int]]:
        """Everything that needs no loading, at once: the number of slots, experts that another slot
        of the layer holds already, slots to be emptied. Returns the ``(slot, expert)`` to load.
        """
        missing = []
        bank = self.banks.get(layer) or self._new_bank(len(experts))
        with self.lock:
            self.banks[layer] = bank
            # Held on to until the lock is free: the compute thread does not wait for ``free``.
            known = self._held[layer]
            if bank.num_slots != len(experts):
                bank.resize(len(experts))
            for slot, (old, new) in enumerate(zip(bank.holds.tolist(), experts, strict=True)):
                if old == new:
                    continue
                if new in known:
                    bank.install(slot, new, known[new].weights)
                    continue
                if old != EMPTY:
                    bank.clear(slot)
                if new != EMPTY:
                    missing.append((slot, new))
            self._held[layer] = {e: held for e, held in known.items() if e in experts}
        return missing

    def _load(self, job: _Job, layer: int, slot: int, expert: int) -> Held | None:
        """The expert, or None when neither a peer nor the checkpoint could give it. Raises
        ``SupersededError``.
        """
        bank = self.banks[layer]
        for source in job.sources[layer, slot] if self._fetch is not None else ():
            if source.address in job.silent:
                continue
            assert self._fetch is not None
            try:
                held, size = from_peer(bank, self._fetch, source, expert, job.superseded)
            except LoadError as error:
                if isinstance(error, PeerError) and error.gone:
                    job.silent.add(source.address)
                self._failed(job, Fault(layer, slot, expert, error.kind, str(error), source.peer))
            else:
                job.from_peers += 1
                self._loaded(job, "peer", size)
                return held
        try:
            held, size = from_checkpoint(bank, self._read_expert, layer, expert)
        except LoadError as error:
            job.faults.append(SlotFault(layer, slot, expert, str(error)))
            self._failed(job, Fault(layer, slot, expert, error.kind, str(error)))
            return None
        self._loaded(job, "checkpoint", size)
        return held

    def _loaded(self, job: _Job, source: str, size: int) -> None:
        job.loaded += 1
        job.loaded_bytes += size
        self.tally.loaded[source] += 1
        self.tally.loaded_bytes[source] += size

    def _failed(self, job: _Job, fault: Fault) -> None:
        self.tally.faults[fault.kind] += 1
        job.on_fault(fault)
