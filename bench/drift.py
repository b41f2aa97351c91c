"""Traffic whose topics drift, on meshes that differ in how they place experts.

    python bench/drift.py --seconds 240 --repeat 2 --out drift.json --plot docs/images/drift.svg
    python bench/drift.py --draw drift.json --plot docs/images/drift.svg

Starts a mesh of its own for each policy, one after another, and gives all the same requests at the
same moments of the run. ``off`` never moves an expert, ``global`` is DeepSeek's EPLB, ``mesh`` is
the default. Rounds rotate the order, because absolute rates drift with the machine; ratios are to
``off`` of the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drift_plot import draw
from topics import prompt

from compose.load import Stream, stream

POLICIES: dict[str, dict[str, str]] = {
    "off": {"planner.mode": "off"},
    "global": {"planner.mode": "auto", "planner.policy": "global"},
    "mesh": {"planner.mode": "auto", "planner.policy": "mesh"},
}
MODEL = "demo"
START_S = 120.0
SAMPLE_S = 2.0
BIN_S = 5.0
STALL_MS = 250.0
LEAST_PAIRS = 4_000
"""Of a layer; with fewer, chance moves the balancedness of three ranks by more than 0.02."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", default="off,global,mesh")
    parser.add_argument("--seconds", type=float, default=240.0, help="length of each run")
    parser.add_argument("--repeat", type=int, default=1, help="rounds")
    parser.add_argument("--streams", type=int, default=16, help="clients, each busy all the time")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each request makes")
    parser.add_argument("--experts", type=int, default=3, help="expert workers")
    parser.add_argument("--redundant", type=int, default=4, help="planner.redundant_slots")
    parser.add_argument("--window", type=float, default=20.0, help="planner.window_s")
    parser.add_argument("--interval", type=float, default=5.0, help="planner.interval_s")
    parser.add_argument("--set", action="append", default=[], help="any other section.key=value")
    parser.add_argument("--out", type=Path, help="write the measurements as JSON")
    parser.add_argument("--plot", type=Path, help="write a plot as SVG")
    parser.add_argument("--draw", type=Path, help="measure nothing: plot this file of --out")
    arguments = parser.parse_args()
    if arguments.draw:
        result = json.loads(arguments.draw.read_text())
    else:
        result = measure(arguments)
        if arguments.out:
            arguments.out.write_text(json.dumps(result))
    print(table(result))
    if arguments.plot:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        arguments.plot.write_text(draw(result))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    policies = arguments.policies.split(",")
    runs = []
    for round_ in range(arguments.repeat):
        turn = round_ % len(policies)
        for policy in policies[turn:] + policies[:turn]:
            settings = POLICIES[policy] | {
                "model.name": MODEL,
                "mesh.experts": str(arguments.experts),
                "planner.redundant_slots": str(arguments.redundant),
                "planner.window_s": str(arguments.window),
                "planner.interval_s": str(arguments.interval),
                "router.max_running": str(max(arguments.streams, 16)),
            }
            settings |= dict(item.split("=", 1) for item in arguments.set)
            with running_mesh(settings) as url:
                run = asyncio.run(one_run(url, arguments, seed=round_))
            runs.append({"policy": policy, "round": round_} | run)
            print(f"round {round_}, {policy}: {json.dumps(run['summary'])}", flush=True)
    kept = ("seconds", "streams", "tokens", "experts", "redundant", "window", "interval", "repeat")
    return {"settings": {name: getattr(arguments, name) for name in kept}, "runs": runs}


