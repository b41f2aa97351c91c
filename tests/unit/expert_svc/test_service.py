from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog
import torch
import uvloop
from prometheus_client import CollectorRegistry

from expert_svc.service import ExpertWorker, LanePlaces
from expert_svc.worker import Worker
from mesh.config import Effective
from mesh.hosts import host_id
from mesh.links import Net
from mesh.messages import AssignSlots, Member, Record, SlotsReady, View
from mesh.placement import EMPTY
from mesh.service import CannotServe, Context
from mesh.settings import ExpertSettings, Settings
from moe_model.errors import NotFinite
from tests.support.experts import LAYERS, Reads, new_table

VIEW = View(
    version=1,
    members=tuple(
        Member(id=id_, role=role, incarnation=1, pid=1, host="h", state="ready")
        for id_, role in (("router-0", "router"), ("expert-0", "expert"), ("expert-1", "expert"))
    ),
)
COMMAND = AssignSlots(command=7, epoch=3, moe_layers=LAYERS, slots=((0, 1), (2,)))
DEADLINE_S = 30.0


class Scene:
    """A worker without lanes or planner: commands go in, and what it would say comes out."""

    def __init__(self, net: Net, home: Path, read: Any) -> None:
        settings = Settings(expert=ExpertSettings(speed=0.5))
        self.read = read
        self.table = new_table(read)
        self.ctx = Context(
            role="expert",
            id="expert-0",
            incarnation=1,
            settings=settings,
            effective=Effective(settings, {}),
            run_dir=home,
            net=net,
            registry=CollectorRegistry(),
            log=structlog.get_logger(),
        )
        self.computing = Worker(SimpleNamespace(), self.table)
        self.worker = ExpertWorker(
            self.ctx, self.table, self.computing, lanes=LanePlaces("l", "tcp://h:1#k"), digest="d"
        )
        self.worker.bundles = "ipc://b"
        self.answers: asyncio.Queue[SlotsReady] = asyncio.Queue()
        self.worker._member.send = self.answers.put_nowait
        self.states: list[tuple[str, str, float]] = []
        set_state = self.worker._member.set_state

        def noted(state: Any, *, detail: str = "", progress: float = 1.0) -> None:
            self.states.append((state, detail, progress))
            set_state(state, detail=detail, progress=progress)

        self.worker._member.set_state = noted

    async def do(self, command: AssignSlots) -> SlotsReady:
        self.worker._assign(command)
        return await self.answers.get()


def run(tmp_path: Path, read: Any, main: Callable[[Scene], Awaitable[None]]) -> None:
    """``main`` beside the actor that carries assignments out; raises what that one raises."""

    async def bounded() -> None:
        net = Net()
        try:
            scene = Scene(net, tmp_path, read)
            async with asyncio.timeout(DEADLINE_S):
                loading = asyncio.ensure_future(scene.worker.load())
                testing = asyncio.ensure_future(main(scene))
                await asyncio.wait([loading, testing], return_when=asyncio.FIRST_COMPLETED)
                if not loading.done():
                    loading.cancel()
                    await asyncio.wait([loading])
                    return testing.result()
                testing.cancel()
                return loading.result()
        finally:
            net.close()

    uvloop.run(bounded())


def test_a_worker_without_memory_says_so_to_the_planner_and_is_not_ready(tmp_path: Path) -> None:
    def too_large(layer: int, index: int) -> tuple[torch.Tensor, ...]:
        return (torch.empty(1 << 60),) * 3

    async def main(scene: Scene) -> None:
        answer = await scene.do(COMMAND)
        assert (answer.command, answer.error, answer.loaded) == (7, "", 0)
        assert [(fault.layer, fault.slot, fault.expert) for fault in answer.faults] == [
            (1, 0, 0), (1, 1, 1), (3, 0, 2),
        ]  # fmt: skip
        assert "can't allocate memory" in answer.faults[0].reason
        state, detail, _ = scene.states[-1]
        assert state == "loading"
        assert "3 slots are empty: expert 0 of layer 1: " in detail

    run(tmp_path, too_large, main)


def test_a_bug_while_loading_ends_the_worker(tmp_path: Path) -> None:
    read = Reads()
    read.broken[1, 1] = RuntimeError("shapes differ")

    async def main(scene: Scene) -> None:
        await scene.do(COMMAND)

    with pytest.raises(RuntimeError, match="shapes differ"):
        run(tmp_path, read, main)


