"""A mesh whose processes compute by the GPU's kernels, in Triton's interpreter, gives
transformers' tokens, also when experts have moved from one device to another, and where the rows
of its lanes stay on the devices.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from mesh.messages import Sampling
from mesh.processes import has_ended
from moe_model.reference import ReferenceModel
from tests.e2e.test_oracle import mesh_model
from tests.support.checkpoints import VARIANTS, write
from tests.support.draws import Row, drawable
from tests.support.fp8 import Fp8Oracle, write_fp8
from tests.support.meshes import Mesh
from tests.support.oracle import Continuation, Oracle

PATIENT = {
    # Deaths show by the connection; who interprets kernels on a busy machine is not dead.
    "network__lane_silence_ms": "120000",
    "planner__suspect_after_ms": "60000",
    "planner__dead_after_ms": "120000",
}
GLOO = {"network__data_plane": "gloo", "network__listen": "127.0.0.1"}
SYMM = {"network__data_plane": "symm"}
STEPS = 3
"""A prompt and two single tokens: to the interpreter a token is work for a second."""
MORE_STEPS = 6
"""Of an answer that is on its way for long enough to kill somebody meanwhile."""
DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "frequency_penalty": 1.5},
)
TOLERANCE = 0.1
"""Of a log-probability: weights, rows and cache are bf16, and the model's head is not scaled."""

FP8_TOLERANCE = 1e-3
"""Where both round to bf16 and e4m3 by one rule at the same places: it is some 2e-6, unless a sum
in another order takes a value to its neighbour in e4m3."""


def decided(oracle: Oracle, *lengths: int) -> list[tuple[list[int], Continuation]]:
    """Prompts of ``lengths`` whose greedy tokens lead by more than bf16 could take away."""
    rng, found = random.Random(3), []
    while len(found) < len(lengths):
        prompt = [rng.randrange(8, 380) for _ in range(lengths[len(found)])]
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
    *,
    steps: int = STEPS,
    scored: bool = True,
    **options: Any,
) -> None:
    """The first ``STEPS`` tokens of ``steps`` are the wanted ones, by their log-probabilities as
    well if they are to be ``scored``; ``options`` of the request.
    """
    body: Any
    status, body = mesh.post(
        "/v1/completions",
        {"model": mesh_model(mesh), "prompt": prompt, "max_tokens": steps, "temperature": 0,
         "logprobs": 1 if scored else None, "ignore_eos": True, **options},
        timeout_s=480.0,
    )  # fmt: skip
    assert status == 200, body
    choice = body["choices"][0]
    text = tokenizer.decode(wanted.tokens, skip_special_tokens=True)
    assert choice["text"] == text if steps == STEPS else choice["text"].startswith(text)
    if not scored:
        return
    got = choice["logprobs"]["token_logprobs"]
    assert len(got) == steps
    for step, token in enumerate(wanted.tokens):
        assert abs(got[step] - float(wanted.logprobs[step][token])) < tolerance, step


def seeded(path: Path, *samplings: dict[str, Any]) -> list[tuple[dict[str, Any], Continuation]]:
    """For each of ``samplings`` a request with a seed, and what the CPU's sampler draws for it: a
    seed whose draws no rounding of logits can change.
    """
    reference, found = ReferenceModel(path, weights="fp32"), []
    for options in samplings:
        for seed in range(100):
            prompt = [8 + seed, 9, 10]
            sampling = Sampling(seed=seed, **options)
            tokens = list(reference.generate(prompt, STEPS, sampling=sampling, ignore_eos=True))
            rows = reference.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
            befores = [[*prompt, *tokens[:step]] for step in range(STEPS)]
            if all(
                drawable(row, Row(before, len(prompt), sampling), 1e-3) == {token}
                for row, before, token in zip(rows, befores, tokens, strict=True)
            ):
                request = {"prompt": prompt, "seed": seed, **options}
                found.append((request, Continuation(tokens, rows.log_softmax(-1))))
                break
    assert len(found) == len(samplings)
    return found


def loaded(mesh: Mesh, worker: str) -> list[dict[str, Any]]:
    """What the worker has logged of its assignments."""
    log = (mesh.run_dir / "logs" / f"{worker}.log").read_text()
    return [event for event in events_of(log) if event["event"] == "slots.loaded"]


