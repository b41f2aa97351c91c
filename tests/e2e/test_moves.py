"""Experts move while requests stream, on real processes: no token changes, nothing is left behind.

In exact mode a token's bits do not depend on where its experts are, so every answer must equal the
one given before anything moved, log-probabilities included.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.meshes import Mesh

RANKS = 3
EXPERTS = 32
TOP_K = 4
REDUNDANT = 4
STREAMS = 6
MOVE_DEADLINE_S = 60.0
GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
PROMPTS = [
    "Emma was not at all",
    "And it came to pass that the king said unto the people,",
    "The climate is tropical, with a rainy season from",
    "CREATE TABLE t1(a INTEGER PRIMARY KEY, b TEXT);",
    "static int compare(const void *a, const void *b){",
    "She could not but remember how the letter had been received, and",
]
CASES: list[dict[str, Any]] = [
    {"prompt": prompt, "max_tokens": 48 + 8 * index, "seed": index, "logprobs": 2,
     "ignore_eos": True, "stream": True, **(GREEDY if index % 2 else SAMPLED)}
    for index, prompt in enumerate(PROMPTS)
]  # fmt: skip


@dataclass
class Answer:
    """What a client got for ``CASES[case]``, and when (monotonic seconds)."""

    case: int
    said: list[Any] = field(default_factory=list)
    """Text, tokens and log-probabilities of each token."""
    finish: str = ""
    arrivals: list[float] = field(default_factory=list)

    @property
    def longest_gap_ms(self) -> float:
        gaps = (later - sooner for sooner, later in itertools.pairwise(self.arrivals))
        return max(gaps) * 1e3


def stream(mesh: Mesh, case: int) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", mesh.port, timeout=120)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(CASES[case]), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        assert response.status == 200, response.read()
        answer = Answer(case)
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            (choice,) = chunk["choices"]
            answer.arrivals.append(time.monotonic())
            if (logprobs := choice["logprobs"]) is not None:
                # A chunk may carry several tokens: compare token by token.
                answer.said += zip(
                    logprobs["tokens"],
                    logprobs["token_logprobs"],
                    logprobs["top_logprobs"],
                    strict=True,
                )
            answer.finish = choice["finish_reason"] or answer.finish
        return answer
    finally:
        connection.close()


class Traffic:
    """``STREAMS`` clients that ask for one case after another until left."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._client, args=(index,)) for index in range(STREAMS)
        ]
        self.answers: list[Answer] = []
        self.failures: list[Exception] = []

    def _client(self, case: int) -> None:
        while not self._stop.is_set() and not self.failures:
            try:
                self.answers.append(stream(self._mesh, case))
            except Exception as error:  # noqa: BLE001 (the test looks)
                self.failures.append(error)
            case = (case + 1) % len(CASES)

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()