def test_a_checkpoint_that_cannot_be_read_ends_a_worker_that_has_never_served(
    tmp_path: Path,
) -> None:
    read = Reads()
    read.broken[1, 1] = NotFinite(Path("f"), "experts.1.up")
    answers: list[SlotsReady] = []

    async def main(scene: Scene) -> None:
        scene.worker._member.send = answers.append
        scene.worker._assign(COMMAND)
        await asyncio.Event().wait()

    with pytest.raises(CannotServe, match=r"experts\.1\.up holds NaN"):
        run(tmp_path, read, main)
    assert [(answer.command, answer.error) for answer in answers] == [
        (7, "f: tensor experts.1.up holds NaN or infinite values")
    ]


def test_a_worker_that_serves_stays_ready_whatever_becomes_of_what_it_loads(tmp_path: Path) -> None:
    read = Reads()

    async def main(scene: Scene) -> None:
        assert (await scene.do(COMMAND)).loaded == 3
        assert {state for state, *_ in scene.states} == {"loading", "ready"}
        scene.states.clear()
        read.broken[3, 5] = NotFinite(Path("f"), "experts.5.up")
        more = msgspec.structs.replace(COMMAND, command=8, epoch=4, slots=((0, 1, 4), (2, 5)))
        answer = await scene.do(more)
        assert (answer.command, answer.epoch, answer.error) == (8, 4, "")
        assert (answer.loaded, answer.from_peers, answer.loaded_bytes) == (1, 0, 1536)
        assert answer.seconds > 0
        assert [(fault.layer, fault.slot, fault.expert) for fault in answer.faults] == [(3, 1, 5)]
        assert scene.table.held() == ((0, 1, 4), (2, -1))
        assert {state for state, *_ in scene.states} == {"ready"}
        assert ("ready", "loading experts", 0.6) in scene.states
        assert "1 slots are empty: expert 5 of layer 3: f: tensor" in scene.states[-1][1]
        assert scene.worker._load().epoch == 4

        read.broken.clear()
        answer = await scene.do(more)
        assert (answer.command, answer.loaded, answer.faults) == (8, 1, ())
        assert scene.states[-1] == ("ready", "", 1.0)

    run(tmp_path, read, main)


def test_an_acknowledgement_that_was_lost_is_said_again_without_any_loading(tmp_path: Path) -> None:
    async def main(scene: Scene) -> None:
        first = await scene.do(COMMAND)
        scene.read.read.clear()
        assert await scene.do(COMMAND) == first
        other = msgspec.structs.replace(COMMAND, command=8, slots=((0,), ()))
        assert (await scene.do(other)).loaded == 0
        again = await scene.do(COMMAND)
        assert (again.command, again.loaded) == (7, 2), "an old command given anew is carried out"
        assert scene.table.held() == ((0, 1), (2,))

    run(tmp_path, Reads(), main)


def test_what_the_worker_does_not_have_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    async def main(scene: Scene) -> None:
        await scene.do(COMMAND)
        wrong = msgspec.structs.replace(COMMAND, command=8, slots=((0,), (99,)))
        answer = await scene.do(wrong)
        assert "experts [99] in layer 3" in answer.error
        assert scene.table.held() == ((0, 1), (2,))
        assert scene.states[-1][0] == "ready"

    run(tmp_path, Reads(), main)


def test_a_newer_assignment_takes_the_place_of_one_under_way(tmp_path: Path) -> None:
    reading, go_on = threading.Event(), threading.Event()

    class Slow(Reads):
        def __call__(self, layer: int, index: int) -> tuple[torch.Tensor, ...]:
            reading.set()
            assert go_on.wait(DEADLINE_S)
            return super().__call__(layer, index)

    async def main(scene: Scene) -> None:
        scene.worker._assign(COMMAND)
        await asyncio.to_thread(reading.wait, DEADLINE_S)
        newer = msgspec.structs.replace(COMMAND, command=8, slots=((3,), ()))
        scene.worker._assign(newer)
        go_on.set()
        assert (await scene.answers.get()).command == 8
        assert scene.table.held() == ((3,), ())
        assert scene.read.read == [(1, 0), (1, 3)]
        assert scene.answers.empty()

    run(tmp_path, Slow(), main)


