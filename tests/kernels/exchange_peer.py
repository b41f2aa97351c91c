"""One rank of exchanges as a process of its own, started by the tests with this file's path.

exchange_peer.py SETUP, a JSON object: ``role`` (router or expert), ``index``, ``seed`` and
``phases``, each an exchange of its own: ``shape``, ``fds`` of all inboxes by role, ``rounds``,
``deadline_s``, ``dies`` (name -> round in which that rank kills itself).

A router runs the phases one after another, compares every batch with the reference and prints a
JSON object. An expert rank multiplies a row by 1 + its logical expert; it serves all phases until
its stdin closes, then waits once for the routers that died.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import torch
from ep_kernels.triton.all_to_all.end import ExchangeShape, LaneTimedOut, Peer
from ep_kernels.triton.all_to_all.exchange import ExpertExchange, RouterExchange
from ep_kernels.triton.all_to_all.inbox import Header, Wire
from ep_kernels.triton.all_to_all.plan import Pairs
from ep_kernels.triton.all_to_all.reference import exchanged
from ep_kernels.triton.all_to_all.symmetric import attach_shared
from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

SLOTS_PER_RANK = 2
LAYERS = 5


def held_by(rank: int) -> torch.Tensor:
    """Logical experts of a rank's slots."""
    return torch.arange(SLOTS_PER_RANK, dtype=torch.int32) + rank * SLOTS_PER_RANK


def random_pairs(
    tokens: int, top_k: int, ranks: int, numbers: torch.Generator, *, dropped: float = 0.1
) -> Pairs:
    """Distinct experts for each token; some pairs go nowhere."""
    experts = ranks * SLOTS_PER_RANK
    chosen = torch.rand(tokens, experts, generator=numbers).argsort(1)[:, :top_k].int()
    rank = chosen // SLOTS_PER_RANK
    rank[torch.rand(rank.shape, generator=numbers) < dropped] = -1
    return Pairs(
        rank=rank.contiguous(),
        slot=(chosen % SLOTS_PER_RANK).contiguous(),
        expert=chosen.contiguous(),
        weight=torch.rand(tokens, top_k, generator=numbers),
    )


def run_expert(rows: torch.Tensor, expert: int) -> torch.Tensor:
    return rows * (1 + expert)


