"""The promise behind every move: an answer that is not ``STALE`` is the named expert's."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import numpy as np
import torch
from ep_kernels.grouped_ffn import ExpertBank, reference_sum
from ep_kernels.plane import AnswerStatus, LaneShape, Part
from ep_kernels.shm.expert import ShmExpertPlane
from ep_kernels.shm.router import ShmRouterPlane

from expert_svc.slots import SlotTable
from expert_svc.worker import Worker

HIDDEN, INTER, EXPERTS, SLOTS, LAYER = 16, 8, 6, 4, 2
WEIGHTS = [
    (
        torch.randn(INTER, HIDDEN, generator=torch.Generator().manual_seed(3 * e)),
        torch.randn(INTER, HIDDEN, generator=torch.Generator().manual_seed(3 * e + 1)),
        torch.randn(HIDDEN, INTER, generator=torch.Generator().manual_seed(3 * e + 2)),
    )
    for e in range(EXPERTS)
]


def test_no_answer_is_wrong_while_slots_change_under_traffic(tmp_path: Path) -> None:
    table = SlotTable(
        (LAYER,),
        EXPERTS,
        lambda slots: ExpertBank(slots, HIDDEN, INTER),
        lambda _layer, expert: WEIGHTS[expert],
    )
    path = str(tmp_path / "lanes")
    expert = ShmExpertPlane("e", 1, path, HIDDEN, "d", max_lanes=2)
    worker = Worker(expert, table)
    router = ShmRouterPlane(
        "r", 1, LaneShape(hidden=HIDDEN, top_k=2, capacity_tokens=4, ring_slots=2), "d"
    )
    done = threading.Event()

    def change_slots() -> None:
        choice = random.Random(1)
        while not done.is_set():
            # Sometimes another number of slots: the whole bank is replaced.
            experts = choice.sample(range(EXPERTS), SLOTS - choice.randrange(2))
            table.apply(
                (LAYER,),
                (experts,),
                1,
                progress=lambda _share: None,
                superseded=lambda: False,
            )

    threads = [threading.Thread(target=worker.run), threading.Thread(target=change_slots)]
    for thread in threads:
        thread.start()
    try:
        router.connect("e", path, 1, timeout_s=10.0)
        seen = dict.fromkeys(AnswerStatus, 0)
        random_pairs = np.random.default_rng(0)
        end = time.monotonic() + 30.0
        while min(seen.values()) < 40:
            assert time.monotonic() < end, seen
            named = random_pairs.integers(0, EXPERTS, 2).astype(np.int32)
            part = Part(
                step=1,
                layer=LAYER,
                epoch=1,
                x=torch.randn(1, HIDDEN),
                rows=torch.tensor([0]),
                pair_token=np.zeros(2, np.int32),
                pair_slot=random_pairs.integers(0, SLOTS, 2).astype(np.int32),
                pair_expert=named,
                pair_weight=np.ones(2, np.float32),
            )
            assert router.try_send("e", part) is not None
            while not (answers := router.poll()):
                assert time.monotonic() < end
                router.wait(1.0)
            (answer,) = answers
            seen[answer.status] += 1
            if answer.status == AnswerStatus.OK:
                held = [WEIGHTS[expert] for expert in named.tolist()]
                want = reference_sum(
                    part.x, part.pair_token, held, np.arange(2, dtype=np.int32), part.pair_weight
                )
                torch.testing.assert_close(answer.out, want, rtol=1e-4, atol=1e-4)
            router.release(answer)
    finally:
        done.set()
        worker.stop()
        for thread in threads:
            thread.join(10)
        router.close()
        expert.close()
