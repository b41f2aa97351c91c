"""A router of two devices: a leader in this process and a real follower, with the interpreter."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from ep_kernels.triton.device import Device, open_device, wait_for

from mesh.settings import LogSettings
from moe_model.device.shard import DeviceShard
from moe_model.experts import LocalExperts
from moe_model.forward import forward as run_layers
from moe_model.forward import run_to_end
from moe_model.plan import Chunk
from router_svc.device_group import DeviceGroupModel, Watched, load_device_group
from router_svc.follower import Assignment
from router_svc.group import device_of_rank
from router_svc.peers import FollowerLinks, GroupLost, Op
from tests.support.checkpoints import VARIANTS, write
from tests.support.oracle import Oracle

BLOCK = 8
TIMEOUT_S = 20.0
DEADLINE_S = 120.0


@contextmanager
def group(
    path: Path, device: Device
) -> Iterator[tuple[DeviceGroupModel, subprocess.Popen[bytes], FollowerLinks]]:
    """The leader's model, its follower's process, and its links."""
    ours, theirs = socket.socketpair()
    store = os.memfd_create("ranks")
    task = Assignment(
        router="router-0",
        rank=1,
        size=2,
        leader_pid=os.getpid(),
        link_fd=theirs.fileno(),
        model=str(path),
        weights="fp32",
        exact=False,
        threads=1,
        logs=LogSettings(),
        device="interpreter",
        store_fd=store,
    )
    command = [sys.executable, "-P", "-m", "router_svc.follower"]
    with theirs:
        process = subprocess.Popen(
            [*command, msgspec.json.encode(task).decode()], pass_fds=[theirs.fileno(), store]
        )
    try:
        links = FollowerLinks([ours], [process.pid], timeout_s=TIMEOUT_S)
        end = time.monotonic() + DEADLINE_S
        yield (
            load_device_group(
                path, device, 2, store, links, weights="fp32",
                progress=lambda _share: not_after(end),
            ),
            process,
            links,
        )  # fmt: skip
    finally:
        process.kill()
        process.wait()
        ours.close()
        os.close(store)


class Stuck:
    """A stream of which nothing is ever done."""

    done = False

    def mark(self) -> Stuck:
        return self


def not_after(end: float) -> None:
    assert time.monotonic() < end, "the follower does not load"


def drawn(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(8, 380) for _ in range(count)]


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("interpreter")


def test_two_ranks_compute_what_transformers_does_and_know_of_each_others_end(
    checkpoints: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, config = VARIANTS["mixtral"]
    path = write(checkpoints / "short-mixtral", family, config | {"max_position_embeddings": 96})
    experts = LocalExperts.load(path, weights="fp32")
    with group(path, device) as (model, follower, links), torch.inference_mode():
        client = model.clients(lambda _decodes: experts, lambda *_when: None)(b"")
        kv = model.new_kv_cache(9, BLOCK)
        kv.clear([1, 2])
        texts, tables = [drawn(11, 1), drawn(8, 2)], [[6, 2], [3]]

        def step(*chunks: tuple[int, int, int]) -> list[torch.Tensor]:
            """Logits of each text's tokens."""
            plan = model.plan([Chunk(texts[i][a:b], a, tables[i]) for i, a, b in chunks], BLOCK)
            hidden = run_to_end(run_layers(model, plan, kv, client))
            return list(model.logits(hidden).split([b - a for _i, a, b in chunks]))

        rows: list[list[torch.Tensor]] = [[], []]
        for i, got in enumerate(step((0, 0, 9), (1, 0, 6))):
            rows[i].append(got)
        for at in range(2):  # decodes, over frames on both ranks
            for i, got in enumerate(step((0, 9 + at, 10 + at), (1, 6 + at, 7 + at))):
                rows[i].append(got)
        oracle = Oracle(path)
        for text, got in zip(texts, rows, strict=True):
            torch.testing.assert_close(torch.cat(got), oracle.logits(text), rtol=1e-4, atol=1e-4)
        assert model.waited_ns > 0

        plan = model.plan([Chunk([9], 10, tables[0])], BLOCK)
        h = model.embed(plan)
        # What one rank cannot compute is no number, and harms nothing that comes after.
        whole = model.attend(0, h, plan, kv)
        lost = model._sum(Op.ATTEND, 99, plan.number, h, 1, lambda: torch.zeros_like(h))
        assert lost.isnan().all()

        def fail(*_arguments: object) -> torch.Tensor:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(DeviceShard, "attend_part", fail)
            with pytest.raises(MemoryError):
                model.attend(0, h, plan, kv)
        assert torch.equal(model.attend(0, h, plan, kv), whole)

        follower.send_signal(signal.SIGSTOP)
        with pytest.raises(GroupLost, match="rank 1 of the router's group hangs"):
            model.dense(0, model.attend(0, h, plan, kv))
        follower.kill()
        follower.wait()
        # A GPU whose sums never come is not waited for any longer.
        stream = Watched(Stuck(), links.watch(owing=False))
        with pytest.raises(GroupLost, match=r"rank 1 .* is gone"):
            wait_for(device, stream.mark())


def test_ranks_take_one_gpu_after_the_other() -> None:
    assert [device_of_rank("cuda", rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert device_of_rank("cuda:4", 3) == "cuda:7"
    assert device_of_rank("interpreter", 1) == "interpreter"
