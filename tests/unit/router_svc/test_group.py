"""A leader in this process and a real follower: one group, without a mesh."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from mesh.settings import LogSettings
from moe_model.forward import forward, run_to_end
from moe_model.plan import Chunk
from moe_model.reference import ReferenceModel
from moe_model.shard_model import load_shard
from router_svc.follower import Assignment
from router_svc.group_model import GroupModel, decode_chunks, encode_chunks
from router_svc.peers import FollowerLinks, GroupLost, Op

TIMEOUT_S = 2.0
DEADLINE_S = 60.0


class Pair:
    """Leader and follower of ``model``."""

    def __init__(self, model: Path) -> None:
        ours, theirs = socket.socketpair()
        task = Assignment(
            router="router-0",
            rank=1,
            size=2,
            leader_pid=os.getpid(),
            link_fd=theirs.fileno(),
            model=str(model),
            weights="auto",
            exact=False,
            threads=1,
            logs=LogSettings(),
        )
        self.link = ours
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "router_svc.follower", encoded(task)],
                pass_fds=[theirs.fileno()],
            )
        parts = load_shard(model, 0, 2)
        self.followers = FollowerLinks([ours], [self.process.pid], timeout_s=TIMEOUT_S)
        end = time.monotonic() + DEADLINE_S
        self.followers.until_loaded(lambda: not_after(end))
        self.model = GroupModel(parts, self.followers)
        self.kv = self.model.new_kv_cache(64, 16)

    def logits(self, chunks: list[Chunk], reference: ReferenceModel) -> torch.Tensor:
        with torch.inference_mode():
            plan = self.model.plan(chunks, 16)
            hidden = run_to_end(forward(self.model, plan, self.kv, reference.experts))
            return self.model.logits(hidden)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.link.close()


def encoded(task: Assignment) -> str:
    return msgspec.json.encode(task).decode()


def not_after(end: float) -> None:
    assert time.monotonic() < end, "the follower does not load"


@pytest.fixture(scope="module")
def pair(tiny_deepseek: Path) -> Iterator[Pair]:
    torch.set_num_threads(1)
    pair = Pair(tiny_deepseek)
    yield pair
    pair.end()


def test_a_group_computes_what_one_process_does(pair: Pair, tiny_deepseek: Path) -> None:
    reference = ReferenceModel(tiny_deepseek)
    prompt = torch.randint(8, 380, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    want = reference.logits(prompt)
    table = list(range(20, 30))
    first = pair.logits([Chunk(prompt[:100], 0, table)], reference)
    pair.kv.clear([40, 41])
    # A follower that nobody asks for long waits on, asleep.
    before = psutil.Process(pair.process.pid).cpu_times()
    time.sleep(1.5 * TIMEOUT_S)  # that is the pause
    after = psutil.Process(pair.process.pid).cpu_times()
    assert after.user + after.system - before.user - before.system < 0.2
    rest = pair.logits([Chunk(prompt[100:], 100, table)], reference)
    assert (torch.cat([first, rest]) - want).abs().max() <= 1e-4

    # What a follower cannot compute is no number, and harms nothing that comes after.
    pair.followers.ask(Op.ATTEND, 99, 0, torch.zeros(3, 64), [(3, 64)])
    (answer,) = pair.followers.answers()
    assert answer.isnan().all()
    with pytest.raises(ValueError, match="context"):
        pair.model.plan([Chunk([5], 5000, table)], 16)
    again = pair.logits([Chunk(prompt[100:], 100, table)], reference)
    assert torch.equal(again, rest)

    # A part of its own that fails leaves no answer behind that the next question would get.
    with torch.inference_mode(), pytest.raises(IndexError):
        pair.model.dense(99, torch.zeros(2, 64))
    assert torch.equal(pair.logits([Chunk(prompt[100:], 100, table)], reference), rest)

    os.kill(pair.process.pid, signal.SIGTERM)  # as systemd tells every process of a service
    os.kill(pair.process.pid, signal.SIGINT)  # as a terminal does
    assert torch.equal(pair.logits([Chunk(prompt[100:], 100, table)], reference), rest)


def test_a_follower_that_hangs_or_ends_is_lost(pair: Pair) -> None:
    os.kill(pair.process.pid, signal.SIGSTOP)
    with torch.inference_mode(), pytest.raises(GroupLost, match=r"rank 1 .* stood still"):
        pair.model.dense(0, torch.zeros(512, 64))
    # Waits that are made elsewhere. Two of a second each are no standstill; one of 3 s is.
    look = pair.followers.watch(owing=False)
    wait(look, 3.0)
    look = pair.followers.watch(owing=True)
    wait(look, 1.0)
    wait(look, 1.0)
    with pytest.raises(GroupLost, match=r"rank 1 .* stood still"):
        wait(look, 3.0)
    pair.process.kill()
    pair.process.wait()
    with pytest.raises(GroupLost, match=r"rank 1 .* is gone"):
        pair.followers.watch(owing=False)(0.2)
    with torch.inference_mode(), pytest.raises(GroupLost, match=r"rank 1 .* is gone"):
        pair.model.dense(0, torch.zeros(512, 64))


def wait(look: Callable[[float], None], seconds: float) -> None:
    """Call it as who waits so long does."""
    for number in range(int(20 * seconds)):
        look(number / 20)


ODD = """
import socket, sys, time
link = socket.socket(fileno=int(sys.argv[1]))
for _ in range(10**6):
    pass
