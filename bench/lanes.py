"""Round trip and bandwidth of the lanes between real processes, in shared memory and over TCP.

    python bench/lanes.py [--plane shm,tcp] [--experts 2] [--tokens 1,256] [--hidden 192]
                          [--spin-us 30] [--busy] [--work-us 0] [--rounds 2000]

One router sends a part to every expert worker and waits for all answers: that is one round, as in
a decode step's layer. ``--work-us`` makes each expert worker compute that long before it answers.
``--busy`` puts one busy process on each core. Prints one JSON object a line: microseconds from
the first send to the last answer (p50, p99), what a send and a poll cost the router, and the bytes
of activations that went out and came back a second; then how the planes compare. TCP goes over the
loopback interface, which is the network at its best: a real one adds its own delay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from ep_kernels.plane import AnswerStatus, LaneShape, PairBlock, Part
from ep_kernels.shm import ShmExpertPlane
from ep_kernels.tcp import TcpExpertPlane, TcpRouterPlane

TOP_K = 4
KEY = bytes(range(32))
TIMEOUT_S = 20.0


def open_plane(kind: str, path: str, hidden: int, spin_us: int) -> tuple[ShmExpertPlane, str]:
    """An expert worker's plane and the address of its lanes."""
    name, spin_ns = Path(path).name, spin_us * 1000
    if kind == "shm":
        return ShmExpertPlane(name, 1, path, hidden, "bench", spin_ns=spin_ns), path
    plane = TcpExpertPlane(name, 1, "", hidden, "bench", host="127.0.0.1", key=KEY, spin_ns=spin_ns)
    return plane, f"tcp://127.0.0.1:{plane.port}#{KEY.hex()}"


def expert(kind: str, path: str, hidden: int, spin_us: int, work_us: int, up: Connection) -> None:
    """Echo every part after ``work_us`` of computing, until the parent closes the pipe."""
    torch.set_num_threads(1)
    plane, address = open_plane(kind, path, hidden, spin_us)
    up.send(address)
    while not up.poll():
        plane.wait(0.2)
        for arrival in plane.poll():
            deadline = time.perf_counter_ns() + work_us * 1000
            arrival.out.copy_(arrival.x)
            while time.perf_counter_ns() < deadline:
                pass
            plane.answer(arrival, AnswerStatus.OK, 7, 0)
    plane.close()


def burn(up: Connection) -> None:
    """Keep one core busy until the parent closes the pipe."""
    up.send("ready")
    while not up.poll():
        sum(range(10_000))


def measure(
    plane: TcpRouterPlane, names: list[str], part: Part, rounds: int
) -> dict[str, float | int]:
    trips, sends, polls = [], [], []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        for name in names:
            plane.try_send(name, part)
        sent = time.perf_counter_ns()
        missing = len(names)
        while missing:
            plane.wait(TIMEOUT_S)
            before = time.perf_counter_ns()
            answers = plane.poll()
            after = time.perf_counter_ns()
            for answer in answers:
                plane.release(answer)
            missing -= len(answers)
            polls.append(after - before)
            if lost := plane.lost():
                raise lost[0]
        trips.append(time.perf_counter_ns() - begin)
        sends.append((sent - begin) / len(names))
    trips.sort()
    return {
        "trip_p50_us": round(trips[rounds // 2] / 1000, 1),
        "trip_p90_us": round(trips[rounds * 9 // 10] / 1000, 1),
        "trip_p99_us": round(trips[rounds * 99 // 100] / 1000, 1),
        "send_us": round(statistics.median(sends) / 1000, 1),
        "poll_us": round(statistics.median(polls) / 1000, 1),
        "mb_per_s": round(2 * len(names) * part.x.nbytes / (trips[rounds // 2] / 1000), 1),
    }


def run(
    args: argparse.Namespace, kind: str, tokens: int, spin_us: int, run_dir: str
) -> dict[str, float | int]:
    names = [f"e{i}" for i in range(args.experts)]
    context = multiprocessing.get_context("spawn")
    children: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def start(target: object, *arguments: object) -> None:
        mine, theirs = context.Pipe()
        child = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        child.start()
        theirs.close()
        children.append((child, mine))

    for name in names:
        start(expert, kind, str(Path(run_dir, name)), args.hidden, spin_us, args.work_us)
    for _ in range(os.cpu_count() or 1 if args.busy else 0):
        start(burn)
    plane = TcpRouterPlane(
        "r0",
        1,
        LaneShape(args.hidden, TOP_K, max(16, tokens), 4),
        "bench",
        spin_ns=spin_us * 1000,
    )
    try:
        said = []
        for _, pipe in children:
            if not pipe.poll(60):
                raise TimeoutError("a child did not start within 60 s")
            said.append(pipe.recv())
        for name, address in zip(names, said, strict=False):
            plane.connect(name, address, 1, 5.0)
        pair_token = np.repeat(np.arange(tokens, dtype=np.int32), 2)
        weight = np.ones(pair_token.size, np.float32)
        rows = np.arange(tokens, dtype=np.int32)
        block = PairBlock.of(rows, pair_token, pair_token, pair_token, weight)
        part = Part(0, 0, 0, torch.randn(tokens, args.hidden), block)
        measure(plane, names, part, args.rounds // 10)
        return measure(plane, names, part, args.rounds)
    finally:
        plane.close()
        for child, pipe in children:
            pipe.close()
            child.join(10)
            if child.is_alive():
                child.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=2)
    parser.add_argument("--plane", default="shm,tcp", help="comma-separated variants")
    parser.add_argument("--tokens", default="1,256", help="comma-separated variants")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--spin-us", default="30", help="comma-separated variants")
    parser.add_argument("--work-us", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--busy", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    varied = ("plane", "tokens", "spin_us", "rounds")
    fixed = {key: value for key, value in vars(args).items() if key not in varied}
    for tokens, spin_us in itertools.product(
        map(int, args.tokens.split(",")), map(int, args.spin_us.split(","))
    ):
        results = {}
        for kind in args.plane.split(","):
            with tempfile.TemporaryDirectory() as run_dir, torch.inference_mode():
                results[kind] = run(args, kind, tokens, spin_us, run_dir)
            shown = {"plane": kind, "tokens": tokens, **fixed, "spin_us": spin_us}
            print(json.dumps(shown | results[kind]), flush=True)
        if {"shm", "tcp"} <= results.keys():
            shm, tcp = results["shm"], results["tcp"]
            ratios = {
                f"tcp_to_shm_{key}": round(tcp[key] / shm[key], 2)
                for key in ("trip_p50_us", "trip_p99_us", "mb_per_s")
            }
            print(json.dumps({"tokens": tokens, "spin_us": spin_us} | ratios), flush=True)


if __name__ == "__main__":
    main()
