"""The router's process among real ones, as a gateway sees it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mesh.links import ClientLink, Net
from mesh.messages import (
    Cancel,
    Delta,
    FromRouter,
    Ping,
    Pong,
    Rejected,
    Sampling,
    Submit,
    Tokens,
    ToRouter,
)
from mesh.service import CannotServe
from mesh.settings import ModelSettings, RouterSettings, Settings
from moe_model.reference import ReferenceModel
from moe_model.shipped import checkpoint_dir
from moe_model.spec import load_spec
from router_svc.service import lane_shape, main
from tests.support.forked_services import ForkedExpert

DEADLINE_S = 30.0


class Processes:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._started: list[subprocess.Popen[bytes] | ForkedExpert] = []

    def start(self, module: str, id_: str) -> subprocess.Popen[bytes] | ForkedExpert:
        overrides = {
            "mesh.run_dir": self.run_dir,
            "mesh.state_dir": self.run_dir / "state",
            "mesh.experts": 2,
            "metrics.enabled": "false",
            "logs.format": "json",
        }
        flags = [flag for key, value in overrides.items() for flag in ("--set", f"{key}={value}")]
        arguments = ["--id", id_, *flags]
        path = self.run_dir / f"{id_}.log"
        process: subprocess.Popen[bytes] | ForkedExpert
        if module == "expert_svc":
            process = ForkedExpert(arguments, path)
        else:
            with path.open("wb") as log:
                command = [sys.executable, "-m", module, *arguments]
                process = subprocess.Popen(command, stdout=log, stderr=log)
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait(10.0)


@pytest.fixture
def processes() -> Iterator[Processes]:
    with tempfile.TemporaryDirectory(prefix="mm") as directory:  # short: sockets live in it
        processes = Processes(Path(directory))
        yield processes
        processes.close()


class Gateway:
    """One gateway's link, with what it has received so far."""

    def __init__(self, net: Net, run_dir: Path, incarnation: int = 1) -> None:
        self.ping = Ping(gateway="g", incarnation=incarnation)
        self.link: ClientLink[FromRouter, ToRouter] = ClientLink(
            net, f"ipc://{run_dir}/r.sock", receives=FromRouter
        )
        self.deltas: dict[str, list[Delta]] = {}
        self.rejected: dict[str, Rejected] = {}
        self.pong: Pong | None = None

    async def until(self, condition: Callable[[], object], *, ping: bool = False) -> None:
        """Receive until ``condition`` holds; with ``ping`` ask again after each answer."""
        async with asyncio.timeout(DEADLINE_S):
            await self.link.wait_up()
            if ping:
                self.link.send(self.ping)
            while not condition():
                match await self.link.recv():
                    case Tokens(deltas=deltas):
                        for delta in deltas:
                            self.deltas.setdefault(delta.request, []).append(delta)
                    case Rejected() as rejected:
                        self.rejected[rejected.request] = rejected
                    case Pong() as pong:
                        self.pong = pong
                        if ping and not condition():
                            await asyncio.sleep(0.02)
                            self.link.send(self.ping)

    def submit(self, name: str, prompt: list[int], max_tokens: int) -> None:
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        submit = Submit(request=name, trace=name, prompt=tuple(prompt), sampling=sampling)
        assert self.link.send(submit)

    def finish(self, name: str) -> str | None:
        deltas = self.deltas.get(name)
        return deltas[-1].finish if deltas else None

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.deltas[name] for token in delta.tokens]

    def ready(self) -> bool:
        return self.pong is not None and self.pong.ready

    def idle(self) -> bool:
        load = None if self.pong is None else self.pong.load
        return load is not None and load.running == 0 and load.kv_blocks_free > 0


def test_a_router_from_start_to_stop(processes: Processes, reference: ReferenceModel) -> None:
    asyncio.run(_from_start_to_stop(processes, reference))


