"""Steps that a router goes through in C, on a mesh whose workers stand still, die, and change what
they hold: each answer is transformers', and steps go ahead again.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from ep_kernels.half import has_kernel
from tokenizers import Tokenizer

from tests.support.checkpoints import variant
from tests.support.meshes import Mesh
from tests.support.oracle import Oracle

pytestmark = pytest.mark.skipif(not has_kernel(), reason="no kernel for 16-bit weights here")

MODEL = "deepseek-16-bit"
PROMPTS = [[8, 30, 200], [70, 71], [300, 9, 120, 44]]
TOKENS = 40
PATIENCE_S = 300.0


class Clients:
    """One for each prompt, that asks again and again for what ``wanted`` says."""

    def __init__(self, mesh: Mesh, wanted: list[str]) -> None:
        self._mesh = mesh
        self._wanted = wanted
        self._stopping = False
        self.answers = 0
        self.wrong: list[Any] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(index,), daemon=True)
            for index in range(len(wanted))
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping = True
        for thread in self._threads:
            thread.join()

    def _ask(self, index: int) -> None:
        body = {
            "model": MODEL, "prompt": PROMPTS[index], "max_tokens": TOKENS, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        while not self._stopping:
            status, answer = self._mesh.post("/v1/completions", body)
            if status != 200 or answer["choices"][0]["text"] != self._wanted[index]:
                self.wrong.append((status, answer))
            self.answers += 1


def counted(mesh: Mesh, name: str) -> float:
    """The sum of a counter of the router."""
    (router,) = mesh.members("router")
    with urllib.request.urlopen(router["metrics"], timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(f"moemesh_{name}"))


@pytest.mark.parametrize("rounds", [1, pytest.param(12, marks=pytest.mark.soak)])
def test_whatever_happens_to_workers_costs_no_token_and_steps_go_ahead_again(
    checkpoints: Path, rounds: int
) -> None:
    path = variant(MODEL, checkpoints)
    oracle, tokenizer = Oracle(path), Tokenizer.from_file(str(path / "tokenizer.json"))
    wanted = [tokenizer.decode(oracle.greedy(prompt, TOKENS).tokens) for prompt in PROMPTS]
    rng = random.Random(rounds)
    with Mesh(path, experts=3) as mesh, Clients(mesh, wanted) as clients:

        def flows(what: str) -> None:
            """Steps have gone ahead since, and every client has been answered."""
            answers, steps = clients.answers, counted(mesh, "router_steps_ahead_total")
            mesh.wait_for(
                lambda: (
                    clients.wrong
                    or (
                        clients.answers >= answers + 2 * len(PROMPTS)
                        and counted(mesh, "router_steps_ahead_total") > steps + TOKENS
                    )
                ),
                f"steps ahead after {what}",
            )
            assert not clients.wrong, (clients.wrong[0], mesh.logs())

        def pid(name: str) -> int:
            return next(m["pid"] for m in mesh.members("expert") if m["id"] == name)

        def move(name: str) -> None:
            """Its experts go elsewhere and come back."""
            mesh.run("drain", name, timeout_s=PATIENCE_S)
            flows(f"{name} was drained")
            mesh.run("drain", name, "--undo", timeout_s=PATIENCE_S)

        def stop(name: str) -> None:
            """It stands still until a step has come to nothing."""
            stopped, in_vain = pid(name), counted(mesh, "router_steps_again_total")
            os.kill(stopped, signal.SIGSTOP)
            try:
                mesh.wait_for(lambda: counted(mesh, "router_steps_again_total") > in_vain, "a try")
            finally:
                os.kill(stopped, signal.SIGCONT)

        def kill(name: str) -> None:
            killed = pid(name)
            os.kill(killed, signal.SIGKILL)
            mesh.wait_for(
                lambda: any(
                    m["id"] == name and m["pid"] != killed and m["state"] == "ready"
                    for m in mesh.members("expert")
                ),
                f"{name} to come back",
            )

        flows("the start")
        for _ in range(rounds):
            for trouble in rng.sample([move, stop, kill], 3):
                name = rng.choice(["expert-0", "expert-1", "expert-2"])
                trouble(name)
                flows(f"{trouble.__name__} {name}")