link.send(b"!")
link.recv(65536)
end = time.process_time() + 2.2
while {goes_on}:
    pass
link.sendall(bytes(4))
time.sleep(60)
"""
"""A follower that takes more than the longest standstill to answer, in time that it runs."""


Odd = Callable[[str, float], FollowerLinks]


@pytest.fixture
def odd() -> Iterator[Odd]:
    """Makes links to a follower that goes on while a condition holds, and then answers."""
    started: list[subprocess.Popen[bytes]] = []

    def start(goes_on: str, timeout_s: float) -> FollowerLinks:
        ours, theirs = socket.socketpair()
        code = ODD.format(goes_on=goes_on)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        started.append(process)
        links = FollowerLinks([ours], [process.pid], timeout_s=timeout_s)
        end = time.monotonic() + DEADLINE_S
        links.until_loaded(lambda: not_after(end))
        return links

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_follower_that_is_only_slow_is_waited_for(odd: Odd) -> None:
    links = odd("time.process_time() < end", DEADLINE_S)
    links.ask(Op.DENSE, 0, 0, None, [(1, 1)])
    assert links.answers()[0].tolist() == [[0.0]]


def test_a_follower_that_sleeps_while_it_is_asked_hangs(odd: Odd) -> None:
    links = odd("time.sleep(60) is None", DEADLINE_S)
    with pytest.raises(GroupLost, match=r"stood still for 1.5 s"):
        links.ask(Op.DENSE, 0, 0, torch.zeros(1_000_000), [(1, 1)])  # more than a socket holds


def test_a_follower_that_never_ends_is_given_up_in_the_end(odd: Odd) -> None:
    links = odd("True", 2.0)
    links.ask(Op.DENSE, 0, 0, None, [(1, 1)])
    with pytest.raises(GroupLost, match=r"does not get on within 2 s"):
        links.answers()


def test_chunks_survive_the_way_to_a_follower() -> None:
    chunks = [Chunk([5, 6, 7], 16, [3, 9]), Chunk([1], 0, [2]), Chunk((8, 9), 40, (4, 5, 6))]
    words = encode_chunks(chunks)
    assert words.dtype is torch.int32
    decoded = decode_chunks(words.tolist(), len(chunks))
    assert [(list(c.token_ids), c.start, list(c.block_table)) for c in decoded] == [
        (list(c.token_ids), c.start, list(c.block_table)) for c in chunks
    ]
