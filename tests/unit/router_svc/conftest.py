"""Expert workers on threads of the test's process, over real lanes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
import torch
from ep_kernels.grouped_ffn import ExpertBank
from ep_kernels.plane import AnswerStatus, Arrival, LaneShape
from ep_kernels.shm.expert import ShmExpertPlane
from ep_kernels.shm.router import ShmRouterPlane

from mesh.messages import Delta, Member, Placement, Rejected, Sampling, Submit, View
from mesh.settings import RouterSettings
from moe_model.experts import LocalExperts, new_bank
from moe_model.reference import ReferenceModel
from moe_model.shipped import checkpoint_dir
from router_svc.engine import Engine
from router_svc.exchange import Results
from router_svc.lanes import reach

HIDDEN, INTERMEDIATE, TOP_K = 32, 16, 4
Expert = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Worker:
    """Answers from banks that the test fills, ``busy`` with one part at a time. ``held`` stops it
    from taking anything.
    """

    def __init__(self, name: str, path: Path, banks: dict[int, ExpertBank], incarnation: int):
        self.name = name
        self.incarnation = incarnation
        self.banks = banks
        self.path = str(path)
        self.calls = 0
        self.busy = threading.Lock()
        self.held = threading.Event()
        self.held.set()
        self._plane = ShmExpertPlane(
            name,
            incarnation,
            self.path,
            hidden=next(iter(banks.values())).hidden,
            digest="model",
            max_lanes=4,
        )
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._stopping:
                self._plane.wait(5.0)
                self.held.wait(10.0)
                if self._stopping:
                    break
                for part in self._plane.poll():
                    self.calls += 1
                    with self.busy:
                        self._answer(part)

    def _answer(self, part: Arrival) -> None:
        bank = self.banks[part.layer]
        if not bank.matches(part.pair_slot, part.pair_expert):
            self._plane.answer(part, AnswerStatus.STALE, 7, 0)
            return
        if part.exact:
            bank.run_rows(part.x, part.pair_token, part.pair_slot, part.out)
        else:
            bank.run(part.x, part.pair_token, part.pair_slot, part.pair_weight, part.out)
        self._plane.answer(part, AnswerStatus.OK, 7, 1)

    def stop(self) -> None:
        """Close as a process that dies would: its lanes break."""
        if not self._stopping:
            self._stopping = True
            self.held.set()
            self._plane.wake()
            self._thread.join(10.0)
            self._plane.close()
            assert not self._thread.is_alive()


class Fleet:
    """Workers and router planes of one test; closed at its end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: list[Callable[[], None]] = []
        self._incarnations = itertools.count(1)

    def worker(self, name: str, banks: dict[int, ExpertBank]) -> Worker:
        incarnation = next(self._incarnations)
        path = self._directory / f"{name}.{incarnation}.lanes"  # the one before may still listen
        worker = Worker(name, path, banks, incarnation)
        self._open.append(worker.stop)
        return worker

    def plane(self, shape: LaneShape) -> ShmRouterPlane:
        plane = ShmRouterPlane("router", next(self._incarnations), shape, "model")
        self._open.append(plane.close)
        return plane

    def close(self) -> None:
        for close in reversed(self._open):
            close()


@pytest.fixture(scope="session")
def reference() -> ReferenceModel:
    """The shipped model, exact: the engine must give the same bits."""
    torch.set_num_threads(1)
    return ReferenceModel(checkpoint_dir(""), exact=True)


