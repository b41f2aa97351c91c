"""A whole mesh with its routers and experts on the card: its tokens are the CPU's, then its rate.
So with experts in FP8, and with routers of two cards where there are two.

Over each plane: rows through host memory (``mesh``), in memory that the processes' devices share,
where a worker is killed as well (``mesh, symm``: with decode steps that the router's device goes
through by itself, and without), and through NCCL (``mesh, nccl``), which wants a GPU for the
routers and another for the expert workers.

Needs moemesh installed beside torch and Triton (``pip install '.[gpu-cu13]'``). The model is the
one that ships with the repository; ``BENCH_MODEL`` names another checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_harness import Meter

if TYPE_CHECKING:
    from tests.support.meshes import Mesh

ROOT = Path(__file__).parents[1]
# Taken out: the mesh's processes refuse a variable of that kind that names no setting.
MODEL = Path(os.environ.get("BENCH_MODEL", ROOT / "demo" / "model"))
TOLERANCE = 0.15
"""Of a log-probability of running text, for rows and cache in bf16. Of tokens that surprise the
model it would have to be several times as much.
"""
FP8_TOLERANCE = 0.3
"""The same for drawn weights, which every token surprises; what bf16 changes may go to another
neighbour in e4m3 besides. Wrong weights put a log-probability off by ten times as much.
"""
TEXTS = (
    "Emma was not at all",
    "And it came to pass that the king said unto the people,",
    "The climate is tropical, with a rainy season from " * 4,
)
STEPS = 24
SEEDS = 2
"""Draws of ``STEPS`` tokens at temperature 1 for each text."""
RATE_CLIENTS, RATE_TOKENS = 32, 64
KILLED_AFTER_S = 0.3


def draws(meter: Meter, device: str = "cuda", vocab: int = 129280, count: int = 64) -> None:
    """The router's sampler on the card against the CPU's, over all that a request may ask for."""
    sys.path.insert(0, str(ROOT))
    from ep_kernels.triton.device import open_device  # noqa: PLC0415

    from moe_model.device.sampler import DeviceSampler  # noqa: PLC0415
    from moe_model.sampler import Sampler  # noqa: PLC0415
    from tests.support.draws import drawable, some_logits, some_row  # noqa: PLC0415

    card, dice = open_device(device), random.Random(torch.initial_seed())
    generator = torch.Generator().manual_seed(torch.initial_seed())
    rows = [some_row(dice, vocab) for _ in range(count)]
    logits = torch.stack([some_logits(dice, vocab, generator) for _ in rows])
    wanted, scored = Sampler(vocab).draw(logits.clone(), rows)
    sampler = DeviceSampler(vocab, card, card.settle())
    there = logits.to(card.place)
    tokens, logprobs = sampler.draw(there.clone(), rows)
    for one, row, token, ours, theirs in zip(logits, rows, tokens, logprobs, scored, strict=True):
        if token not in drawable(one, row):
            raise ValueError(f"drew {token} of {sorted(drawable(one, row))[:9]}: {row.sampling}")
        top = list(zip(ours.top, theirs.top, strict=True)) if ours and theirs else []
        if (ours is None) != (theirs is None) or any(abs(a[1] - b[1]) > 1e-4 for a, b in top):
            raise ValueError(f"log-probabilities {ours}, the CPU's are {theirs}")
    same = sum(a == b for a, b in zip(tokens, wanted, strict=True))
    check = f"{same} of {count} tokens are the CPU's, others within rounding"
    alone = [sampler.draw(there[i : i + 1].clone(), rows[i : i + 1])[0][0] for i in range(count)]
    if alone != tokens:
        raise ValueError("a row's token depends on the others in its batch")
    began, times = time.perf_counter(), 10
    for _ in range(times):
        sampler.draw(there.clone(), rows)
    took_us = (time.perf_counter() - began) / times * 1e6
    told = f"all kinds of requests, {count} rows of {vocab}, tokens on the host"
    meter.row("draws", told, took_us, "us", check=check)


def mesh(meter: Meter, device: str = "cuda") -> None:
    """Experts in bf16, rows through host memory."""
    from moe_model.reference import ReferenceModel  # noqa: PLC0415  (needs the installation)

    path = MODEL
    _serve(meter, "mesh", path, ReferenceModel(path), device)


def mesh_fp8(meter: Meter, device: str = "cuda", sizes: Mapping[str, Any] | None = None) -> None:
    """Experts in FP8, of an FP8 checkpoint with drawn weights."""
    from gpu_fp8 import SIZES, reference_of, write_pair  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        generator = torch.Generator().manual_seed(torch.initial_seed())
        small, twin = write_pair(MODEL, Path(folder), SIZES | (sizes or {}), generator)
        _serve(meter, "mesh FP8", small, reference_of(twin), device, FP8_TOLERANCE)


def mesh_tp(meter: Meter, device: str = "cuda") -> None:
    """A router of two cards."""
    from moe_model.reference import ReferenceModel  # noqa: PLC0415

    if device == "cuda" and torch.cuda.device_count() < 2:
        print("mesh TP: not run, it needs two GPUs", file=sys.stderr)
        return
    path = MODEL
    _serve(meter, "mesh TP", path, ReferenceModel(path), device, router__tp=2)


def over_symm(meter: Meter, device: str = "cuda") -> None:
    from moe_model.reference import ReferenceModel  # noqa: PLC0415

    reference = ReferenceModel(MODEL)
    symm: dict[str, Any] = {"network__data_plane": "symm"}
    by_host = "mesh, symm, steps by the host"
    _serve(meter, by_host, MODEL, reference, device, **symm, router__ahead="off")
    _serve(meter, "mesh, symm", MODEL, reference, device, kill=True, **symm, router__ahead="on")
    if torch.cuda.device_count() < 2:
        return
    # What it is made for: kernels that wait do not keep the experts' from their GPU.
    symm |= {"router__device": "cuda:0", "expert__device": "cuda:1"}
    _serve(meter, f"{by_host}, two GPUs", MODEL, reference, device, **symm, router__ahead="off")
    _serve(meter, "mesh, symm, two GPUs", MODEL, reference, device, kill=True, **symm)


def over_nccl(meter: Meter) -> None:
    from moe_model.reference import ReferenceModel  # noqa: PLC0415

    gpus = torch.cuda.device_count()
    if gpus < 2:
        meter.row("mesh, nccl", "not tried: it wants two GPUs", gpus, "GPUs")
        return
    _serve(
        meter,
        "mesh, nccl",
        MODEL,
        ReferenceModel(MODEL),
        "cuda:0",
        kill=True,
        expert__device="cuda:1",
        network__data_plane="nccl",
        network__listen="127.0.0.1",
    )


def _serve(
    meter: Meter,
    section: str,
    path: Path,
    reference: Any,
    device: str,
    tolerance: float = TOLERANCE,
    *,
    kill: bool = False,
    **settings: Any,
) -> None:
    """Start a mesh, compare its tokens with the reference's, and measure its rate; with ``kill``
    once more while a worker is killed.
    """
    sys.path.insert(0, str(ROOT))
    from tokenizers import Tokenizer  # noqa: PLC0415

    from tests.support.meshes import Mesh  # noqa: PLC0415

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    prompts = [list(tokenizer.encode(text).ids) for text in TEXTS]
    settings = {"router__device": device, "expert__device": device} | settings
    with Mesh(path, experts=2, **settings) as running:
        worst = max(_off(running, reference, path.name, one, tolerance) for one in prompts)
        if worst > tolerance:
            raise ValueError(f"log-probabilities are off by {worst:.3f}, allowed {tolerance}")
        check = f"log-probabilities {worst:.0e}"
        alone = _rate(running, path.name, 1)
        meter.row(section, "decode, one stream", alone, "tokens/s", check=check)
        many = _rate(running, path.name, RATE_CLIENTS)
        meter.row(section, f"decode, {RATE_CLIENTS} streams", many, "tokens/s", check=check)
        if settings.get("network__data_plane") == "symm":
            _steps(
                meter, section, running, path.name, wanted=settings.get("router__ahead") != "off"
            )
        if not kill:
            return
        pid = next(m["pid"] for m in running.members("expert") if m["id"] == "expert-1")
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(_rate, running, path.name, RATE_CLIENTS)
            time.sleep(KILLED_AFTER_S)
            os.kill(pid, signal.SIGKILL)
            rate = under_way.result()
        worst = max(_off(running, reference, path.name, one, tolerance) for one in prompts)
        if worst > tolerance:
            raise ValueError(f"after a death log-probabilities are off by {worst:.3f}")
        log = (running.run_dir / "logs" / "router-0.log").read_text()
        lost = {line["peer"] for line in map(_event, log.splitlines()) if "lost" in line["event"]}
        if lost != {"expert-1"}:
            raise ValueError(f"lanes lost to {sorted(lost)}, and expert-1 was killed")
        what = f"decode, {RATE_CLIENTS} streams, a worker killed meanwhile"
        meter.row(section, what, rate, "tokens/s", check=f"log-probabilities {worst:.0e}")


def _steps(meter: Meter, section: str, running: Mesh, model: str, *, wanted: bool) -> None:
    """How long a step of one stream takes the router, and whether its device went through them by
    itself as ``wanted``.
    """
    before = _figures(running)
    _rate(running, model, 1)
    figures = {name: value - before.get(name, 0.0) for name, value in _figures(running).items()}
    steps, ahead, again = (
        figures[f"moemesh_router_{name}_total"] for name in ("steps", "steps_ahead", "steps_again")
    )
    share = ahead / steps
    if again > steps / 4 or (share < 0.5 if wanted else ahead):
        log = (running.run_dir / "logs" / "router-0.log").read_text()
        why = [line for line in map(_event, log.splitlines()) if "ahead" in line["event"]]
        raise ValueError(f"of {steps:.0f} steps {ahead:.0f} went ahead, {again:.0f} twice: {why}")
    took_ms = 1e3 * figures["moemesh_router_thread_seconds_total"] / steps
    check = f"{100 * share:.0f} % ahead, {again:.0f} again"
    meter.row(section, "step of one stream, the compute thread", took_ms, "ms", check=check)


def _figures(running: Mesh) -> dict[str, float]:
    """The router's counters, each summed over its labels."""
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    found: dict[str, float] = {}
    (router,) = running.members("router")
    with urllib.request.urlopen(router["metrics"], timeout=10) as page:
        for family in text_string_to_metric_families(page.read().decode()):
            for name, _labels, value, *_ in family.samples:
                found[name] = found.get(name, 0.0) + value
    return found