def test_an_expert_gone_bad_in_memory_is_loaded_anew(tmp_path: Path) -> None:
    async def main(scene: Scene) -> None:
        await scene.do(COMMAND)
        bad = scene.table.find(1, 1, 1)
        assert bad is not None
        await asyncio.to_thread(scene.worker.heal, 1, 1, bad)
        assert (await scene.answers.get()).loaded == 1
        assert scene.table.held() == ((0, 1), (2,))
        assert scene.table.find(1, 1, 1) is not bad

    run(tmp_path, Reads(), main)


def test_a_worker_that_is_given_nothing_is_ready(tmp_path: Path) -> None:
    async def main(scene: Scene) -> None:
        nothing = AssignSlots(command=1, epoch=1, moe_layers=LAYERS, slots=((-1,), ()))
        assert (await scene.do(nothing)).error == ""
        assert scene.states[-1] == ("ready", "", 1.0)

    run(tmp_path, Reads(), main)


def test_what_it_says_of_itself(tmp_path: Path) -> None:
    async def main(scene: Scene) -> None:
        hello = scene.worker._hello()
        assert (hello.lanes, hello.lanes_tcp) == ("l", "tcp://h:1#k")
        assert (hello.bundles, hello.speed) == ("ipc://b", 0.5)
        assert hello.host_id == host_id(scene.ctx.settings)
        scene.computing.tally.pairs, scene.computing.tally.ffn_ns = 5, 9
        load = scene.worker._load()
        assert (load.pairs, load.ffn_ns) == (5, 9)
        scene.worker._assign(Record(command=1, action="start"))
        assert scene.answers.empty()

    run(tmp_path, Reads(), main)


def test_a_worker_that_is_to_leave_drains_until_nothing_is_placed_on_it(tmp_path: Path) -> None:
    async def main(scene: Scene) -> None:
        await scene.worker.relieved()  # before it serves, nobody misses it
        scene.worker._leaving = False
        await scene.do(COMMAND)
        scene.worker._member.view = VIEW
        leaving = asyncio.ensure_future(scene.worker.relieved())
        await asyncio.sleep(0)
        assert scene.states[-1][0] == "draining"
        fewer = msgspec.structs.replace(COMMAND, command=8, slots=((0, EMPTY), (EMPTY,)))
        await scene.do(fewer)
        assert scene.states[-1][0] == "draining"
        assert not leaving.done()
        scene.worker._assign(msgspec.structs.replace(COMMAND, command=9, slots=((), ())))
        await leaving

    run(tmp_path, Reads(), main)


@pytest.mark.parametrize("gone", ["router-0", "expert-1"])
def test_a_worker_waits_for_nobody_who_could_use_or_take_its_experts(
    tmp_path: Path, gone: str
) -> None:
    async def main(scene: Scene) -> None:
        await scene.do(COMMAND)
        scene.worker._member.view = VIEW
        leaving = asyncio.ensure_future(scene.worker.relieved())
        await asyncio.sleep(0)
        assert not leaving.done()
        members = tuple(member for member in VIEW.members if member.id != gone)
        scene.worker._member._apply(msgspec.structs.replace(VIEW, version=2, members=members))
        await leaving

    run(tmp_path, Reads(), main)


def test_where_all_stop_experts_wait_for_the_routers(tmp_path: Path) -> None:
    async def main(scene: Scene) -> None:
        await scene.do(COMMAND)
        draining = tuple(msgspec.structs.replace(m, state="draining") for m in VIEW.members)
        scene.worker._member.view = msgspec.structs.replace(VIEW, version=2, members=draining)
        leaving = asyncio.ensure_future(scene.worker.relieved())
        await asyncio.sleep(0)
        scene.worker._member._apply(msgspec.structs.replace(VIEW, version=3, members=draining))
        assert scene.worker._is_needed()
        gone = tuple(
            msgspec.structs.replace(m, state="left" if m.role == "router" else "draining")
            for m in VIEW.members
        )
        scene.worker._member._apply(msgspec.structs.replace(VIEW, version=4, members=gone))
        await leaving

    run(tmp_path, Reads(), main)