class Sequence:
    """What a gateway would have received of one sequence."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.rejected: Rejected | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.tokens]

    @property
    def finish(self) -> str | None:
        return self.deltas[-1].finish if self.deltas else None

    @property
    def over(self) -> bool:
        return self.rejected is not None or self.finish is not None


class EngineMesh:
    """An engine on a thread, and workers that hold the shipped model's experts."""

    def __init__(self, fleet: Fleet, reference: ReferenceModel, **settings: object) -> None:
        self.fleet = fleet
        self.spec = reference.model.spec
        self.exact = reference.model.exact
        self.settings = RouterSettings(**{"micro_batches": "1", **settings})
        assert isinstance(reference.experts, LocalExperts)
        self._local = reference.experts
        self.plane = fleet.plane(
            LaneShape(
                self.spec.hidden_size,
                self.spec.experts_per_token,
                self.settings.capacity_tokens,
                8,
                exact=self.exact,
            )
        )
        self.workers: dict[str, Worker] = {}
        self.sequences: dict[str, Sequence] = {}
        self.steps: list[Results] = []
        self._news = threading.Condition()
        self._version = 0
        self.engine = Engine(
            reference.model,
            self.plane,
            self.settings,
            exact=self.exact,
            deliver=self._deliver,
            changed=self._changed,
            log=structlog.get_logger("test"),
            reach=reach("auto", ""),
        )
        self._thread = threading.Thread(target=self.engine.run, name="engine")
        self._thread.start()

    def start_workers(self, *names: str) -> None:
        share = -(-self.spec.num_experts // len(names))
        self.ranks = {
            name: list(range(self.spec.num_experts))[i * share : (i + 1) * share]
            for i, name in enumerate(names)
        }
        for name in names:
            self.start_worker(name)
        self.publish()

    def start_worker(self, name: str) -> None:
        banks = {}
        for layer, source in self._local._banks.items():
            bank = new_bank(self.spec, len(self.ranks[name]), exact=self.exact)
            for slot, expert in enumerate(self.ranks[name]):
                weights = source._experts[expert]
                assert weights is not None
                bank.install(slot, expert, weights)
            banks[layer] = bank
        self.workers[name] = self.fleet.worker(name, banks)

    def publish(self, **states: str) -> None:
        """A view in which workers are ready unless ``states`` says otherwise."""
        self._version += 1
        layers = self.spec.moe_layers
        row = tuple(expert for held in self.ranks.values() for expert in held)
        placement = Placement(
            epoch=1,
            moe_layers=layers,
            num_experts=self.spec.num_experts,
            ranks=tuple(self.ranks),
            slots_per_rank=tuple(len(held) for held in self.ranks.values()),
            physical_to_logical=(row,) * len(layers),
        )
        members = tuple(
            Member(
                id=name,
                role="expert",
                incarnation=worker.incarnation,
                pid=1,
                host="",
                state=states.get(name, "ready"),
                lanes=worker.path,
            )
            for name, worker in self.workers.items()
        )
        self.engine.set_view(View(version=self._version, members=members, placement=placement))

    def submit(self, name: str, prompt: list[int], owner: bytes = b"g", **sampling: object) -> None:
        output = sampling.pop("output", ())
        deadline_ms = sampling.pop("deadline_ms", 0)
        self.sequences[name] = Sequence()
        self.engine.submit(
            owner,
            Submit(
                request=name,
                trace=name,
                prompt=tuple(prompt),
                output=tuple(output),
                deadline_ms=deadline_ms,
                sampling=Sampling(**{"temperature": 0.0, "ignore_eos": True, **sampling}),
            ),
        )

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20.0
        with self._news:
            while not condition():
                assert time.monotonic() < deadline, "the engine does not get there"
                self._news.wait(0.02)  # its state changes without news as well

    def finish(self, *names: str) -> list[Sequence]:
        """Wait until the sequences are over."""
        chosen = [self.sequences[name] for name in names or self.sequences]
        self.wait(lambda: all(sequence.over for sequence in chosen))
        return chosen

    def _deliver(self, results: Results) -> None:
        with self._news:
            self.steps.append(results)
            for deltas in results.deltas.values():
                for delta in deltas:
                    self.sequences[delta.request].deltas.append(delta)
            for _owner, rejected in results.rejected:
                self.sequences[rejected.request].rejected = rejected
            self._news.notify_all()

    def _changed(self) -> None:
        with self._news:
            self._news.notify_all()

    def stop(self) -> None:
        self.engine.stop()
        self._thread.join(10.0)
        assert not self._thread.is_alive(), "the engine does not stop"


@pytest.fixture
def start_engine(fleet: Fleet, reference: ReferenceModel) -> Iterator[Callable[..., EngineMesh]]:
    started: list[EngineMesh] = []

    def start(model: ReferenceModel = reference, **settings: object) -> EngineMesh:
        started.append(EngineMesh(fleet, model, **settings))
        return started[-1]

    yield start
    for mesh in started:
        mesh.stop()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    torch.set_num_threads(1)
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


@pytest.fixture
def expert_weights() -> Callable[[int], list[Expert]]:
    def make(count: int) -> list[Expert]:
        generator = torch.Generator().manual_seed(5)
        return [
            (
                torch.randn(INTERMEDIATE, HIDDEN, generator=generator) / 6,
                torch.randn(INTERMEDIATE, HIDDEN, generator=generator) / 6,
                torch.randn(HIDDEN, INTERMEDIATE, generator=generator) / 4,
            )
            for _ in range(count)
        ]

    return make