def _event(line: str) -> dict[str, str]:
    return {"event": "", **json.loads(line)} if line.startswith("{") else {"event": ""}


def _ask(running: Mesh, model: str, prompt: list[int], **options: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "temperature": 0, "ignore_eos": True, **options}
    status, answer = running.post("/v1/completions", body)
    if status != 200:
        raise RuntimeError(f"{status}: {answer}")
    return dict(answer["choices"][0])


def _off(running: Mesh, reference: Any, model: str, prompt: list[int], tolerance: float) -> float:
    """How far the mesh's log-probabilities are from the reference's at most: the prompt's own,
    those of greedy tokens for as long as bf16 cannot have changed which they are, and those of
    tokens that seeds draw, wherever it cannot.
    """
    options = {"max_tokens": STEPS, "logprobs": 1, "echo": True}
    got = _ask(running, model, prompt, **options)["logprobs"]["token_logprobs"]
    tokens = [*prompt, *reference.generate(prompt, STEPS, ignore_eos=True)]
    rows = reference.logits(tokens).log_softmax(-1)
    worst = 0.0
    for position in range(1, len(tokens)):
        row = rows[position - 1]
        best = row.topk(2).values
        if position >= len(prompt) and float(best[0] - best[1]) < 2 * tolerance:
            break
        worst = max(worst, abs(got[position] - float(row[tokens[position]])))
    return max(worst, *(_off_drawn(running, reference, model, prompt, tolerance, seed)
                        for seed in range(SEEDS)))  # fmt: skip


