"""Two expert workers as real processes, told what to hold by a planner that this test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import uvloop

from mesh.links import Net, ServerLink
from mesh.messages import (
    AssignSlots,
    FromPlanner,
    Heartbeat,
    Hello,
    Member,
    Placement,
    SlotsReady,
    Source,
    Status,
    ToPlanner,
    View,
    Welcome,
)
from moe_model.shipped import checkpoint_dir
from moe_model.spec import load_spec
from tests.e2e.test_experts_planner import Processes, Router

SPEC = load_spec(checkpoint_dir(""))
LAYERS, EXPERTS = SPEC.moe_layers, SPEC.num_experts
HALF = EXPERTS // 2
EVERYTHING = [*range(HALF, EXPERTS), *range(HALF)]
"""What one worker holds in the end: its own experts, then the other's."""
ALL_ON_ONE = Placement(
    epoch=2,
    moe_layers=LAYERS,
    num_experts=EXPERTS,
    ranks=("expert-1",),
    slots_per_rank=(EXPERTS,),
    physical_to_logical=(tuple(EVERYTHING),) * len(LAYERS),
)
EXPERT_BYTES = 3 * SPEC.hidden_size * SPEC.expert_intermediate * 4
RANKS = ("expert-0", "expert-1")
DEADLINE_S = 90.0


class Planner:
    """Says welcome and what to hold, and hears what workers answer."""

    def __init__(self, net: Net, run_dir: Path) -> None:
        self.broadcast = f"ipc://{run_dir}/broadcast.sock"
        self.link: ServerLink[ToPlanner, FromPlanner] = ServerLink(
            net, f"ipc://{run_dir}/planner.sock", receives=ToPlanner
        )
        self.peers: dict[str, bytes] = {}
        self.hellos: dict[str, Hello] = {}
        self.beats: dict[str, Heartbeat] = {}
        self.answers: dict[str, SlotsReady] = {}
        self.states: set[tuple[str, str]] = set()
        self.heard = asyncio.Event()

    async def run(self) -> None:
        while True:
            peer, message = await self.link.recv()
            match message:
                case Hello():
                    self.peers[message.id], self.hellos[message.id] = peer, message
                    welcome = Welcome(protocol=1, heartbeat_ms=50, broadcast=self.broadcast)
                    self.link.send(peer, welcome)
                case Heartbeat():
                    self.beats[message.id] = message
                    self.states.add((message.id, message.state))
                case SlotsReady():
                    self.answers[message.id] = message
            self.heard.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while True:
            if condition():
                return
            self.heard.clear()
            await self.heard.wait()

    def tell(self, rank: str, command: AssignSlots) -> None:
        assert self.link.send(self.peers[rank], command)

    async def done(self, rank: str, command: int) -> SlotsReady:
        await self.until(lambda: getattr(self.answers.get(rank), "command", 0) == command)
        return self.answers[rank]


def assignment(command: int, experts: list[int], **more: object) -> AssignSlots:
    """The same experts in every layer."""
    return AssignSlots(
        command=command,
        epoch=command,
        moe_layers=LAYERS,
        slots=(tuple(experts),) * len(LAYERS),
        **more,  # type: ignore[arg-type]
    )


def sources(planner: Planner) -> tuple[Source, ...]:
    """Where expert-1 finds the experts of expert-0."""
    address = planner.hellos["expert-0"].bundles
    assert address
    return tuple(
        Source(layer, HALF + slot, "expert-0", address, slot)
        for layer in LAYERS
        for slot in range(HALF)
    )


def check(planner: Planner, placement: Placement) -> None:
    """Every expert as the checkpoint says, over real lanes."""
    router = Router()
    try:
        members = tuple(
            Member(
                id=hello.id, role="expert", incarnation=hello.incarnation, pid=hello.pid,
                host=hello.host, state="ready", lanes=hello.lanes,
            )
            for hello in planner.hellos.values() if hello.id in placement.ranks
        )  # fmt: skip
        view = View(version=1, members=members, placement=placement)
        router.connect(
            Status(
                mesh="", model="", view=view, ready=True, reason="", epoch=1, balancedness=1.0,
                tokens=0,
            )
        )  # fmt: skip
        for layer in LAYERS:
            router.check(placement, layer, 20, seed=layer)
    finally:
        router.close()


def test_a_worker_takes_anothers_experts_and_reads_the_rest_when_that_one_is_killed(
    tmp_path: Path,
) -> None:
    async def bounded() -> None:
        processes = Processes(tmp_path)
        processes.run_dir.mkdir(mode=0o700)
        net = Net()
        try:
            async with asyncio.timeout(DEADLINE_S):
                planner = Planner(net, processes.run_dir)
                hearing = asyncio.ensure_future(planner.run())
                await start(processes, planner)
                await take_all(planner)
                await take_all_and_kill(processes, planner)
                hearing.cancel()
        except BaseException:
            print(processes.logs())
            raise
        finally:
            processes.close()
            net.close()

    uvloop.run(bounded())


async def start(processes: Processes, planner: Planner) -> None:
    """Both workers hold half of the experts each, and are ready."""
    for rank in RANKS:
        processes.start("expert_svc", rank)
    await planner.until(lambda: len(planner.hellos) == 2)
    for first, rank in zip((0, HALF), RANKS, strict=True):
        planner.tell(rank, assignment(1, list(range(first, first + HALF))))
    for rank in RANKS:
        assert (await planner.done(rank, 1)).loaded == HALF * len(LAYERS)
    await planner.until(lambda: {beat.state for beat in planner.beats.values()} == {"ready"})
    planner.states.clear()


async def take_all(planner: Planner) -> None:
    """From memory, while both serve; then the slots shrink again."""
    planner.tell("expert-1", assignment(2, EVERYTHING, sources=sources(planner)))
    answer = await planner.done("expert-1", 2)
    assert (answer.error, answer.faults) == ("", ())
    assert answer.loaded == answer.from_peers == HALF * len(LAYERS)
    assert answer.loaded_bytes >= EXPERT_BYTES * answer.loaded
    assert {state for _, state in planner.states} == {"ready"}
    await asyncio.to_thread(check, planner, ALL_ON_ONE)
    planner.tell("expert-1", assignment(3, EVERYTHING[:HALF]))
    assert (await planner.done("expert-1", 3)).loaded == 0
    await planner.until(lambda: planner.beats["expert-1"].load.epoch == 3)
    assert planner.beats["expert-1"].load.pairs > 0
    assert planner.beats["expert-1"].load.ffn_ns > 0


async def take_all_and_kill(processes: Processes, planner: Planner) -> None:
    """Slowly, and the owner is killed meanwhile."""
    slow = EXPERT_BYTES * HALF * len(LAYERS) // 4
    command = assignment(4, EVERYTHING, sources=sources(planner), bytes_per_s=slow)
    planner.tell("expert-1", command)
    await planner.until(lambda: 0.55 < planner.beats["expert-1"].progress < 1.0)
    processes.kill("expert-0")
    planner.tell("expert-1", command)  # as a planner does that has no answer yet
    answer = await planner.done("expert-1", 4)
    assert (answer.error, answer.faults) == ("", ())
    assert 0 < answer.from_peers < answer.loaded == HALF * len(LAYERS)
    assert ("expert-1", "loading") not in planner.states
    await asyncio.to_thread(check, planner, ALL_ON_ONE)
