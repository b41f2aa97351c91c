"""A real gateway process between real clients and a scripted planner and routers.

The planner and the routers speak the mesh's own protocol over real links, from a thread of the
test process; what a router produces is up to the test.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec
import openai

from gateway.text import Tokenizer
from mesh.links import LinkClosed, Net, Publisher, ServerLink
from mesh.messages import (
    Cancel,
    Delta,
    FromPlanner,
    FromRouter,
    GetView,
    Heartbeat,
    Hello,
    Load,
    Logprob,
    Member,
    Ping,
    Placement,
    Pong,
    Refused,
    Rejected,
    Submit,
    Tokens,
    ToPlanner,
    ToRouter,
    Unknown,
    View,
    Welcome,
)

MODEL = Path(__file__).parents[3] / "demo" / "model"
DEADLINE_S = 60.0
STORY = " The lighthouse keeper wrote a letter. He said: naïve café, 10 € and 😀! Then he slept."


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Until ``condition`` holds; looks again after each short wait for something to change."""
    end = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
        pause.wait(0.01)


@dataclass
class Script:
    """What a router produces for a sequence, after the output it was given."""

    tokens: list[int]
    stop_token: int = -1  # ends it after the tokens, unless max_tokens comes first
    error: str = ""  # ends it after the tokens
    error_kind: str = ""
    hold_after: int = 1 << 30  # tokens after which it waits for ``ScriptedRouter.release``


@dataclass
class Running:
    peer: bytes
    submit: Submit
    script: Script
    done: int = 0  # of the script's tokens
    started: bool = False


@dataclass
class ScriptedRouter:
    """One router actor: batches all running sequences in each step, as a real one does."""

    net: Net
    id: str
    address: str
    answer: Callable[[Submit], Script | Rejected]
    incarnation: int = 1
    peers: set[bytes] = field(default_factory=set)
    submits: list[Submit] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    running: dict[str, Running] = field(default_factory=dict)
    released: bool = False
    ready: bool = True
    reason: str = ""
    steps: int = 0

    def open(self) -> None:
        self.link: ServerLink[ToRouter, FromRouter] = ServerLink(
            self.net, self.address, receives=ToRouter
        )
        self.tasks = [
            asyncio.ensure_future(self._receive()),
            asyncio.ensure_future(self._work()),
        ]
        self.work = asyncio.Event()

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.link.close()

    def release(self) -> None:
        self.released = True
        self.work.set()

    def tell(self, *, ready: bool, reason: str = "") -> None:
        """Become ready or not, and say so to all gateways without waiting for their Pings."""
        self.ready, self.reason = ready, reason
        for peer in self.peers:
            self.link.send(peer, self.pong())

    async def _receive(self) -> None:
        with suppress(LinkClosed):
            while True:
                peer, message = await self.link.recv()
                self.peers.add(peer)
                match message:
                    case Ping():
                        self.link.send(peer, self.pong())
                    case Cancel(requests=names):
                        self.cancelled += names
                        for name in names:
                            self.running.pop(name, None)
                    case Submit():
                        self._submit(peer, message)

    def pong(self) -> Pong:
        return Pong(
            router=self.id,
            incarnation=self.incarnation,
            ready=self.ready,
            reason=self.reason,
            load=Load(running=len(self.running)),
        )

    def _submit(self, peer: bytes, message: Submit) -> None:
        self.submits.append(message)
        answer = self.answer(message)
        if isinstance(answer, Rejected):
            self.link.send(peer, msgspec.structs.replace(answer, request=message.request))
            return
        self.running[message.request] = Running(peer, message, answer, len(message.output))
        self.work.set()

    async def _work(self) -> None:
        while True:
            deltas: dict[bytes, list[Delta]] = {}
            for name, run in list(self.running.items()):
                delta = self._step(name, run)
                if delta is not None:
                    deltas.setdefault(run.peer, []).append(delta)
            self.steps += 1
            for peer, batch in deltas.items():
                self.link.send(peer, Tokens(step=self.steps, deltas=tuple(batch)))
            if deltas:
                await asyncio.sleep(0)
            else:
                self.work.clear()
                await self.work.wait()

    def _step(self, name: str, run: Running) -> Delta | None:
        sampling, script = run.submit.sampling, run.script
        if run.done >= script.hold_after and not self.released:
            return None
        first, run.started = not run.started, True
        tokens = script.tokens[run.done : min(run.done + 1, sampling.max_tokens)]
        run.done += len(tokens)
        finish, stop_token, error = None, -1, ""
        if run.done >= sampling.max_tokens:
            finish = "length"
        elif run.done >= len(script.tokens):
            finish = "error" if script.error else "stop" if script.stop_token >= 0 else "length"
            stop_token, error = (-1, script.error) if script.error else (script.stop_token, "")
        if finish:
            del self.running[name]
        return Delta(
            request=name,
            tokens=tuple(tokens),
            logprobs=tuple(logprob(token, sampling.logprobs) for token in tokens)
            if sampling.logprobs >= 0
            else (),
            prompt_logprobs=(
                None,
                *(logprob(token, sampling.prompt_logprobs) for token in run.submit.prompt[1:]),
            )
            if first and sampling.prompt_logprobs >= 0
            else (),
            finish=finish,
            stop_token=stop_token,
            error=error,
            error_kind=script.error_kind if error else "",
            cached_tokens=3 if first else 0,
        )