def _off_drawn(
    running: Mesh, reference: Any, model: str, prompt: list[int], tolerance: float, seed: int
) -> float:
    """The same of what ``seed`` draws at temperature 1, each after the reference's tokens."""
    from mesh.messages import Sampling  # noqa: PLC0415
    from tests.support.draws import Row, drawable  # noqa: PLC0415

    sampling = Sampling(seed=seed)
    tokens = [*prompt, *reference.generate(prompt, STEPS, sampling=sampling, ignore_eos=True)]
    rows = reference.logits(tokens).log_softmax(-1)
    worst = 0.0
    for position in range(len(prompt), len(tokens)):
        row, before = rows[position - 1], tokens[:position]
        # Logits that are off by as much move no cumulative sum by more than half of it.
        if len(drawable(row, Row(before, len(prompt), sampling), tolerance / 2)) > 1:
            continue
        # All of it, since a checkpoint may recommend other values than the neutral ones.
        options = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
        options |= {"max_tokens": 1, "logprobs": 1, "seed": seed}
        (got,) = _ask(running, model, before, **options)["logprobs"]["token_logprobs"]
        worst = max(worst, abs(got - float(row[tokens[position]])))
    return worst


def _rate(running: Mesh, model: str, clients: int) -> float:
    """Tokens a second of all clients together."""
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(
            pool.map(
                lambda i: _ask(running, model, [8 + i, 9, 10], max_tokens=RATE_TOKENS),
                range(clients),
            )
        )
    return clients * RATE_TOKENS / (time.perf_counter() - began)


SECTIONS = {
    "draws": draws,
    "mesh": mesh,
    "mesh FP8": mesh_fp8,
    "mesh TP": mesh_tp,
    "mesh, symm": over_symm,
    "mesh, nccl": over_nccl,
}
