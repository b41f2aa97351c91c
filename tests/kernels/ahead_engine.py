"""An engine whose device, or C, goes through decode steps by itself, with expert workers in
processes of their own: the tokens are transformers' and the counts the other way's, whatever
happens to workers. Whoever imports these tests has a fixture ``side``.
"""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import structlog
from ep_kernels.plane import LaneShape
from ep_kernels.shm.router import ShmRouterPlane
from forked import Forked

from mesh.messages import Delta, Member, Placement, Sampling, Submit, View
from mesh.settings import RouterSettings
from moe_model.spec import ModelSpec, load_spec
from router_svc.ahead import StepsAhead
from router_svc.engine import Engine
from router_svc.exchange import Results
from router_svc.lanes import reach
from tests.support.oracle import Oracle

WORKERS = ("e0", "e1")
TOLERANCE = 1e-4
DEADLINE_S = 200.0
_incarnations = itertools.count(1)


class Side(Protocol):
    """What goes through steps by itself: a device, or C on the CPU."""

    path: Path
    """The model's."""
    near: str
    """The kind of its lanes."""
    serve: Callable[..., None]
    """An expert worker's process, see ``model_peer``."""

    def plane(self, incarnation: int, shape: LaneShape) -> ShmRouterPlane: ...

    def model(self) -> Any: ...

    def ahead(self, model: Any, plane: ShmRouterPlane) -> StepsAhead: ...


@pytest.fixture(scope="module")
def oracle(side: Side) -> Oracle:
    return Oracle(side.path)


class Fleet:
    """Two expert workers, and what is placed on them."""

    def __init__(self, directory: Path, side: Side) -> None:
        self.spec: ModelSpec = load_spec(side.path)
        self.processes = {
            name: Forked(side.serve, name, str(directory / name), side.path) for name in WORKERS
        }
        self.paths = {name: process.told() for name, process in self.processes.items()}
        self.epoch = 0
        self.slots: dict[str, list[int]] = {}

    def hold(self, **slots: list[int]) -> None:
        """Have the workers' slots hold other experts, in all layers."""
        for name, experts in slots.items():
            self.processes[name]._pipe.send(experts)
            assert self.processes[name].told() == "held"
        self.slots |= slots
        self.epoch += 1

    def halves(self) -> dict[str, list[int]]:
        experts = list(range(self.spec.num_experts))
        return {"e0": experts[::2], "e1": experts[1::2]}

    def view(self) -> View:
        layers = self.spec.moe_layers
        row = tuple(expert for held in self.slots.values() for expert in held)
        placement = Placement(
            epoch=self.epoch,
            moe_layers=layers,
            num_experts=self.spec.num_experts,
            ranks=tuple(self.slots),
            slots_per_rank=tuple(map(len, self.slots.values())),
            physical_to_logical=(row,) * len(layers),
        )
        members = tuple(
            Member(id=name, role="expert", incarnation=1, pid=1, host="", state="ready",
                   lanes=lanes)
            for name, lanes in self.paths.items()
        )  # fmt: skip
        return View(version=self.epoch, members=members, placement=placement)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, side: Side) -> Iterator[Fleet]:
    yield from _running(tmp_path_factory.mktemp("lanes"), side)


@pytest.fixture
def own_fleet(tmp_path: Path, side: Side) -> Iterator[Fleet]:
    """For a test that ends workers."""
    yield from _running(tmp_path, side)


def _running(directory: Path, side: Side) -> Iterator[Fleet]:
    fleet = Fleet(directory, side)
    yield fleet
    for process in fleet.processes.values():
        process.kill()


class Run:
    """One engine, run by this thread (which Triton's interpreter belongs to) while ``scenario`` is
    played on another.
    """

    def __init__(
        self, fleet: Fleet, side: Side, scenario: Callable[[Run], None], *, ahead: bool = True
    ) -> None:
        # Nobody is hung on a machine that stood still for a while.
        spec, settings = fleet.spec, RouterSettings(micro_batches="1", expert_timeout_s=300.0)
        shape = LaneShape(spec.hidden_size, spec.experts_per_token, settings.capacity_tokens, 2)
        self.plane = side.plane(next(_incarnations), shape)
        model = side.model()
        self.deltas: dict[str, list[Delta]] = {}
        self._news = threading.Condition()
        self.engine = Engine(
            model,
            self.plane,
            settings,
            exact=False,
            deliver=self._deliver,
            changed=lambda: None,
            log=structlog.get_logger("test"),
            reach=reach("symm" if side.near == "symm" else "shm", ""),
            near=side.near,
            ahead=side.ahead(model, self.plane) if ahead else None,
        )
        self.engine.set_view(fleet.view())
        failed: list[BaseException] = []

        def play() -> None:
            try:
                scenario(self)
                self.wait(lambda: self.engine.state.lane_slots_in_use == 0)
                for lane in self.plane._lanes.values():
                    assert lane.memory.busy[0] == 0
            except BaseException as error:  # noqa: BLE001 - raised by the main thread
                failed.append(error)
            finally:
                self.engine.stop()

        player = threading.Thread(target=play, daemon=True)
        player.start()
        self.engine.run()
        player.join(DEADLINE_S)
        if failed:
            raise failed[0]

    def submit(self, name: str, prompt: list[int], tokens: int) -> None:
        self.deltas[name] = []
        sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        submit = Submit(request=name, trace=name, prompt=tuple(prompt), sampling=sampling)
        self.engine.submit(b"g", submit)

    def wait(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + DEADLINE_S
        with self._news:
            while not condition():
                assert time.monotonic() < end, "the engine does not get there"
                self._news.wait(0.01)

    def over(self, name: str) -> bool:
        return bool(self.deltas[name]) and self.deltas[name][-1].finish is not None

    def drawn(self, name: str) -> int:
        return sum(len(delta.tokens) for delta in self.deltas[name])

    def check(self, name: str, prompt: list[int], tokens: int, oracle: Oracle) -> None:
        self.wait(lambda: self.over(name))
        deltas, wanted = self.deltas[name], oracle.greedy(prompt, tokens)
        assert deltas[-1].finish == "length", deltas[-1]
        assert [token for delta in deltas for token in delta.tokens] == wanted.tokens
        logprobs = [found.logprob for delta in deltas for found in delta.logprobs]
        rows = zip(logprobs, wanted.logprobs, wanted.tokens, strict=True)
        assert all(abs(found - float(row[token])) < TOLERANCE for found, row, token in rows)

    @property
    def again(self) -> int:
        return sum(self.engine.tally.again.values())

    def _deliver(self, results: Results) -> None:
        with self._news:
            for deltas in results.deltas.values():
                for delta in deltas:
                    self.deltas[delta.request].append(delta)
            self._news.notify_all()


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(8, 380) for _ in range(1 + 2 * i)] for i in range(count)]


