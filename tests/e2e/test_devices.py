"""A mesh whose processes compute by the GPU's kernels, in Triton's interpreter, gives
transformers' tokens, also when experts have moved from one device to another.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from mesh.processes import has_ended
from tests.e2e.test_oracle import mesh_model
from tests.support.checkpoints import VARIANTS, write
from tests.support.fp8 import Fp8Oracle, write_fp8
from tests.support.meshes import Mesh
from tests.support.oracle import Continuation, Oracle

STEPS = 4
TOLERANCE = 0.1
"""Of a log-probability: weights, rows and cache are bf16, and the model's head is not scaled."""

FP8_TOLERANCE = 1e-3
"""Where both round to bf16 and e4m3 by one rule at the same places: it is some 2e-6, unless a sum
in another order takes a value to its neighbour in e4m3."""


def decided(oracle: Oracle, count: int) -> list[tuple[list[int], Continuation]]:
    """Prompts whose greedy tokens lead by more than bf16 could take away."""
    rng, found = random.Random(3), []
    while len(found) < count:
        prompt = [rng.randrange(8, 380) for _ in range(rng.choice((2, 7)))]
        wanted = oracle.greedy(prompt, STEPS)
        best = wanted.logprobs.topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) > 2 * TOLERANCE:
            found.append((prompt, wanted))
    return found


def check(
    mesh: Mesh,
    tokenizer: Tokenizer,
    prompt: list[int],
    wanted: Continuation,
    tolerance: float = TOLERANCE,
) -> None:
    body: Any
    status, body = mesh.post(
        "/v1/completions",
        {"model": mesh_model(mesh), "prompt": prompt, "max_tokens": STEPS, "temperature": 0,
         "logprobs": 1, "ignore_eos": True},
    )  # fmt: skip
    assert status == 200, body
    choice = body["choices"][0]
    assert choice["text"] == tokenizer.decode(wanted.tokens, skip_special_tokens=True)
    got = choice["logprobs"]["token_logprobs"]
    for step, token in enumerate(wanted.tokens):
        assert abs(got[step] - float(wanted.logprobs[step][token])) < tolerance, step


def loaded(mesh: Mesh, worker: str) -> list[dict[str, Any]]:
    """What the worker has logged of its assignments."""
    lines = (mesh.run_dir / "logs" / f"{worker}.log").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return [event for event in events if event["event"] == "slots.loaded"]


def test_experts_on_devices_give_transformers_tokens_before_and_after_a_move(
    checkpoints: Path,
) -> None:
    family, config = VARIANTS["deepseek"]
    # Keys are split by the longest context, and the interpreter runs each share's program.
    path = write(checkpoints / "short", family, config | {"max_position_embeddings": 96})
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    cases = decided(Oracle(path), 2)
    with Mesh(path, experts=2, router__device="interpreter", expert__device="interpreter") as mesh:
        for prompt, wanted in cases:
            check(mesh, tokenizer, prompt, wanted)
        mesh.run("drain", "expert-1")
        mesh.wait_for(
            lambda: any(event["from_peers"] for event in loaded(mesh, "expert-0")),
            "expert-0 to take expert-1's experts from its device",
            60.0,
        )
        for prompt, wanted in cases:
            check(mesh, tokenizer, prompt, wanted)
        assert all(event["faults"] == 0 for event in loaded(mesh, "expert-0"))


def test_an_fp8_checkpoint_is_served_as_it_is_before_and_after_a_move(checkpoints: Path) -> None:
    path, twin = write_fp8(checkpoints / "short-fp8")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    cases = decided(Fp8Oracle(twin), 1)
    expert_bytes = 3 * (128 * 128 + 4)  # a byte a weight, and a scale for each block
    # The router computes in fp32, so that nothing but the order of sums differs from the reference;
    # without its rounding of activations that would be off by some hundredths.
    with Mesh(
        path,
        experts=2,
        router__device="interpreter",
        model__weights="fp32",
        expert__device="interpreter",
        expert__weights="fp8",
    ) as mesh:
        for prompt, wanted in cases:
            check(mesh, tokenizer, prompt, wanted, FP8_TOLERANCE)
        mesh.run("drain", "expert-1")
        mesh.wait_for(
            lambda: any(event["from_peers"] for event in loaded(mesh, "expert-0")),
            "expert-0 to take expert-1's experts from its device",
            60.0,
        )
        for prompt, wanted in cases:
            check(mesh, tokenizer, prompt, wanted, FP8_TOLERANCE)
        events = loaded(mesh, "expert-0")
        assert all(event["faults"] == 0 for event in events)
        assert events[0]["loaded_bytes"] == events[0]["experts"] * expert_bytes


def test_a_router_of_two_devices_gives_transformers_tokens_and_ends_with_each(
    checkpoints: Path,
) -> None:
    family, config = VARIANTS["deepseek"]
    path = write(checkpoints / "short", family, config | {"max_position_embeddings": 96})
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    with Mesh(
        path, experts=1, router__device="interpreter", router__tp=2, model__weights="fp32"
    ) as mesh:
        for prompt, wanted in decided(Oracle(path), 1):
            check(mesh, tokenizer, prompt, wanted, 1e-4)
        (router,) = mesh.members("router")
        (follower,) = router["group"]
        os.kill(follower, signal.SIGKILL)
        mesh.wait_for(lambda: has_ended(router["pid"]), "its leader to end")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
@pytest.mark.parametrize("role", ["router", "expert"])
def test_a_service_whose_device_is_not_there_ends_at_start_and_says_so(
    role: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", f"{role}_svc", "--id", f"{role}-0"]
    settings = [f"mesh.run_dir={tmp_path}", f"{role}.device=cuda", "logs.format=json"]
    done = subprocess.run(
        [*command, *(word for one in settings for word in ("--set", one))],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    last = json.loads((done.stdout + done.stderr).strip().splitlines()[-1])
    assert last["event"] == "service.cannot_serve"
    assert last["reason"].startswith("device 'cuda' cannot be used: torch")
