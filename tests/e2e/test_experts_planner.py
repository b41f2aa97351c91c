"""A planner and expert workers as real processes, driven over real lanes by a small router."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import structlog
import torch
import uvloop
from ep_kernels.grouped_ffn import reference_rows, reference_sum
from ep_kernels.plane import AnswerStatus, LaneShape, PairBlock, Part
from ep_kernels.shm.router import ShmRouterPlane

from mesh.links import Net
from mesh.member import Member, request_status
from mesh.messages import Hello, Load, Placement, Status
from mesh.placement import EMPTY, local_slots, replicas, unserved
from mesh.service import ExitCode
from moe_model.checkpoint import Checkpoint
from moe_model.experts import read_expert
from moe_model.shipped import checkpoint_dir
from moe_model.spec import load_spec, serving_digest
from tests.support.forked_services import ForkedExpert

MODEL = checkpoint_dir("")
SPEC = load_spec(MODEL)
DIGEST = serving_digest(MODEL, "auto", exact=False, tp=1)
DEADLINE_S = 60.0
QUICK = ("planner.heartbeat_ms=100", "planner.suspect_after_ms=1000", "planner.dead_after_ms=3000")


class Processes:
    """Services started one by one in a run directory of their own."""

    def __init__(self, home: Path, *settings: str) -> None:
        self.run_dir = home / "run"
        places = (f"mesh.run_dir={self.run_dir}", f"mesh.state_dir={home / 'state'}")
        self.settings = (*places, *QUICK, *settings)
        self.home = home
        self.running: dict[str, subprocess.Popen[bytes] | ForkedExpert] = {}

    def start(
        self, module: str, id_: str, *settings: str
    ) -> subprocess.Popen[bytes] | ForkedExpert:
        arguments = ["--id", id_]
        for setting in (*self.settings, *settings):
            arguments += ["--set", setting]
        path = self.home / f"{id_}.log"
        if module == "expert_svc":
            self.running[id_] = ForkedExpert(arguments, path)
        else:
            with path.open("ab") as log:
                command = [sys.executable, "-m", module, *arguments]
                self.running[id_] = subprocess.Popen(command, stdout=log, stderr=log)
        return self.running[id_]

    def kill(self, id_: str) -> None:
        process = self.running.pop(id_)
        process.kill()
        process.wait(DEADLINE_S)

    def stop(self, id_: str) -> int:
        process = self.running.pop(id_)
        process.send_signal(signal.SIGTERM)
        return process.wait(DEADLINE_S)

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait(DEADLINE_S)

    def status(self) -> Status | None:
        """What the planner says, or None while there is none."""

        async def ask() -> Status | None:
            net = Net()
            try:
                with suppress(TimeoutError):
                    return await request_status(net, f"ipc://{self.run_dir}/planner.sock", 2.0)
                return None
            finally:
                net.close()

        return uvloop.run(ask())

    def wait_for(self, what: str, condition: Callable[[Status], bool]) -> Status:
        """Ask the planner until ``condition`` holds."""
        end = time.monotonic() + DEADLINE_S
        while True:
            status = self.status()
            if status is not None and condition(status):
                return status
            ended = [id_ for id_, p in self.running.items() if p.poll() is not None]
            if ended or time.monotonic() > end:
                raise AssertionError(f"no {what}; ended: {ended}; {status}\n{self.logs()}")
            time.sleep(0.05)

    def wait_placed(self, without: int = 0) -> Status:
        """Until every rank has its slots and incarnation ``without`` is not among them."""

        def placed(status: Status) -> bool:
            placement = status.view.placement
            return (
                placement is not None
                and all(state_of(status, rank) == "ready" for rank in placement.ranks)
                and without not in {member.incarnation for member in status.view.members}
            )

        return self.wait_for("placement", placed)

    def wait_settled(self, *ranks: str) -> Status:
        """Until ``ranks`` and nobody else serve all experts, each its share, and nothing moves."""

        def settled(status: Status) -> bool:
            placement = status.view.placement
            return (
                placement is not None
                and set(placement.ranks) == set(ranks)
                and not status.phase
                and all(state_of(status, rank) == "ready" for rank in ranks)
                and not unserved(placement, ranks)
                and all(
                    sum(expert != EMPTY for expert in row) >= SPEC.num_experts // len(ranks)
                    for rank in ranks
                    for row in local_slots(placement, rank)
                )
            )

        return self.wait_for("settled placement", settled)

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.home.glob("*.log"))
        )


def state_of(status: Status, id_: str) -> str:
    return next((m.state for m in status.view.members if m.id == id_), "unknown")


class Router:
    """Sends random tokens through lanes and compares what comes back with plain torch."""

    def __init__(self, *, exact: bool = False, id_: str = "router-0") -> None:
        self.exact = exact
        self.plane = ShmRouterPlane(
            id_,
            time.time_ns(),
            LaneShape(
                hidden=SPEC.hidden_size,
                top_k=SPEC.experts_per_token,
                capacity_tokens=64,
                ring_slots=4,
                exact=exact,
            ),
            serving_digest(MODEL, "auto", exact=exact, tp=1),
        )
        self._experts: dict[tuple[int, int], Any] = {}
        self._checkpoint = Checkpoint(MODEL)

    def connect(self, status: Status) -> None:
        placement = status.view.placement
        assert placement is not None
        for member in status.view.members:
            if member.id in placement.ranks:
                self.plane.connect(member.id, member.lanes, member.incarnation, 5.0)

    def parts(
        self, placement: Placement, layer: int, x: torch.Tensor, seed: int
    ) -> dict[str, tuple[Part, list[int]]]:
        """Route ``x`` at random; per rank its part and the logical expert of each pair."""
        homes = replicas(placement)[placement.moe_layers.index(layer)]
        random = np.random.default_rng(seed)
        pairs: dict[int, list[tuple[int, int, int, float]]] = {}
        for token in range(x.shape[0]):
            chosen = random.choice(SPEC.num_experts, SPEC.experts_per_token, replace=False)
            for expert in chosen.tolist():
                place = homes[expert][token % len(homes[expert])]
                weight = float(random.random())
                pairs.setdefault(place.rank, []).append((token, place.local_slot, expert, weight))
        built = {}
        for rank, of_rank in pairs.items():
            tokens = sorted({token for token, *_ in of_rank})
            block = PairBlock.of(
                np.array(tokens, dtype=np.int32),
                np.array([tokens.index(p[0]) for p in of_rank], dtype=np.int32),
                np.array([p[1] for p in of_rank], dtype=np.int32),
                np.array([p[2] for p in of_rank], dtype=np.int32),
                np.array([p[3] for p in of_rank], dtype=np.float32),
            )
            part = Part(seed, layer, placement.epoch, x, block)
            built[placement.ranks[rank]] = (part, tokens)
        return built

    def check(self, placement: Placement, layer: int, tokens: int, seed: int = 0) -> None:
        """One layer for ``tokens`` random tokens, each rank's answer against the reference."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, SPEC.hidden_size, generator=generator)
        parts = self.parts(placement, layer, x, seed)
        waiting = {}
        for peer, (part, rows) in parts.items():
            ticket = self.plane.try_send(peer, part)
            assert ticket is not None
            waiting[peer, ticket] = (part, rows)
        end = time.monotonic() + DEADLINE_S
        while waiting:
            assert time.monotonic() < end
            for answer in self.plane.poll():
                part, rows = waiting.pop((answer.peer, answer.ticket))
                assert answer.status == AnswerStatus.OK
                self._compare(part, x[rows], layer, answer.out)
                self.plane.release(answer)
            assert self.plane.lost() == []
            if waiting:
                self.plane.wait(1.0)
        assert self.plane.in_flight() == 0

    def answer_to(self, peer: str, part: Part) -> AnswerStatus:
        ticket = self.plane.try_send(peer, part)
        assert ticket is not None
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            for answer in self.plane.poll():
                assert answer.ticket == ticket
                self.plane.release(answer)
                return answer.status
            self.plane.wait(1.0)
        raise AssertionError(f"no answer from {peer}")

    def _compare(self, part: Part, x: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        # Each pair gets an expert of its own in the reference, so that slots play no part in it.
        held = [self._expert(layer, expert) for expert in part.block.pair_expert.tolist()]
        own = np.arange(len(held), dtype=np.int32)
        if self.exact:
            want = reference_rows(x, part.block.pair_token, held, own)
        else:
            want = reference_sum(x, part.block.pair_token, held, own, part.block.pair_weight)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)

    def _expert(self, layer: int, expert: int) -> Any:
        key = (layer, expert)
        if key not in self._experts:
            self._experts[key] = read_expert(self._checkpoint, SPEC, layer, expert)
        return self._experts[key]

    def close(self) -> None:
        self.plane.close()
        self._checkpoint.close()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """A planner and two expert workers; tests leave it as they found it."""
    processes = Processes(tmp_path_factory.mktemp("mesh"))
    try:
        processes.start("planner_svc", "planner")
        for id_ in ("expert-0", "expert-1"):
            processes.start("expert_svc", id_)
        processes.wait_placed()
        yield processes
    finally:
        processes.close()