def test_tokens_are_the_references_and_all_is_counted_as_on_the_hosts_way(
    fleet: Fleet, side: Side, oracle: Oracle
) -> None:
    fleet.hold(**fleet.halves())
    wanted = list(enumerate(prompts(3)))

    def scenario(run: Run) -> None:
        for index, prompt in wanted:
            run.submit(str(index), prompt, 5)
        for index, prompt in wanted:
            run.check(str(index), prompt, 5, oracle)
        run.submit("alone", wanted[0][1], 5)
        run.check("alone", wanted[0][1], 5, oracle)

    by_host = Run(fleet, side, scenario, ahead=False)
    by_itself = Run(fleet, side, scenario)
    assert by_host.engine.tally.ahead == 0
    assert by_itself.engine.tally.ahead >= 4
    assert set(by_itself.engine.tally.again) <= {"timed_out"}  # a machine that stood still
    one, other = by_host.engine.loads(), by_itself.engine.loads()
    assert other.tokens == one.tokens
    assert (other.experts == one.experts).all()
    assert (other.decodes == one.decodes).all()
    assert other.rank_pairs == one.rank_pairs
    assert by_itself.engine.lane_bytes == by_host.engine.lane_bytes


def test_a_move_makes_answers_stale_and_steps_are_run_again(
    fleet: Fleet, side: Side, oracle: Oracle
) -> None:
    (prompt,), tokens = prompts(1), 14
    fleet.hold(**fleet.halves())

    def scenario(run: Run) -> None:
        run.submit("a", prompt, tokens)
        run.wait(lambda: run.engine.tally.ahead >= 2)
        halves = fleet.halves()
        fleet.hold(e0=halves["e1"], e1=halves["e0"])
        run.wait(lambda: run.again or run.over("a"))
        before = run.engine.tally.ahead
        run.engine.set_view(fleet.view())
        run.wait(lambda: run.engine.tally.ahead > before or run.over("a"))
        assert not run.over("a"), "steps go ahead again"
        run.check("a", prompt, tokens, oracle)

    run = Run(fleet, side, scenario)
    # By the host's way it may be where a machine that stood still made the step late.
    assert run.engine.tally.again.get("stale", 0) + run.engine.tally.stale >= 1
    assert run.engine.state.lanes == len(WORKERS)


def test_a_worker_that_stands_still_is_gone_round_until_it_answers(
    fleet: Fleet, side: Side, oracle: Oracle
) -> None:
    (prompt,), tokens = prompts(1), 24
    everything = list(range(fleet.spec.num_experts))
    fleet.hold(e0=everything, e1=everything)

    def scenario(run: Run) -> None:
        run.submit("a", prompt, tokens)
        run.wait(lambda: run.engine.tally.ahead >= 1)
        fleet.processes["e1"].signal(signal.SIGSTOP)
        run.wait(lambda: run.again)
        drawn = run.drawn("a")
        run.wait(lambda: run.drawn("a") > drawn + 1)  # without it
        fleet.processes["e1"].signal(signal.SIGCONT)
        before = run.engine.tally.ahead
        run.wait(lambda: run.engine.tally.ahead > before or run.over("a"))
        run.check("a", prompt, tokens, oracle)
        assert run.engine.tally.ahead > before, "steps go ahead again"

    run = Run(fleet, side, scenario)
    assert run.engine.tally.again["timed_out"] >= 1
    assert run.engine.state.lanes == len(WORKERS)


def test_a_worker_that_is_killed_in_mid_step_costs_its_lane_only(
    own_fleet: Fleet, side: Side, oracle: Oracle
) -> None:
    (prompt,), tokens = prompts(1), 10
    everything = list(range(own_fleet.spec.num_experts))
    own_fleet.hold(e0=everything, e1=everything)

    def owes(run: Run) -> bool:
        """Whether a step waits for an answer of e1."""
        memory = run.plane._lanes["e1"].memory
        flags = zip(memory.request_flags.tolist(), memory.answer_flags.tolist(), strict=True)
        return any(sent > answered for sent, answered in flags)

    def scenario(run: Run) -> None:
        run.submit("a", prompt, tokens)
        run.wait(lambda: run.engine.tally.ahead >= 1)
        own_fleet.processes["e1"].signal(signal.SIGSTOP)
        run.wait(lambda: owes(run))
        own_fleet.processes["e1"].signal(signal.SIGKILL)
        run.check("a", prompt, tokens, oracle)

    run = Run(own_fleet, side, scenario)
    assert run.again >= 1
    assert set(run.engine.tally.again) <= {"aborted", "timed_out"}
    assert run.engine.state.lanes == 1