async def _from_start_to_stop(processes: Processes, reference: ReferenceModel) -> None:
    router = processes.start("router_svc", "r")
    net = Net()
    gateway = Gateway(net, processes.run_dir)

    # Alone it runs and says why it is not ready.
    await gateway.until(lambda: gateway.pong, ping=True)
    assert gateway.pong is not None
    assert not gateway.pong.ready
    assert gateway.pong.reason
    gateway.submit("early", [5], 1)
    await gateway.until(lambda: "early" in gateway.rejected)
    assert gateway.rejected["early"].retry_after_s > 0
    assert gateway.rejected["early"].not_ready

    # With the others it warms up and serves.
    processes.start("planner_svc", "planner")
    processes.start("expert_svc", "a")
    processes.start("expert_svc", "b")
    await gateway.until(gateway.ready, ping=True)
    prompt = [7, 8, 9]
    gateway.submit("first", prompt, 8)
    await gateway.until(lambda: gateway.finish("first"))
    assert gateway.tokens("first") == list(reference.generate(prompt, 8, ignore_eos=True))

    # Cancelled ones stop and free their blocks.
    gateway.submit("long", prompt, 900)
    await gateway.until(lambda: gateway.deltas.get("long"))
    gateway.link.send(Cancel(requests=("long",)))
    await gateway.until(lambda: gateway.finish("long") == "cancelled")
    await gateway.until(gateway.idle, ping=True)

    # So do those of a gateway that goes away.
    leaver = Gateway(net, processes.run_dir)
    await leaver.until(leaver.ready, ping=True)
    leaver.submit("left", prompt, 900)
    await leaver.until(lambda: leaver.deltas.get("left"))
    leaver.link.close()
    gateway.pong = None
    await gateway.until(gateway.idle, ping=True)

    # And those of one whose next incarnation is there, though its connection stands.
    gateway.submit("forgotten", prompt, 900)
    await gateway.until(lambda: gateway.deltas.get("forgotten"))
    successor = Gateway(net, processes.run_dir, incarnation=2)
    await successor.until(successor.ready, ping=True)
    await gateway.until(lambda: gateway.finish("forgotten") == "cancelled")
    successor.link.close()

    # A router that is to leave takes nothing new and ends what it runs; told to stop at once, it
    # hands the rest back.
    gateway.submit("ended", prompt, 40)
    gateway.submit("handed back", prompt, 900)
    await gateway.until(lambda: gateway.deltas.get("handed back"))
    router.send_signal(signal.SIGTERM)
    await gateway.until(lambda: gateway.pong and "stopping" in gateway.pong.reason, ping=True)
    gateway.submit("late", prompt, 1)
    await gateway.until(lambda: "late" in gateway.rejected)
    assert gateway.rejected["late"].not_ready
    await gateway.until(lambda: gateway.finish("ended"))
    assert gateway.finish("ended") == "length"
    assert router.poll() is None
    router.send_signal(signal.SIGINT)
    await gateway.until(lambda: gateway.finish("handed back") == "cancelled")
    assert await asyncio.to_thread(router.wait, DEADLINE_S) == 0
    gateway.link.close()
    net.close()
    assert not (processes.run_dir / "r.sock").exists()


def test_lanes_follow_the_settings() -> None:
    spec = load_spec(checkpoint_dir(""))
    router = RouterSettings(micro_batches="3", capacity_tokens=7, wire="bf16")
    shape = lane_shape(Settings(router=router, model=ModelSettings(exact=True)), spec)
    assert (shape.hidden, shape.top_k) == (spec.hidden_size, spec.experts_per_token)
    assert (shape.capacity_tokens, shape.ring_slots, shape.exact) == (7, 6, True)


def test_impossible_lanes_are_refused_before_anything_is_loaded_or_opened() -> None:
    router = RouterSettings(capacity_tokens=10_000_000)
    ctx = SimpleNamespace(settings=Settings(router=router))  # nothing else is there to use
    with pytest.raises(CannotServe, match="lower capacity_tokens"):
        asyncio.run(main(ctx))


def test_a_cache_for_less_than_one_sequence_is_refused_with_the_arithmetic() -> None:
    ctx = SimpleNamespace(
        settings=Settings(router=RouterSettings(kv_cache_bytes=1_000_000)),
        effective=SimpleNamespace(origin={"router.kv_cache_bytes": "default"}),
    )
    with pytest.raises(CannotServe, match=r"kv_cache_bytes = 1000000 \(default\): .* 64 blocks of"):
        asyncio.run(main(ctx))


def test_a_group_that_cannot_share_the_model_is_refused_with_the_arithmetic() -> None:
    ctx = SimpleNamespace(
        settings=Settings(router=RouterSettings(tp=5)),
        effective=SimpleNamespace(origin={"router.tp": "default"}),
    )
    with pytest.raises(CannotServe, match=r"router.tp = 5 \(default\): .* heads a rank"):
        asyncio.run(main(ctx))