@pytest.fixture
def router() -> Iterator[Router]:
    made = Router()
    yield made
    made.close()


def test_every_expert_answers_with_the_checkpoints_ffn(mesh: Processes, router: Router) -> None:
    status = mesh.wait_placed()
    placement = status.view.placement
    assert placement is not None
    assert placement.slots_per_rank == (17, 17), "16 that serve and a spare one"
    router.connect(status)
    for layer in SPEC.moe_layers:
        for tokens in (1, 2, 40):
            router.check(placement, layer, tokens, seed=layer * 100 + tokens)


def test_a_pair_that_names_the_wrong_expert_is_stale_and_harms_nobody(
    mesh: Processes, router: Router
) -> None:
    status = mesh.wait_placed()
    placement = status.view.placement
    assert placement is not None
    router.connect(status)
    layer = SPEC.moe_layers[0]
    parts = router.parts(placement, layer, torch.randn(3, SPEC.hidden_size), seed=1)
    for peer, (part, _) in parts.items():
        part.block.pair_expert[0] = (part.block.pair_expert[0] + 1) % SPEC.num_experts
        assert router.answer_to(peer, part) == AnswerStatus.STALE
    router.check(placement, layer, 3)


def test_the_planner_is_small_and_knows_no_torch(mesh: Processes) -> None:
    pid = mesh.running["planner"].pid
    assert psutil.Process(pid).memory_info().rss < 200 * 2**20
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