@contextmanager
def running_mesh(settings: dict[str, str]) -> Iterator[str]:
    """URL of a mesh of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="drift-") as home:
        settings = settings | {"mesh.run_dir": f"{home}/run", "mesh.state_dir": f"{home}/state"}
        command = [str(Path(sys.executable).with_name("moemesh")), "up", "--port", str(port)]
        command += [part for item in settings.items() for part in ("--set", "=".join(item))]
        log = Path(home) / "log"
        with log.open("wb") as output:
            launcher = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            end = time.monotonic() + START_S
            while not _ready(url):
                if launcher.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the mesh did not start:\n{log.read_text()}")
                time.sleep(0.2)
            yield url
        finally:
            launcher.send_signal(signal.SIGINT)
            launcher.wait(60)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5):
            return True
    except (urllib.error.HTTPError, OSError):
        return False


async def one_run(url: str, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Samples, token rates and a summary of one policy's run."""
    seconds = arguments.seconds
    began = time.perf_counter()
    streams: list[Stream] = []

    async def client(index: int) -> None:
        rng = random.Random(seed * 1000 + index)
        while (passed := time.perf_counter() - began) < seconds:
            body = {
                "model": MODEL,
                "prompt": prompt(rng, passed / seconds),
                "max_tokens": arguments.tokens,
                "min_tokens": arguments.tokens,
                "ignore_eos": True,
                "temperature": 0.7,
                "top_p": 0.95,
                "seed": rng.getrandbits(31),
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            streams.append(await stream(url, body))

    async with asyncio.timeout(seconds + 120), asyncio.TaskGroup() as tasks:
        for index in range(arguments.streams):
            tasks.create_task(client(index))
        samples = await watch(url, began, seconds)
    bins = [0.0] * int(seconds / BIN_S)
    for one in streams:
        for arrival in one.arrivals:
            if (index := int((arrival - began) / BIN_S)) < len(bins):
                bins[index] += one.tokens / len(one.arrivals) / BIN_S
    return {
        "summary": summary(streams, samples, seconds, arguments.window),
        "samples": samples,
        "tokens_per_s": [round(rate, 1) for rate in bins],
    }


async def watch(url: str, began: float, seconds: float) -> list[dict[str, Any]]:
    """What the planner says, every ``SAMPLE_S``."""
    samples: list[dict[str, Any]] = []
    before: set[tuple[int, int, int]] = set()
    balance = 1.0
    while (passed := time.perf_counter() - began) < seconds:
        load, plan, placement = [
            await asyncio.to_thread(_get, f"{url}/admin/{page}")
            for page in ("load", "plan", "placement")
        ]
        held = _held(placement)
        balance = _balancedness(load["rank_tokens"]) or balance
        samples.append(
            {
                "at": round(passed, 2),
                "balancedness": balance,
                "epoch": plan["epoch"],
                "loaded": len(held - before) if before else 0,
                "phase": plan["phase"],
                "verdict": plan["verdict"],
                "faults": len(plan["faults"]),
            }
        )
        before = held
        await asyncio.sleep(SAMPLE_S - (time.perf_counter() - began) % SAMPLE_S)
    return samples


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.loads(answer.read())


def _held(placement: dict[str, Any]) -> set[tuple[int, int, int]]:
    """(layer, rank, expert) of each serving slot."""
    ends = list(itertools.accumulate(placement["slots_per_rank"], initial=0))
    return {
        (layer, rank, expert)
        for layer, row in enumerate(placement["physical_to_logical"])
        for rank, (first, last) in enumerate(itertools.pairwise(ends))
        for expert in row[first:last]
        if expert >= 0
    }


def _balancedness(rank_tokens: list[list[int]]) -> float | None:
    """Mean over ranks / max over ranks, as sent, mean over layers. None: too few for a figure,
    because the planner counts anew with each placement.
    """
    if not rank_tokens or sum(rank_tokens[0]) < LEAST_PAIRS:
        return None
    return statistics.fmean(statistics.fmean(row) / max(row) for row in rank_tokens)


def summary(
    streams: list[Stream], samples: list[dict[str, Any]], seconds: float, window_s: float
) -> dict[str, float]:
    """Balance after the first window has filled; rates and latencies over the whole run."""
    gaps = sorted(
        (later - sooner) * 1e3
        for one in streams
        for sooner, later in itertools.pairwise(one.arrivals)
    )
    longest = [
        max(later - sooner for sooner, later in itertools.pairwise(one.arrivals)) * 1e3
        for one in streams
    ]
    usual = statistics.median(longest)
    balance = sorted(s["balancedness"] for s in samples if s["at"] >= window_s)
    waits = [(one.arrivals[0] - one.started) * 1e3 for one in streams]
    return {
        "balancedness": round(statistics.fmean(balance), 4),
        "balancedness_p10": round(balance[len(balance) // 10], 4),
        "tokens_per_s": round(sum(one.tokens for one in streams) / seconds, 1),
        "gap_p50_ms": round(gaps[len(gaps) // 2], 1),
        "gap_p99_ms": round(gaps[int(len(gaps) * 0.99)], 1),
        "gap_max_ms": round(gaps[-1], 1),
        "ttft_p50_ms": round(statistics.median(waits), 1),
        "requests": len(streams),
        "stalled": sum(gap > usual + STALL_MS for gap in longest),
        "experts_loaded": sum(sample["loaded"] for sample in samples),
        "epochs": samples[-1]["epoch"] - samples[0]["epoch"],
        "faults": samples[-1]["faults"],
    }


def table(result: dict[str, Any]) -> str:
    """One row a policy: medians over rounds, and ratios to ``off`` of the same round."""
    runs = result["runs"]
    off = {run["round"]: run["summary"] for run in runs if run["policy"] == "off"}
    head = "| policy | balancedness (p10) | tokens/s (to off) | gap p50, p99, max ms | "
    lines = [head + "first token ms | stalled | experts loaded |", "|---" * 7 + "|"]
    for policy in dict.fromkeys(run["policy"] for run in runs):
        mine = [run for run in runs if run["policy"] == policy]

        def median(name: str, of: list[dict[str, Any]] = mine) -> float:
            return statistics.median(run["summary"][name] for run in of)

        ratios = [
            run["summary"]["tokens_per_s"] / off[run["round"]]["tokens_per_s"]
            for run in mine
            if run["round"] in off
        ]
        ratio = f" ({statistics.median(ratios):.3f})" if ratios else ""
        lines.append(
            f"| {policy} | {median('balancedness'):.3f} ({median('balancedness_p10'):.3f}) "
            f"| {median('tokens_per_s'):.0f}{ratio} | {median('gap_p50_ms'):.0f}, "
            f"{median('gap_p99_ms'):.0f}, {median('gap_max_ms'):.0f} | {median('ttft_p50_ms'):.0f} "
            f"| {median('stalled'):.0f} of {median('requests'):.0f} "
            f"| {median('experts_loaded'):.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
