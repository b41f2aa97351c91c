"""The kernels' stores into other ranks' memory, counted byte by byte as they happen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ep_kernels.triton.all_to_all.inbox import Wire
from ep_kernels.triton.all_to_all.traffic import (
    EXPERT_LAUNCHES,
    ROUTER_LAUNCHES,
    Message,
    answer_bytes,
    least_bytes,
    mean_ranks,
    request_bytes,
    table,
)
from exchange_peer import held_by, random_pairs, serve
from exchange_world import SHAPE, World
from triton.runtime import interpreter

ROOT = Path(__file__).parents[3]


class Counted:
    """Bytes stored into each inbox, and launches of each kernel, since the last ``clear``."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self._ranges = {
            f"{role}{i}": (box.address, box.address + box.nbytes)
            for role, boxes in world.inboxes.items()
            for i, box in enumerate(boxes)
        }
        native = interpreter._interpreter
        store, swap = native.store, native.atomic_rmw

        def counting_store(pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
            self._count(pointers, values.itemsize, mask)
            return store(pointers, values, mask, *rest)

        def counting_swap(op: Any, pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
            if op == native.RMW_OP.XCHG:
                self._count(pointers, values.itemsize, mask)
            return swap(op, pointers, values, mask, *rest)

        class Native:
            """The interpreter's own functions, but for those that write."""

            def __getattr__(self, name: str) -> Any:
                return getattr(native, name)

        spy: Any = Native()
        spy.store, spy.atomic_rmw = counting_store, counting_swap
        monkeypatch.setattr(interpreter, "_interpreter", spy)
        launch = interpreter.GridExecutor.__call__

        def counting_launch(executor: Any, *arguments: Any, **options: Any) -> Any:
            self.launches[executor.fn.__name__] += 1
            return launch(executor, *arguments, **options)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counting_launch)

    def _count(self, pointers: Any, itemsize: int, mask: Any) -> None:
        addresses = np.asarray(pointers).reshape(-1)[np.asarray(mask).reshape(-1).astype(bool)]
        for name, (low, high) in self._ranges.items():
            inside = (addresses >= low) & (addresses < high)
            if inside.any():
                self.bytes[name] += int(inside.sum()) * itemsize

    def clear(self) -> None:
        self.bytes.clear()
        self.launches.clear()


@pytest.mark.parametrize(
    ("wire", "back", "exact", "hidden"),
    [(Wire.FP8, Wire.BF16, False, 256), (Wire.FP32, Wire.FP32, True, 24)],
    ids=["fp8", "exact"],
)
def test_a_step_writes_what_the_formula_says_and_nothing_else(
    wire: Wire,
    back: Wire,
    exact: bool,
    hidden: int,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = replace(SHAPE, wire=wire, back=back, exact=exact, hidden=hidden, routers=1)
    world = World(shape)
    router, experts = world.router(0), [world.expert(0), world.expert(1)]
    counted = Counted(world, monkeypatch)
    pairs = random_pairs(9, 2, 2, rng)
    messages = []
    for rank in range(2):
        mine = pairs.rank == rank
        messages.append(Message(int(mine.any(1).sum()), int(mine.sum())))

    router.dispatch(0, torch.randn(9, hidden, generator=rng), pairs, 0)
    wanted = {f"expert{i}": request_bytes(shape, message) for i, message in enumerate(messages)}
    assert counted.bytes == wanted
    launched = counted.launches.total()
    counted.clear()
    for index, expert in enumerate(experts):
        serve(expert, 0, [0], held_by(index))
    assert counted.bytes == {"router0": sum(answer_bytes(shape, message) for message in messages)}
    assert counted.launches.total() == EXPERT_LAUNCHES * len(experts)
    counted.clear()
    router.combine(0)
    assert counted.bytes == {}
    assert launched + counted.launches.total() == ROUTER_LAUNCHES

    least = least_bytes(hidden, wire.value_bytes, messages)
    distinct = sum(len(set(row) - {-1}) for row in pairs.rank.tolist())
    assert least == distinct * hidden * wire.value_bytes
    assert sum(wanted.values()) >= least


def test_the_document_holds_the_table() -> None:
    assert table() in (ROOT / "docs" / "kernels.md").read_text()
    assert mean_ranks(8, 1) == 1
    assert 6.2 < mean_ranks(8, 16) < 6.5
