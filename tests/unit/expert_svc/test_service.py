from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
import torch
from ep_kernels.grouped_ffn import ExpertBank
from prometheus_client import CollectorRegistry

from expert_svc.service import ExpertWorker
from expert_svc.slots import SlotTable
from expert_svc.worker import Worker
from mesh.config import Effective
from mesh.links import Net
from mesh.messages import AssignSlots, SlotsReady
from mesh.service import Context
from mesh.settings import Settings

COMMAND = AssignSlots(command=7, epoch=3, moe_layers=(0,), slots=((0,),))


def carry_out(tmp_path: Path, read: object) -> list[SlotsReady]:
    """What the worker answers to ``COMMAND`` when ``read`` reads its experts."""

    async def main() -> list[SlotsReady]:
        net = Net()
        ctx = Context(
            role="expert",
            id="expert-0",
            incarnation=1,
            settings=Settings(),
            effective=Effective(Settings(), {}),
            run_dir=tmp_path,
            net=net,
            registry=CollectorRegistry(),
            log=structlog.get_logger(),
        )
        table = SlotTable((0,), 2, lambda slots: ExpertBank(slots, 4, 4), read)
        worker = ExpertWorker(ctx, table, Worker(SimpleNamespace(), table), lanes="", digest="d")
        answers: list[SlotsReady] = []
        worker._member.send = answers.append
        worker._assign(COMMAND)
        with ThreadPoolExecutor(1) as pool:
            try:
                await worker._carry_out(COMMAND, pool)
            finally:
                net.close()
        return answers

    return asyncio.run(main())


def test_a_worker_without_memory_says_so_to_the_planner(tmp_path: Path) -> None:
    def too_large(layer: int, expert: int) -> tuple[torch.Tensor, ...]:
        return (torch.empty(1 << 60),) * 3

    (answer,) = carry_out(tmp_path, too_large)
    assert answer.command == 7
    assert "can't allocate memory" in answer.error


def test_a_bug_while_loading_ends_the_worker(tmp_path: Path) -> None:
    def faulty(layer: int, expert: int) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        carry_out(tmp_path, faulty)