class Planner:
    """The admin pages of a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get(self, page: str) -> dict[str, Any]:
        status, body = self._mesh.get(f"/admin/{page}")
        assert status == 200, body
        return dict(json.loads(body))

    def place(self, rows: list[list[int]]) -> None:
        placed = self.get("placement")
        slots = [len(rows[0]) // RANKS] * RANKS
        status, answer = self._mesh.post(
            "/admin/placement",
            {"ranks": placed["ranks"], "slots_per_rank": slots, "physical_to_logical": rows},
        )
        assert status == 200, answer

    def settled(self) -> bool:
        plan = self.get("plan")
        return not plan["phase"] and not plan["retry_in_s"]

    def reached(self, rows: list[list[int]]) -> bool:
        """Whether each rank serves what ``rows`` say, and nothing is under way."""
        placed = self.get("placement")
        return self.settled() and held(placed) == held(
            {
                "slots_per_rank": [len(rows[0]) // RANKS] * RANKS,
                "physical_to_logical": rows,
            }
        )


def held(placement: dict[str, Any]) -> list[list[list[int]]]:
    """``[layers][ranks]`` experts in ascending order."""
    firsts = list(itertools.accumulate(placement["slots_per_rank"], initial=0))
    return [
        [
            sorted(expert for expert in row[first:last] if expert >= 0)
            for first, last in itertools.pairwise(firsts)
        ]
        for row in placement["physical_to_logical"]
    ]


def random_rows(rng: random.Random, layers: int, *, copies: bool = True) -> list[list[int]]:
    """A valid placement: each expert somewhere, none twice on a rank; spare slots if not copies."""
    per_rank = (EXPERTS + REDUNDANT) // RANKS
    rows = []
    for _ in range(layers):
        ranks: list[list[int]] = [[] for _ in range(RANKS)]
        for expert in rng.sample(range(EXPERTS), EXPERTS):
            rng.choice([rank for rank in ranks if len(rank) < per_rank]).append(expert)
        for rank in ranks:
            others = [expert for expert in range(EXPERTS) if expert not in rank]
            spare = per_rank - len(rank)
            rank.extend(rng.sample(others, spare) if copies else [-1] * spare)
            rng.shuffle(rank)
        rows.append([expert for rank in ranks for expert in rank])
    return rows


def nearby(rng: random.Random, rows: list[list[int]]) -> list[list[int]]:
    """The same with a few experts exchanged between ranks, where both lack the other's."""
    per_rank = len(rows[0]) // RANKS
    changed = [list(row) for row in rows]
    for row in changed:
        for _ in range(3):
            a, b = rng.sample(range(len(row)), 2)
            mine, other = (
                row[slot // per_rank * per_rank : (slot // per_rank + 1) * per_rank]
                for slot in (a, b)
            )
            if row[b] not in mine and row[a] not in other:
                row[a], row[b] = row[b], row[a]
    return changed


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with Mesh(
        experts=RANKS,
        model__exact="true",
        planner__mode="off",
        planner__redundant_slots=REDUNDANT,
        planner__spare_slots=4,
        planner__heartbeat_ms=100,
        # Nothing dies here, and on a busy machine nobody is to be taken for dead.
        planner__suspect_after_ms=30_000,
        planner__dead_after_ms=60_000,
    ) as mesh:
        yield mesh


def gauge(mesh: Mesh, name: str) -> float:
    """The sum of an expert workers' metric."""
    total = 0.0
    for member in mesh.members("expert"):
        with urllib.request.urlopen(member["metrics"], timeout=10) as page:
            for line in page.read().decode().splitlines():
                if line.startswith(f"moemesh_expert_{name} "):
                    total += float(line.split()[1])
    return total


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    parts = [f"{share:.0%} {ordered[int(share * (len(ordered) - 1))]:.0f}" for share in
             (0.5, 0.9, 0.99, 1.0)]  # fmt: skip
    return f"{len(ordered)} requests, ms: " + ", ".join(parts)


@pytest.mark.parametrize("moves", [8, pytest.param(300, marks=pytest.mark.soak)])
def test_no_token_changes_while_experts_move_and_nothing_is_left_behind(
    mesh: Mesh, moves: int, capsys: pytest.CaptureFixture[str]
) -> None:
    planner, rng = Planner(mesh), random.Random(moves)
    layers = len(planner.get("placement")["moe_layers"])
    alone = random_rows(rng, layers, copies=False)
    planner.place(alone)
    mesh.wait_for(lambda: planner.reached(alone), "an unreplicated placement", MOVE_DEADLINE_S)
    wanted = [stream(mesh, case) for case in range(len(CASES))]
    assert all(len(a.said) == CASES[a.case]["max_tokens"] for a in wanted)
    first_epoch = planner.get("plan")["epoch"]
    with Traffic(mesh) as quiet:
        mesh.wait_for(
            lambda: len(quiet.answers) >= 2 * STREAMS or quiet.failures, "some quiet answers", 120
        )
    rows = random_rows(rng, layers)
    with Traffic(mesh) as traffic:
        for number in range(moves):
            if number:
                rows = random_rows(rng, layers) if number % 4 == 0 else nearby(rng, rows)
            planner.place(rows)
            if number % 5 == 4:
                continue  # the next one finds this one under way
            mesh.wait_for(
                lambda: traffic.failures or planner.reached(rows),  # noqa: B023
                f"placement {number}",
                MOVE_DEADLINE_S,
            )
        epochs = planner.get("plan")["epoch"] - first_epoch
        mesh.wait_for(
            lambda: traffic.failures or planner.reached(rows), "the last one", MOVE_DEADLINE_S
        )
    assert not quiet.failures + traffic.failures, (quiet.failures, traffic.failures)
    for answer in quiet.answers + traffic.answers:
        assert answer.said == wanted[answer.case].said
        assert answer.finish == "length"
    assert epochs >= moves * 3 // 5
    assert planner.get("plan")["faults"] == []
    check_nothing_is_left(mesh, layers)
    still = [answer.longest_gap_ms for answer in quiet.answers]
    moving = [answer.longest_gap_ms for answer in traffic.answers]
    with capsys.disabled():
        print(f"\n{epochs} epochs; longest gap between tokens of a request")
        print(f"  nothing moves: {spread(still)}")
        print(f"  experts move:  {spread(moving)}")
        excess = max(moving) - statistics.median(moving)
        print(f"  the worst one waited {excess:.0f} ms longer than its neighbours' median")


def check_nothing_is_left(mesh: Mesh, layers: int) -> None:
    """KV blocks, lane slots and expert slots are as many as what is in force needs."""

    def idle() -> bool:
        loads = [member["load"] for member in mesh.members("router")]
        return all(
            load["running"] == load["waiting"] == load["lane_slots_in_use"] == 0
            and load["kv_blocks_free"] == load["kv_blocks_total"]
            for load in loads
        )

    mesh.wait_for(idle, "every KV block, lane slot and request to be free")
    serving = layers * (EXPERTS + REDUNDANT)
    mesh.wait_for(
        lambda: gauge(mesh, 'slots{state="filled"}') == serving, f"{serving} filled slots"
    )
    status = mesh.status()
    assert status["alarms"] == []
    assert status["phase"] == ""
    assert status["ready"]


def test_commands_and_pages_tell_the_same_and_what_was_exported_comes_back(
    mesh: Mesh, tmp_path: Path
) -> None:
    planner = Planner(mesh)
    before = json.loads(mesh.run("plan", "export"))
    assert before == planner.get("placement")
    for_sglang = json.loads(mesh.run("plan", "export", "--format", "sglang"))
    assert for_sglang == planner.get("placement?format=sglang")
    rows = random_rows(random.Random(1), len(before["moe_layers"]))
    planner.place(rows)
    mesh.wait_for(lambda: planner.reached(rows), "another placement", MOVE_DEADLINE_S)
    file = tmp_path / "placement.json"
    file.write_text(json.dumps(for_sglang))
    mesh.run("plan", "apply", str(file))
    mesh.wait_for(
        lambda: planner.settled() and held(planner.get("placement")) == held(before),
        "the exported placement",
        MOVE_DEADLINE_S,
    )
    stream(mesh, 0)
    load = json.loads(mesh.run("plan", "load", "--json"))
    assert load["moe_layers"] == before["moe_layers"]
    assert sum(load["decode"][0]) > 0
    assert mesh.run("plan", "load")
    told = json.loads(mesh.run("plan", "mode", "advise", "--json"))
    assert told["mode"] == mesh.status()["mode"] == "advise"
    told = json.loads(mesh.run("plan", "rebalance", "--json"))
    assert held(planner.get("placement")) == held(before)
    mesh.run("plan", "mode", "off")
    assert "off" in mesh.run("plan", "show")


def test_a_recording_has_each_step_of_each_layer(mesh: Mesh) -> None:
    from safetensors.numpy import load_file

    layers = len(Planner(mesh).get("placement")["moe_layers"])
    mesh.run("plan", "record", "start")
    stream(mesh, 0)
    mesh.run("plan", "record", "stop")
    (router,) = json.loads(mesh.run("plan", "record", "dump", "--json"))["routers"]
    assert router["error"] == ""
    recorded = load_file(router["path"])
    experts, decodes, tokens = (recorded[name] for name in ("experts", "decodes", "tokens"))
    assert experts.shape == decodes.shape == (router["steps"], layers, EXPERTS)
    assert (experts.sum(2) == TOP_K * tokens[:, None]).all()  # each token in each layer
    assert (decodes <= experts).all()
    assert decodes.sum() == TOP_K * layers * (CASES[0]["max_tokens"] - 1)  # the prompt makes one
