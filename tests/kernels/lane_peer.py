"""One end of lanes as a process of its own (``forked``).

``run_expert`` tells its address and answers until the pipe is closed; ``run_router`` checks every
answer, and tells how many messages it has sent and what became of them.

The "experts" compute row + logical expert, so that an answer proves which message it belongs to.
A pair whose slot is STALE_SLOT makes the answer stale.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from ep_kernels.group import GlooBackend, GroupExpertPlane, GroupRouterPlane
from ep_kernels.plane import AnswerStatus, Arrival, LaneShape, PairBlock, Part
from ep_kernels.shm import ShmExpertPlane, ShmRouterPlane
from ep_kernels.tcp import TcpExpertPlane, TcpRouterPlane

HIDDEN, TOP_K, CAPACITY, RING = 24, 3, 40, 3
DIGEST = "test-model"
KEY = bytes(range(32))
"""Of all lanes over TCP."""
STALE_SLOT = 77
DEADLINE_S = 120.0


def make_part(rng: random.Random, tokens: int, step: int) -> Part:
    numbers = np.random.default_rng(rng.getrandbits(32))
    batch = tokens + rng.randrange(3)
    token = numbers.integers(0, max(1, tokens), rng.randrange(TOP_K + 1) * tokens)
    slot = numbers.integers(0, 30, token.size)
    if token.size and rng.random() < 0.1:
        slot[-1] = STALE_SLOT
    x = torch.from_numpy(numbers.standard_normal((batch, HIDDEN)).astype(np.float32))
    layer = rng.randrange(8)
    block = PairBlock.of(
        numbers.permutation(batch)[:tokens].astype(np.int32),
        token.astype(np.int32),
        slot.astype(np.int32),
        numbers.integers(0, 1000, token.size).astype(np.int32),
        numbers.random(token.size).astype(np.float32),
    )
    return Part(step, layer, 1, x, block)


def part_of(tokens: int, step: int = 0) -> Part:
    """A part with pairs (if it has tokens) that an expert worker answers with OK."""
    rng = random.Random(tokens)
    part = make_part(rng, tokens, step)
    while expected(part, exact=False) is None or (tokens and not part.block.num_pairs):
        part = make_part(rng, tokens, step)
    return part


def compute(
    x: torch.Tensor,
    token: np.ndarray,
    expert: np.ndarray,
    weight: np.ndarray,
    exact: bool,
) -> torch.Tensor:
    rows = x.float()[torch.from_numpy(token).long()] + torch.from_numpy(expert).float()[:, None]
    if exact:
        return rows
    scaled = rows * torch.from_numpy(weight)[:, None]
    return torch.zeros(x.shape[0], x.shape[1]).index_add_(0, torch.from_numpy(token), scaled)


def serve(arrival: Arrival) -> AnswerStatus:
    if (arrival.pair_slot == STALE_SLOT).any():
        return AnswerStatus.STALE
    arrival.out.copy_(
        compute(
            arrival.x, arrival.pair_token, arrival.pair_expert, arrival.pair_weight, arrival.exact
        )
    )
    return AnswerStatus.OK


def expected(part: Part, exact: bool) -> torch.Tensor | None:
    """None where the answer is stale."""
    block = part.block
    if (block.pair_slot == STALE_SLOT).any():
        return None
    x = part.x[torch.from_numpy(block.rows)]
    return compute(x, block.pair_token, block.pair_expert, block.pair_weight, exact)


def new_expert(
    kind: str, name: str, incarnation: int, path: str, hidden: int
) -> tuple[ShmExpertPlane, str]:
    """An expert worker's plane and the address of its lanes."""
    if kind == "shm":
        return ShmExpertPlane(name, incarnation, path, hidden, DIGEST), path
    if kind == "symm":
        from ep_kernels.triton.device import open_device
        from ep_kernels.triton.symm import SymmExpertPlane

        device = open_device("interpreter")
        return SymmExpertPlane(name, incarnation, path, hidden, DIGEST, device=device), path
    if kind == "gloo":
        group = GroupExpertPlane(
            name, incarnation, hidden, DIGEST, backend=GlooBackend(), host="127.0.0.1", key=KEY
        )
        return group, f"gloo://127.0.0.1:{group.port}#{KEY.hex()}"
    tcp = TcpExpertPlane(name, incarnation, "", hidden, DIGEST, host="127.0.0.1", key=KEY)
    return tcp, f"tcp://127.0.0.1:{tcp.port}#{KEY.hex()}"


