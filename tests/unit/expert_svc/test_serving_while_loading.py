"""The promise behind every move: an answer that is not ``STALE`` is the named expert's."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import structlog
import torch
import uvloop
from ep_kernels.grouped_ffn import reference_sum
from ep_kernels.plane import AnswerStatus, LaneShape, PairBlock, Part
from ep_kernels.shm.expert import ShmExpertPlane
from ep_kernels.shm.router import ShmRouterPlane

from expert_svc.bundles import BundleClient, BundleServer
from expert_svc.loading import SupersededError
from expert_svc.slots import SlotTable
from expert_svc.worker import Worker
from mesh.links import Net
from tests.support.experts import EXPERTS, HIDDEN, LAYERS, Reads, apply, expert, new_table, source

SLOTS = 4
MOVES = 150
DEADLINE_S = 60.0


def test_no_answer_is_wrong_while_experts_move_between_two_workers_under_traffic(
    tmp_path: Path,
) -> None:
    """Two workers take each other's experts, whatever the other one does meanwhile."""
    done = threading.Event()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loads = runner.run(_moves(tmp_path, done))
    assert min(loads["peer"], loads["checkpoint"]) > 10, loads


async def _moves(home: Path, done: threading.Event) -> Counter[str]:
    seen: Counter[AnswerStatus] = Counter()
    net = Net()
    client = BundleClient(net)
    tables = [new_table(Reads(), fetch=client.fetch) for _ in range(2)]
    addresses = [f"ipc://{home}/{rank}.bundles" for rank in range(2)]
    servers = [
        BundleServer(net, address, table, on_corrupt=_never, log=structlog.get_logger())
        for address, table in zip(addresses, tables, strict=True)
    ]
    tasks = [asyncio.ensure_future(server.run()) for server in servers]
    plane = ShmExpertPlane("e", 1, str(home / "lanes"), HIDDEN, "d", max_lanes=2)
    worker = Worker(plane, tables[0])
    compute = asyncio.to_thread(worker.run)
    try:
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            group.create_task(compute)
            traffic = group.create_task(
                asyncio.to_thread(_traffic, tables[0], str(home / "lanes"), seen, done)
            )
            movers = [
                group.create_task(asyncio.to_thread(_move, rank, tables, addresses, seen, done))
                for rank in range(2)
            ]
            await asyncio.wait(movers)
            done.set()
            await asyncio.wait([traffic])
            worker.stop()
        return sum((table.tally.loaded for table in tables), Counter())
    finally:
        done.set()
        worker.stop()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        plane.close()
        net.close()


def _never(*corrupt: object) -> None:
    raise AssertionError(corrupt)


def _move(
    rank: int,
    tables: list[SlotTable],
    addresses: list[str],
    seen: Counter[AnswerStatus],
    done: threading.Event,
) -> None:
    """Random small moves, some sources wrong, some assignments superseded at once."""
    choice = random.Random(rank)
    ours, theirs = tables[rank], tables[1 - rank]
    apply(ours, [0, 1, 2, 3], [2, 3, 4, 5])
    for epoch in itertools.count():
        enough = epoch >= MOVES and min(seen[status] for status in AnswerStatus) > 100
        if enough or done.is_set():
            return
        rows = [list(row) for row in ours.held()]
        row = choice.choice(rows)
        for _ in range(choice.randint(1, 2)):
            row[choice.randrange(len(row))] = choice.randrange(-1, EXPERTS)
        if choice.random() < 0.2:
            row[:] = row[:-1] if len(row) == SLOTS else [*row, -1]
        sources = [
            source(layer, slot, addresses[1 - rank], choice.choice([held.index(index)] * 3 + [0]))
            for layer, row, held in zip(LAYERS, rows, theirs.held(), strict=True)
            for slot, index in enumerate(row)
            if index in held
        ]
        superseded = threading.Event()
        if choice.random() < 0.1:
            superseded.set()
        with suppress(SupersededError):
            applied = apply(ours, *rows, epoch=epoch, sources=sources, superseded=superseded)
            assert applied.faults == ()
            assert ours.held() == tuple(map(tuple, rows))


def _traffic(
    table: SlotTable, lanes: str, seen: Counter[AnswerStatus], done: threading.Event
) -> None:
    """Name what slots held a moment ago, or at random, and compare what is answered."""
    router = ShmRouterPlane(
        "r", 1, LaneShape(hidden=HIDDEN, top_k=2, capacity_tokens=4, ring_slots=2), "d"
    )
    try:
        router.connect("e", lanes, 1, timeout_s=10.0)
        pairs = np.random.default_rng(0)
        while not done.is_set():
            at = int(pairs.integers(2))
            slots = pairs.integers(0, SLOTS, 2).astype(np.int32)
            named = pairs.integers(0, EXPERTS, 2).astype(np.int32)
            held = np.array([*table.held()[at], *[-1] * SLOTS], dtype=np.int32)
            if pairs.random() < 0.7 and (held[slots] >= 0).all():
                named = held[slots]
            token = np.zeros(2, np.int32)
            block = PairBlock.of(token[:1], token, slots, named, np.ones(2, np.float32))
            part = Part(1, LAYERS[at], 1, torch.randn(1, HIDDEN), block)
            assert router.try_send("e", part) is not None
            end = time.monotonic() + DEADLINE_S
            while not (answers := router.poll()):
                assert time.monotonic() < end
                router.wait(1.0)
            (answer,) = answers
            seen[answer.status] += 1
            if answer.status == AnswerStatus.OK:
                own = np.arange(2, dtype=np.int32)
                right = [expert(part.layer, index) for index in named.tolist()]
                want = reference_sum(part.x, token, right, own, block.pair_weight)
                assert torch.allclose(answer.out, want, rtol=1e-4, atol=1e-4)
            router.release(answer)
    finally:
        router.close()