def events_of(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def short(checkpoints: Path) -> Path:
    family, config = VARIANTS["deepseek"]
    # Keys are split by the longest context, and the interpreter runs each share's program.
    return write(checkpoints / "short", family, config | {"max_position_embeddings": 96})


@pytest.fixture(scope="module")
def cases(short: Path) -> list[tuple[list[int], Continuation]]:
    return decided(Oracle(short), 2, 7)


def test_experts_on_devices_give_transformers_tokens_before_and_after_a_move(
    short: Path, cases: list[tuple[list[int], Continuation]]
) -> None:
    tokenizer = Tokenizer.from_file(str(short / "tokenizer.json"))
    with Mesh(
        short, experts=2, router__device="interpreter", expert__device="interpreter", **PATIENT
    ) as mesh:
        check(mesh, tokenizer, *cases[1])
        mesh.run("drain", "expert-1")
        mesh.wait_for(
            lambda: any(event["from_peers"] for event in loaded(mesh, "expert-0")),
            "expert-0 to take expert-1's experts from its device",
        )
        check(mesh, tokenizer, *cases[1])
        assert all(event["faults"] == 0 for event in loaded(mesh, "expert-0"))


def test_an_fp8_checkpoint_is_served_as_it_is_before_and_after_a_move(checkpoints: Path) -> None:
    path, twin = write_fp8(checkpoints / "short-fp8")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    (case,) = decided(Fp8Oracle(twin), 7)
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
        **PATIENT,
    ) as mesh:
        check(mesh, tokenizer, *case, FP8_TOLERANCE)
        mesh.run("drain", "expert-1")
        mesh.wait_for(
            lambda: any(event["from_peers"] for event in loaded(mesh, "expert-0")),
            "expert-0 to take expert-1's experts from its device",
        )
        check(mesh, tokenizer, *case, FP8_TOLERANCE)
        events = loaded(mesh, "expert-0")
        assert all(event["faults"] == 0 for event in events)
        assert events[0]["loaded_bytes"] == events[0]["experts"] * expert_bytes


def test_a_router_of_two_devices_gives_transformers_tokens_and_ends_with_each(
    short: Path, cases: list[tuple[list[int], Continuation]]
) -> None:
    tokenizer = Tokenizer.from_file(str(short / "tokenizer.json"))
    with Mesh(
        short, experts=1, router__device="interpreter", router__tp=2, model__weights="fp32",
        **PATIENT,
    ) as mesh:  # fmt: skip
        check(mesh, tokenizer, *cases[0], 1e-4)
        for request, wanted in seeded(short, *DRAWS):
            check(mesh, tokenizer, wanted=wanted, tolerance=1e-4, **request)
        (router,) = mesh.members("router")
        (follower,) = router["group"]
        os.kill(follower, signal.SIGKILL)
        mesh.wait_for(lambda: has_ended(router["pid"]), "its leader to end")


def figures(mesh: Mesh, role: str) -> dict[str, float]:
    """Sums over the processes of a role, by metric and direction."""
    found: dict[str, float] = defaultdict(float)
    for member in mesh.members(role):
        with urllib.request.urlopen(member["metrics"], timeout=10) as page:
            for family in text_string_to_metric_families(page.read().decode()):
                for name, labels, value, *_ in family.samples:
                    found[name.removeprefix("moemesh_") + labels.get("direction", "")] += value
    return found