def new_router(name: str, shape: LaneShape, addresses: list[str]) -> ShmRouterPlane:
    """A router's plane for lanes to such addresses."""
    if addresses[0].startswith("gloo://"):
        return GroupRouterPlane(name, 1, shape, DIGEST, GlooBackend())
    return TcpRouterPlane(name, 1, shape, DIGEST)


def until_closed(pipe: Connection) -> None:
    with contextlib.suppress(EOFError):
        pipe.recv()


@torch.inference_mode()
def run_expert(
    pipe: Connection, kind: str, name: str, incarnation: int, path: Path, hidden: int, seed: int
) -> None:
    """``path`` is for lanes of kind shm or symm."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    plane, address = new_expert(kind, name, incarnation, str(path), hidden)
    stopping = threading.Event()

    def follow_parent() -> None:
        until_closed(pipe)
        stopping.set()
        plane.wake()

    threading.Thread(target=follow_parent, daemon=True).start()
    pipe.send(address)
    held: deque[Arrival] = deque()
    while not stopping.is_set():
        plane.wait(0.0 if held else 5.0)
        held.extend(plane.poll())
        if held and rng.random() < 0.5:
            held.rotate(rng.randrange(3))  # answers in another order than the parts came
        if held and rng.random() < 0.2:
            time.sleep(rng.random() * 3e-4)
        if held:
            arrival = held.popleft()
            plane.answer(arrival, serve(arrival), 7, arrival.step)
    plane.close()


@torch.inference_mode()
def run_router(
    pipe: Connection, name: str, messages: int, seed: int, exact: bool, places: dict[str, str]
) -> None:
    """``places``: the address of each expert worker."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    shape = LaneShape(HIDDEN, TOP_K, CAPACITY, RING, exact=exact)
    plane = new_router(name, shape, list(places.values()))
    peers = list(places)
    for peer, address in places.items():
        plane.connect(peer, address, 1, DEADLINE_S)
    waiting: dict[int, Part] = {}
    sent = full = stale = 0
    deadline = time.monotonic() + DEADLINE_S
    part: Part | None = None
    while sent < messages or waiting:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name}: {len(waiting)} answers are missing after {sent} messages")
        while sent < messages:
            if part is None:
                part = make_part(rng, rng.choice([0, 1, 1, 2, 7, CAPACITY]), sent)
                while sent + 1 == messages and expected(part, shape.exact) is not None:
                    part = make_part(rng, 7, sent)  # one at least is answered stale
            ticket = plane.try_send(rng.choice(peers), part)
            if ticket is None:
                full += 1
                break
            waiting[ticket] = part
            sent += 1
            part = None
        if rng.random() < 0.05:
            time.sleep(rng.random() * 3e-4)
        plane.wait(5.0)
        for answer in plane.poll():
            asked = waiting.pop(answer.ticket)
            want = expected(asked, shape.exact)
            if want is None:
                assert answer.status is AnswerStatus.STALE
                stale += 1
            else:
                assert answer.status is AnswerStatus.OK
                assert answer.compute_ns == asked.step
                torch.testing.assert_close(answer.out, want, rtol=0, atol=1e-3)
            plane.release(answer)
        assert not plane.lost()
    assert plane.in_flight() == 0
    pipe.send({"sent": sent, "full": full, "stale": stale})
    until_closed(pipe)  # stay connected until the test has looked
    plane.close()