def rows_of(exchange: ExpertExchange) -> torch.Tensor:
    """The inbox's rows as fp32."""
    rows = exchange.rows.float()
    if exchange.layout.shape.wire is Wire.FP8:
        groups = rows.view(rows.shape[0], rows.shape[1] // 128, 128)
        rows = (groups * exchange.scales.unsqueeze(2)).view(rows.shape)
    return rows


def serve(exchange: ExpertExchange, slot: int, lanes: list[int], held: torch.Tensor) -> None:
    arrived = exchange.receive(slot, lanes, held)
    rows = rows_of(exchange)
    y = torch.full((arrived.index.numel(), rows.shape[1]), float("nan"))  # poison
    counts = arrived.count.tolist()
    capacity = arrived.index.shape[2]
    for local, expert in enumerate(held.tolist()):
        for which in range(len(lanes)):
            count = counts[local][which]
            begin = (local * len(lanes) + which) * capacity
            index = arrived.index[local, which, :count].long()
            y[begin : begin + count] = run_expert(rows[index], expert)
    exchange.answer(arrived, y)


class Phase:
    def __init__(self, setup: dict[str, Any], role: str, index: int) -> None:
        shape = {**setup["shape"], "wire": Wire(setup["shape"]["wire"])}
        self.shape = ExchangeShape(**{**shape, "back": Wire(setup["shape"]["back"])})
        self.rounds = setup["rounds"]
        self.dies = setup["dies"].get(f"{role}{index}")
        self.doomed = {name for name in setup["dies"] if not name.startswith(role)}
        self.lost: list[str] = []
        self.messages = 0
        sizes = {"router": self.shape.answers, "expert": self.shape.requests}
        inboxes = {
            kind: [attach_shared(fd, sizes[kind].total_bytes) for fd in fds]
            for kind, fds in setup["fds"].items()
        }
        other = "expert" if role == "router" else "router"
        peers = [Peer(f"{other}{i}", inbox, index) for i, inbox in enumerate(inboxes[other])]
        kind = RouterExchange if role == "router" else ExpertExchange
        self.exchange = kind(self.shape, inboxes[role][index], peers, setup["deadline_s"])

    def die_if_due(self, number: int) -> None:
        if number == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def note_lost(self) -> None:
        for lost in self.exchange.lost():
            assert type(lost) is LaneTimedOut
            assert lost.peer in self.doomed, str(lost)
            self.lost.append(lost.peer)

    def complete(self) -> bool:
        return self.messages == self.rounds * self.shape.ring_slots * self.shape.routers

    def result(self) -> dict[str, Any]:
        return {"messages": self.messages, "lost": self.lost}


def run_expert_rank(phases: list[Phase], index: int, rng: random.Random) -> None:
    held = held_by(index)
    stopping = threading.Event()

    def follow_parent() -> None:
        sys.stdin.read()
        stopping.set()

    threading.Thread(target=follow_parent, daemon=True).start()
    at = 0
    while not stopping.is_set():
        idle = True
        for number in range(at, min(at + 2, len(phases))):  # a router may be a phase ahead
            phase = phases[number]
            for slot in range(phase.shape.ring_slots):
                lanes = phase.exchange.posted(slot)
                if not lanes:
                    continue
                idle = False
                rng.shuffle(lanes)
                phase.die_if_due(phase.exchange.header(lanes[0], slot)[Header.STEP])
                pause(rng)
                serve(phase.exchange, slot, lanes, held)
                phase.messages += len(lanes)
        if idle:
            time.sleep(3e-3)
        if at < len(phases) and phases[at].complete():
            at += 1
    for phase in phases:
        phase.note_lost()
        if phase.doomed:
            phase.exchange.limit_ns = 1
            silent = [int(name.removeprefix("router")) for name in sorted(phase.doomed)]
            phase.exchange.receive(0, silent, held)
            phase.note_lost()


def run_router_rank(phases: list[Phase], rng: random.Random) -> None:
    numbers = torch.Generator().manual_seed(rng.getrandbits(32))
    for phase in phases:
        for number in range(phase.rounds):
            run_round(phase, number, rng, numbers)


def run_round(phase: Phase, number: int, rng: random.Random, numbers: torch.Generator) -> None:
    shape, exchange = phase.shape, phase.exchange
    batches = []
    for slot in range(shape.ring_slots):
        tokens = rng.choice([0, 1, 2, shape.capacity_tokens])
        x = torch.randn(tokens, shape.hidden, generator=numbers)
        pairs = random_pairs(tokens, shape.top_k, shape.experts, numbers)
        exchange.set_stamp(number, number // 10)
        exchange.dispatch(slot, x, pairs, number % 3)
        batches.append((slot, x, pairs))
        pause(rng)
    phase.die_if_due(number)
    for slot, x, pairs in batches:
        out, missing = exchange.combine(slot)
        phase.note_lost()
        closed = [int(name.removeprefix("expert")) for name in phase.lost]
        cut = torch.isin(pairs.rank, torch.tensor(closed, dtype=torch.int32))
        assert missing.tolist() == cut.any(1).int().tolist()
        wanted = exchanged(
            x,
            torch.where(cut, -1, pairs.rank),
            pairs.expert,
            pairs.weight,
            run_expert,
            shape.wire,
            shape.back,
            exact=shape.exact,
        )
        torch.testing.assert_close(
            out, wanted, rtol=1e-2 if shape.back is Wire.BF16 else 1e-5, atol=1e-4
        )
        phase.messages += len(exchange.open_lanes())


def pause(rng: random.Random) -> None:
    if rng.random() < 0.1:
        time.sleep(rng.random() * 2e-3)


def main(setup: dict[str, Any]) -> None:
    rng = random.Random(setup["seed"])
    phases = [Phase(phase, setup["role"], setup["index"]) for phase in setup["phases"]]
    if setup["role"] == "router":
        run_router_rank(phases, rng)
    else:
        run_expert_rank(phases, setup["index"], rng)
    print(json.dumps([phase.result() for phase in phases]), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Its check of every sum and product for overflow is a third of the interpreter's time.
    interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
    with torch.inference_mode():
        main(json.loads(sys.argv[1]))