def logprob(token: int, top: int) -> Logprob:
    """Of ``token`` the value -0.25 - token/1000; it is the likeliest iff its id is even."""
    value = -0.25 - token / 1000
    others = [(token + 1 + i, value - 1 - i) for i in range(top)]
    ranked = [(token, value), *others] if token % 2 == 0 else [(token + 7, value / 2), *others]
    return Logprob(token, value, tuple(ranked[:top]))


@dataclass
class ScriptedPlanner:
    net: Net
    run_dir: Path
    members: dict[str, Member] = field(default_factory=dict)
    hellos: list[Hello] = field(default_factory=list)
    heartbeats: list[Heartbeat] = field(default_factory=list)
    version: int = 1
    placement: Placement | None = None
    peers: set[bytes] = field(default_factory=set)
    answers: dict[type, FromPlanner] = field(default_factory=dict)  # to an administrator
    asked: list[ToPlanner] = field(default_factory=list)

    def open(self) -> None:
        self.broadcast = f"ipc://{self.run_dir}/broadcast.sock"
        self.link: ServerLink[ToPlanner, FromPlanner] = ServerLink(
            self.net, f"ipc://{self.run_dir}/planner.sock", receives=ToPlanner
        )
        self.publisher: Publisher[View] = Publisher(self.net, self.broadcast)
        self.task = asyncio.ensure_future(self._receive())

    def close(self) -> None:
        self.task.cancel()
        self.link.close()
        self.publisher.close()

    def view(self) -> View:
        members = tuple(self.members.values())
        return View(version=self.version, members=members, placement=self.placement)

    def put(self, router: ScriptedRouter, *, state: str = "ready") -> None:
        self.members[router.id] = Member(
            id=router.id,
            role="router",
            incarnation=router.incarnation,
            pid=1,
            host="test",
            state=state,
            control=router.address,
        )
        self.publish()

    def publish(self) -> None:
        self.version += 1
        self.publisher.send(self.view())

    def begin_anew(self) -> None:
        """As if restarted with its clock set back: it knows nobody and counts views from 1."""
        self.members.clear()
        self.version = 1
        for peer in self.peers:
            self.link.send(peer, Unknown())

    def fence(self) -> None:
        """Refuse all members for good."""
        for peer in self.peers:
            self.link.send(peer, Refused(reason="fenced by the test"))

    async def _receive(self) -> None:
        with suppress(LinkClosed):
            while True:
                peer, message = await self.link.recv()
                self.peers.add(peer)
                match message:
                    case Hello():
                        self.hellos.append(message)
                        self.link.send(
                            peer,
                            Welcome(protocol=1, heartbeat_ms=200, broadcast=self.broadcast),
                        )
                    case GetView():
                        self.link.send(peer, self.view())
                    case Heartbeat():
                        self.heartbeats.append(message)
                        if message.view_version < self.version:
                            self.link.send(peer, self.view())
                    case _ if type(message) in self.answers:
                        self.asked.append(message)
                        self.link.send(peer, self.answers[type(message)])