def test_the_mesh_is_ready_once_a_router_is(mesh: Processes) -> None:
    assert mesh.wait_placed().reason == "no router is ready"

    async def join() -> Status:
        net = Net()
        member = Member(
            net,
            f"ipc://{mesh.run_dir}/planner.sock",
            hello=lambda: Hello(
                id="router-7",
                role="router",
                incarnation=1,
                pid=1,
                host="h",
                model_digest=DIGEST,
            ),
            load=Load,
            on_view=lambda _view: None,
            log=structlog.get_logger(),
        )
        member.set_state("ready")
        running = asyncio.ensure_future(member.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    status = await request_status(net, f"ipc://{mesh.run_dir}/planner.sock", 5.0)
                    if status.ready:
                        return status
                    await asyncio.sleep(0.02)
        finally:
            running.cancel()
            await asyncio.wait([running])
            net.close()

    assert uvloop.run(join()).reason == ""
    mesh.wait_for("goodbye", lambda status: state_of(status, "router-7") == "left")


def test_a_later_worker_gets_its_share_and_its_leaving_costs_no_expert(
    mesh: Processes, router: Router
) -> None:
    mesh.wait_settled("expert-0", "expert-1")
    mesh.start("expert_svc", "expert-2")
    status = mesh.wait_settled("expert-0", "expert-1", "expert-2")
    router.connect(status)
    assert status.view.placement is not None
    for layer in SPEC.moe_layers:
        router.check(status.view.placement, layer, 20)
    router.plane.disconnect("expert-2")
    assert mesh.stop("expert-2") == ExitCode.OK
    status = mesh.wait_settled("expert-0", "expert-1")
    assert state_of(status, "expert-2") == "left"
    assert status.view.placement is not None
    for layer in SPEC.moe_layers:
        router.check(status.view.placement, layer, 20)


def test_a_killed_workers_experts_go_to_the_others_and_come_back_with_it(
    mesh: Processes, router: Router
) -> None:
    status = mesh.wait_settled("expert-0", "expert-1")
    router.connect(status)
    mesh.kill("expert-1")
    end = time.monotonic() + DEADLINE_S
    lost = router.plane.lost()
    while not lost:
        assert time.monotonic() < end
        router.plane.wait(1.0)
        lost = router.plane.lost()
    assert [lane.peer for lane in lost] == ["expert-1"]
    alone = mesh.wait_settled("expert-0")
    assert alone.view.placement is not None
    router.check(alone.view.placement, SPEC.moe_layers[-1], 20)
    mesh.start("expert_svc", "expert-1")
    again = mesh.wait_settled("expert-0", "expert-1")
    router.connect(again)
    assert again.view.placement is not None
    for layer in SPEC.moe_layers:
        router.check(again.view.placement, layer, 20)


def test_tokens_flow_without_a_planner_and_its_successor_keeps_the_placement(
    mesh: Processes, router: Router
) -> None:
    before = mesh.wait_placed()
    placement = before.view.placement
    assert placement is not None
    router.connect(before)
    mesh.kill("planner")
    router.check(placement, SPEC.moe_layers[0], 5)
    mesh.start("planner_svc", "planner")
    after = mesh.wait_placed()
    assert after.view.placement == placement
    assert after.view.version > before.view.version
    router.check(placement, SPEC.moe_layers[1], 5)


def test_three_workers_with_redundant_slots_on_exact_lanes_then_a_clean_end(
    tmp_path: Path,
) -> None:
    processes = Processes(
        tmp_path, "mesh.experts=3", "planner.redundant_slots=3", "model.exact=true"
    )
    router = Router(exact=True)
    try:
        processes.start("planner_svc", "planner")
        for rank in range(3):
            processes.start("expert_svc", f"expert-{rank}")
        status = processes.wait_placed()
        placement = status.view.placement
        assert placement is not None
        assert placement.slots_per_rank == (13, 13, 12), "35 that serve and a spare one each"
        router.connect(status)
        for layer in SPEC.moe_layers:
            router.check(placement, layer, 30)
        codes = {id_: processes.stop(id_) for id_ in list(processes.running)[::-1]}
        assert set(codes.values()) == {ExitCode.OK}, processes.logs()
        assert not list(processes.run_dir.glob("*.sock"))
        assert not list(processes.run_dir.glob("*.lanes"))
        assert not list(processes.run_dir.glob("*.bundles"))
    finally:
        router.close()
        processes.close()


def test_a_worker_with_another_model_is_refused(mesh: Processes, tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(MODEL, other)
    config = other / "config.json"
    config.write_text(config.read_text() + "\n")
    process = mesh.start("expert_svc", "expert-9", f"model.path={other}")
    try:
        assert process.wait(DEADLINE_S) == ExitCode.REFUSED
        assert "another model" in (mesh.home / "expert-9.log").read_text()
    finally:
        mesh.running.pop("expert-9").kill()


@pytest.mark.parametrize("setting", ["model.exact=true", "model.weights=fp32"])
def test_a_worker_of_another_precision_is_refused_and_told_both(
    mesh: Processes, setting: str
) -> None:
    process = mesh.start("expert_svc", "expert-9", setting)
    try:
        assert process.wait(DEADLINE_S) == ExitCode.REFUSED
        text = (mesh.home / "expert-9.log").read_text()
        name, value = setting.removeprefix("model.").split("=")
        assert f"{name}={value}" in text
        assert DIGEST in text
    finally:
        mesh.running.pop("expert-9").kill()


def test_a_truncated_checkpoint_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(MODEL, broken)
    weights = broken / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 1000)
    processes = Processes(tmp_path, f"model.path={broken}")
    try:
        for module, id_ in (("expert_svc", "expert-0"), ("planner_svc", "planner")):
            code = processes.start(module, id_).wait(DEADLINE_S)
            assert code == ExitCode.CANNOT_SERVE, processes.logs()
            assert "model.safetensors" in (tmp_path / f"{id_}.log").read_text()
    finally:
        processes.close()