@pytest.mark.parametrize("plane", [GLOO, SYMM], ids=lambda plane: plane["network__data_plane"])
def test_rows_stay_on_devices_and_a_killed_worker_costs_its_lanes_only(
    plane: dict[str, str], short: Path, cases: list[tuple[list[int], Continuation]]
) -> None:
    tokenizer = Tokenizer.from_file(str(short / "tokenizer.json"))
    on_devices = {"router__device": "interpreter", "expert__device": "interpreter"}
    with Mesh(short, experts=2, **on_devices, **plane, **PATIENT) as mesh:
        opened = f'"over":"{plane["network__data_plane"]}"'
        assert (mesh.run_dir / "logs" / "router-0.log").read_text().count(opened) == 2
        workers = figures(mesh, "expert")
        # Of all that a layer computes only ids and weights come down; then a token and, where they
        # are asked for, its log-probability, and the most likely token with its own.
        layers, pair_bytes = 2, 3 * (4 + 4)
        # Of a step of one token ahead of the host ids, what each lane got, and a word.
        ahead_bytes = layers * (3 * 4 + 2 * 2 * 4) + 4
        ways = ((True, 4 + 4 + (8 + 4)), (False, 4))
        for (prompt, wanted), (scored, drawn_bytes) in zip(cases, ways, strict=True):
            before = figures(mesh, "router")
            check(mesh, tokenizer, prompt, wanted, scored=scored)
            router = {name: value - before[name] for name, value in figures(mesh, "router").items()}
            tokens = router["router_tokens_total"]
            ahead, vain = router["router_steps_ahead_total"], router["router_steps_again_total"]
            assert (ahead > 0) == (plane is SYMM)
            down = router["router_device_copied_bytes_totaldown"]
            down -= (tokens - ahead) * layers * pair_bytes + (ahead + vain) * ahead_bytes
            # A gateway submits again what a router on a busy machine has not answered for long.
            again = tokens - (len(prompt) + STEPS - 1)
            drawn = down / drawn_bytes
            assert 0 <= drawn - STEPS <= again
        expert = {name: value - workers[name] for name, value in figures(mesh, "expert").items()}
        assert expert["expert_tokens_total"] > 0
        assert expert["expert_device_copied_bytes_totalup"] > 0
        assert expert["expert_device_copied_bytes_totaldown"] == 0

        pid = next(m["pid"] for m in mesh.members("expert") if m["id"] == "expert-1")
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(check, mesh, tokenizer, *cases[0], steps=MORE_STEPS)
            mesh.wait_for(lambda: figures(mesh, "router")["num_requests_running"] == 1, "it to run")
            os.kill(pid, signal.SIGKILL)
            running.result()
        log = (mesh.run_dir / "logs" / "router-0.log").read_text()
        lost = [event for event in events_of(log) if event["event"] == "lane.lost"]
        assert {event["peer"] for event in lost} == {"expert-1"}
        mesh.wait_for(
            lambda: figures(mesh, "router")["router_lane_slots_in_use"] == 0, "no slot to be held"
        )


@pytest.mark.parametrize(("router", "expert"), [("interpreter", "cpu"), ("cpu", "interpreter")])
def test_over_gloo_a_device_and_a_cpu_serve_one_mesh(
    router: str, expert: str, short: Path, cases: list[tuple[list[int], Continuation]]
) -> None:
    tokenizer = Tokenizer.from_file(str(short / "tokenizer.json"))
    devices = {"router__device": router, "expert__device": expert}
    with Mesh(short, experts=1, **devices, **GLOO, **PATIENT) as mesh:
        check(mesh, tokenizer, *cases[0])


def why_it_cannot_serve(role: str, run_dir: Path, setting: str) -> str:
    """What a service that is started by itself with ``setting`` says as it ends."""
    command = [sys.executable, "-m", f"{role}_svc", "--id", f"{role}-0"]
    settings = [f"mesh.run_dir={run_dir}", setting, "logs.format=json"]
    done = subprocess.run(
        [*command, *(word for one in settings for word in ("--set", one))],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    last = json.loads((done.stdout + done.stderr).strip().splitlines()[-1])
    assert last["event"] == "service.cannot_serve"
    return str(last["reason"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
@pytest.mark.parametrize("role", ["router", "expert"])
def test_a_service_whose_device_is_not_there_ends_at_start_and_says_so(
    role: str, tmp_path: Path
) -> None:
    reason = why_it_cannot_serve(role, tmp_path, f"{role}.device=cuda")
    assert reason.startswith("device 'cuda' cannot be used: torch")


@pytest.mark.parametrize(("role", "plane"), [("router", "nccl"), ("expert", "symm")])
def test_a_plane_of_devices_is_refused_to_a_service_on_the_cpu_and_the_settings_are_named(
    role: str, plane: str, tmp_path: Path
) -> None:
    reason = why_it_cannot_serve(role, tmp_path, f"network.data_plane={plane}")
    assert f"the {plane} plane" in reason
    assert "router.device and expert.device must both be cuda" in reason
