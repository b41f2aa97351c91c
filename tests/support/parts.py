"""Parts as an expert worker sees them, and a plane in memory that hands them to its thread."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from ep_kernels.grouped_ffn import reference_rows, reference_sum
from ep_kernels.plane import AnswerStatus, Arrival
from ep_kernels.serve import ServedBanks

from expert_svc.worker import ComputeThread

HIDDEN, INTER, EXPERTS = 16, 8, 6
HELD = {1: [2, 0, 5], 3: [1, -1, 4]}
"""Layer -> what its slots hold."""


def expert(layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(layer * 1000 + index)
    gate, up = torch.randn(2, INTER, HIDDEN, generator=random)
    return gate, up, torch.randn(HIDDEN, INTER, generator=random)


def part(
    layer: int,
    tokens: int,
    *,
    pairs: int | None = None,
    peer: str = "r0",
    exact: bool = False,
    wire: torch.dtype = torch.float32,
    seed: int = 0,
) -> Arrival:
    """A random valid part; ``out`` starts poisoned."""
    random = np.random.default_rng(seed)
    filled = [slot for slot, held in enumerate(HELD.get(layer, [0])) if held >= 0]
    count = 2 * tokens if pairs is None else pairs
    pair_slot = random.choice(filled, count).astype(np.int32)
    held = np.array(HELD.get(layer, [0]), dtype=np.int32)
    return Arrival(
        lane=0,
        ring_slot=0,
        sequence=1,
        peer=peer,
        exact=exact,
        step=1,
        layer=layer,
        epoch=1,
        x=torch.from_numpy(random.standard_normal((tokens, HIDDEN), dtype=np.float32)).to(wire),
        pair_token=np.sort(random.integers(0, max(tokens, 1), count)).astype(np.int32),
        pair_slot=pair_slot,
        pair_expert=held[pair_slot],
        pair_weight=random.random(count, dtype=np.float32),
        out=torch.full((count if exact else tokens, HIDDEN), torch.nan),
    )


class ListPlane:
    """A plane in memory: each ``poll`` yields the next batch; the worker stops at the end."""

    def __init__(self, *batches: list[Arrival], on_device: bool = False) -> None:
        self.on_device = on_device
        self.batches = deque(batches)
        self.answered: list[tuple[Arrival, AnswerStatus, int]] = []
        self.woken = 0
        self.corrupt_lanes = 0
        self.worker: ComputeThread | None = None

    def serve(self, banks: ServedBanks) -> None:
        """Its parts are in no lane."""

    def poll(self) -> list[Arrival]:
        return self.batches.popleft() if self.batches else []

    def answer(
        self, arrival: Arrival, status: AnswerStatus, began_ns: int, compute_ns: int
    ) -> None:
        self.answered.append((arrival, status, compute_ns))

    def wait(self, timeout_s: float) -> None:
        assert timeout_s > 1, "an idle worker sleeps long"
        assert self.worker is not None
        self.worker.stop()

    def wake(self) -> None:
        self.woken += 1

    def peers(self) -> list[str]:
        return ["r0"]

    def close(self) -> None: ...


def assert_right(arrival: Arrival, *, rtol: float = 1e-4, atol: float = 1e-4) -> None:
    held = [expert(arrival.layer, index) for index in HELD[arrival.layer]]
    x, token, slot = arrival.x.float(), arrival.pair_token, arrival.pair_slot
    if arrival.exact:
        want = reference_rows(x, token, held, slot)
    else:
        want = reference_sum(x, token, held, slot, arrival.pair_weight)
    torch.testing.assert_close(arrival.out, want, rtol=rtol, atol=atol)