class Mesh:
    """The scripted mesh on its thread, and one gateway process."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.routers: dict[str, ScriptedRouter] = {}
        self.tokenizer = Tokenizer(MODEL)
        self.story = self.tokenizer.encode(STORY, add_special_tokens=False)
        self.answer: Callable[[Submit], Script | Rejected] = self.tell_story
        self.net = Net()
        self.planner = ScriptedPlanner(self.net, run_dir)
        self.call(self.planner.open)
        self.gateway: subprocess.Popen[str] | None = None
        self.url = ""
        self.tls: ssl.SSLContext | None = None  # with what a client trusts the gateway

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run ``function`` on the mesh's event loop."""

        async def run() -> None:
            function(*args)

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(DEADLINE_S)

    def tell_story(self, submit: Submit) -> Script:
        return Script(self.story, stop_token=1)

    def add_router(self, id_: str) -> ScriptedRouter:
        router = ScriptedRouter(
            self.net,
            id_,
            f"ipc://{self.run_dir}/{id_}.{len(self.routers)}.sock",
            lambda submit: self.answer(submit),  # noqa: PLW0108 - tests replace it
            incarnation=time.monotonic_ns(),
        )
        self.routers[id_] = router
        self.call(router.open)
        self.call(self.planner.put, router)
        return router

    def remove_router(self, id_: str) -> None:
        """As if its process died: the connection closes, then the view says so."""
        router = self.routers.pop(id_)

        def gone() -> None:
            router.close()
            del self.planner.members[id_]
            self.planner.publish()

        self.call(gone)

    def start_gateway(
        self,
        *,
        finish_s: float | None = None,
        environ: Mapping[str, str] | None = None,
        id_: str = "gateway-0",
        listener: socket.socket | None = None,
        **settings: object,
    ) -> None:
        """``settings`` by key, ``__`` for the dot. ``finish_s`` as of ``gateway.service.serve``.
        ``environ``: variables besides those of the tests' own process. ``listener``: a bound socket
        that it is to listen on.
        """
        port = free_port() if listener is None else listener.getsockname()[1]
        chosen = {
            "mesh.run_dir": self.run_dir,
            "model.path": MODEL,
            "model.name": "tales",
            "gateway.port": port,
            "gateway.max_queue": 16,
            "gateway.router_wait_s": 1.0,
            "logs.format": "json",
        } | {key.replace("__", "."): value for key, value in settings.items()}
        self.log_path = self.run_dir / f"{id_}.log"
        with self.log_path.open("w") as log:
            self.gateway = _spawn(id_, chosen, log, finish_s, environ, listener)
        host = chosen.get("gateway.host", "127.0.0.1")
        scheme = "https" if "gateway.tls_cert" in chosen else "http"
        where = f"[{host}]" if ":" in str(host) else host
        self.url = f"{scheme}://{where}:{port}"

        def answers() -> bool:
            assert self.gateway is not None
            assert self.gateway.poll() is None, self.log_path.read_text()
            return self.status("/health") == 200

        wait_until(answers, "the gateway answers /health")

    def spawn_gateway(self, port: int, **settings: object) -> subprocess.Popen[str]:
        """A gateway that is expected to end by itself; its log is its ``stderr``."""
        chosen = {"mesh.run_dir": self.run_dir, "model.path": MODEL, "gateway.port": port}
        chosen |= {key.replace("__", "."): value for key, value in settings.items()}
        return _spawn("gateway-1", chosen, subprocess.PIPE)

    def proc(self, name: str) -> str:
        """``/proc/PID/name`` of the gateway."""
        assert self.gateway is not None
        return Path(f"/proc/{self.gateway.pid}/{name}").read_text()

    def busy_routers(self, client: openai.OpenAI) -> set[str]:
        """Send a few requests at once; the routers that have had any."""
        client.completions.create(model="tales", prompt=[[5], [6], [7]])
        return {id_ for id_, router in self.routers.items() if router.submits}

    def wait_ready(self) -> None:
        wait_until(lambda: self.status("/ready") == 200, "/ready")

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(
                self.url + path, timeout=DEADLINE_S, context=self.tls
            ) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def metric(self, name: str) -> float:
        """A number of the gateway's metrics page."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=DEADLINE_S) as response:
            page = response.read().decode()
        found = re.search(rf"^moemesh_{name} (\S+)$", page, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def logs(self) -> list[dict[str, object]]:
        """Whole lines; the gateway may be writing another."""
        written, _, _ = self.log_path.read_text().rpartition("\n")
        return [json.loads(line) for line in written.splitlines()]

    def client(self, key: str = "unused") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S
        )

    def idle(self) -> bool:
        """Nothing of any request is left on a router."""
        return not any(router.running for router in self.routers.values())

    def reset(self) -> None:
        self.answer = self.tell_story
        for router in self.routers.values():
            router.submits.clear()
            router.cancelled.clear()
            router.running.clear()
            router.released = False

    def close(self) -> None:
        if self.gateway is not None:
            self.gateway.send_signal(signal.SIGINT)
            try:
                self.gateway.wait(DEADLINE_S)
            finally:
                self.gateway.kill()
        for router in self.routers.values():
            self.call(router.close)
        self.call(self.planner.close)
        self.net.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(DEADLINE_S)


def free_port(host: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as probe:
        return int(probe.getsockname()[1])


_MAIN = """
from functools import partial
from gateway.service import serve
from mesh.service import run_service
run_service("gateway", partial(serve, finish_s={finish_s}))
"""


def _spawn(
    id_: str,
    settings: Mapping[str, object],
    stderr: IO[str] | int,
    finish_s: float | None = None,
    environ: Mapping[str, str] | None = None,
    listener: socket.socket | None = None,
) -> subprocess.Popen[str]:
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    main = ["-m", "gateway"] if finish_s is None else ["-c", _MAIN.format(finish_s=finish_s)]
    fds = () if listener is None else (listener.fileno(),)
    flags += [part for fd in fds for part in ("--listen-fd", str(fd))]
    return subprocess.Popen(
        [sys.executable, *main, "--id", id_, *flags],
        stderr=stderr,
        text=True,
        pass_fds=fds,
        env={key: value for key, value in os.environ.items() if not key.startswith("MOEMESH_")}
        | dict(environ or {}),
    )
