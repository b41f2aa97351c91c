"""Hosts made of network namespaces, and a mesh that is spread over them with keys.

Each host has its own network namespace, run directory, configuration and host id; what runs there
are the services' real processes, each started alone. Their network is a thread of the test that
passes IP packets between the hosts' TUN devices: it can lose and delay them, and cut a host off so
that packets vanish without a trace, as when somebody trips over a cable. The kernel need not know
bridges, veth or netem.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import http.client
import itertools
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.support.meshes import MOEMESH

START_DEADLINE_S = 300.0
STOP_DEADLINE_S = 90.0
CONTROL_PORT, BROADCAST_PORT, HTTP_PORT = 7000, 7001, 8000
PORTS = "7100-7109"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_made = itertools.count()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def skip_without_namespaces() -> None:
    """Skip the test, with the reason, where hosts cannot be made."""
    try:
        with Hosts(("probe",)):
            pass
    except FileNotFoundError as error:
        pytest.skip(f"no network namespaces here: {error}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    except OSError as error:
        pytest.skip(f"no TUN devices in network namespaces here: {error}")


class Network:
    """Passes packets between TUN devices by their destination, until ``close``.

    ``delay_s`` each way; ``loss`` is the share of packets that vanish.
    """

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)
        self.delay_s = 0.0
        self.loss = 0.0
        self.cut: frozenset[bytes] = frozenset()
        self.passed = self.lost = 0
        self._draw = random.Random(7)
        self._device_of: dict[bytes, int] = {}
        self._epoll = select.epoll()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._late: list[tuple[float, int, bytes]] = []  # due, number, packet
        self._number = itertools.count()

    def attach(self, address: str, device: int) -> None:
        """Take a TUN device over, before ``start``."""
        self._device_of[socket.inet_aton(address)] = device
        self._epoll.register(device, select.EPOLLIN)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while True:
            pause_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            for device, _ in self._epoll.poll(pause_s):
                if device == self._stop:
                    return
                self._take(os.read(device, 65_536))
            while self._late and self._late[0][0] <= time.monotonic():
                self._deliver(heapq.heappop(self._late)[2])

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        if self._thread.ident is not None:
            self._thread.join()
        for fd in (*self._device_of.values(), self._stop):
            os.close(fd)
        self._epoll.close()

    def _take(self, packet: bytes) -> None:
        if self.loss and self._draw.random() < self.loss:
            self.lost += 1
        elif self.delay_s:
            due = time.monotonic() + self.delay_s
            heapq.heappush(self._late, (due, next(self._number), packet))
        else:
            self._deliver(packet)

    def _deliver(self, packet: bytes) -> None:
        source, destination = packet[12:16], packet[16:20]  # RFC 791
        device = self._device_of.get(destination)
        if device is None or self.cut & {source, destination}:
            self.lost += 1
            return
        with contextlib.suppress(OSError):  # the device is going
            os.write(device, packet)
            self.passed += 1


class Hosts:
    """``names`` are hosts with addresses 10.77.0.1, .2 and so on; they end with the ``with``."""

    def __init__(self, names: tuple[str, ...]) -> None:
        unique = f"mm{os.getpid()}x{next(_made)}"
        self._netns = {name: f"{unique}-{name}" for name in names}
        self.address = {name: f"10.77.0.{i}" for i, name in enumerate(names, 1)}
        self.network = Network()

    def __enter__(self) -> Self:
        _remove_left_behind()
        try:
            for name, netns in self._netns.items():
                ip("netns", "add", netns)
                with self.entered(name):
                    self.network.attach(self.address[name], _tun("lan"))
                ip("-n", netns, "addr", "add", f"{self.address[name]}/24", "dev", "lan")
                ip("-n", netns, "link", "set", "lan", "up")
                ip("-n", netns, "link", "set", "lo", "up")
            self.network.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.network.close()
        for netns in self._netns.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", netns)

    def cut(self, host: str) -> None:
        """Nothing reaches the host or leaves it; neither end is told."""
        self.network.cut |= {socket.inet_aton(self.address[host])}

    def restore(self, host: str) -> None:
        self.network.cut -= {socket.inet_aton(self.address[host])}

    def command(self, host: str, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self._netns[host], *words]

    @contextlib.contextmanager
    def entered(self, host: str) -> Iterator[None]:
        """Sockets and devices that this thread makes meanwhile are the host's."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (
            Path("/proc/thread-self/ns/net").open() as ours,
            Path("/run/netns", self._netns[host]).open() as theirs,
        ):
            if libc.setns(theirs.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            try:
                yield
            finally:
                libc.setns(ours.fileno(), _CLONE_NEWNET)


def _remove_left_behind() -> None:
    """Namespaces of test processes that were killed."""
    for path in Path("/run/netns").glob("mm*x*-*"):
        pid = path.name.removeprefix("mm").partition("x")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", path.name)


def _tun(name: str) -> int:
    """A TUN device in this thread's namespace; it goes when it is closed."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH14x", name.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(device, _TUNSETIFF, request)
    except OSError:
        os.close(device)
        raise
    return device


class WideMesh:
    """A gateway and a planner on ``front``, a router on ``near``, an expert worker on each of
    ``workers``; over TCP with keys. Keyword settings as for ``Mesh``.
    """

    def __init__(
        self,
        hosts: Hosts,
        home: Path,
        model: Path,
        workers: tuple[str, ...],
        **settings: Any,
    ) -> None:
        self.hosts = hosts
        self._home = home
        self._where = {"planner": "front", "router-0": "near", "gateway-0": "front"}
        self._where |= {f"expert-{i}": name for i, name in enumerate(workers)}
        front = hosts.address["front"]
        self._settings = {
            "mesh__planner": f"tcp://{front}:{CONTROL_PORT}",
            "mesh__broadcast": f"tcp://{front}:{BROADCAST_PORT}",
            "mesh__experts": len(workers),
            "network__listen": "lan",
            "network__ports": PORTS,
            "security__curve_dir": str(home / "keys"),
            "model__path": str(model),
            "model__exact": True,
            "gateway__host": front,
            "gateway__port": HTTP_PORT,
            "gateway__allow_anonymous": True,
        } | settings
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        pairs = [part for id_ in self._where for part in (id_, id_.partition("-")[0])]
        command = [MOEMESH, "keygen", "--out", str(self._home / "keys"), *pairs, "admin", "admin"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        try:
            for id_ in self._where:
                self.start(id_)
            self.wait_for(lambda: self.get("/ready")[0] == 200, "a ready mesh", START_DEADLINE_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGINT)
        for process in self.processes.values():
            try:
                process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise AssertionError(f"a process did not stop:\n{self.logs()}") from None

    def start(self, id_: str) -> None:
        """Start one service alone, as systemd would on its host."""
        host = self._where[id_]
        config = self._home / f"{host}.toml"
        config.write_text(self._toml(host))
        package = {"router": "router_svc", "expert": "expert_svc", "planner": "planner_svc"}
        module = package.get(id_.partition("-")[0], "gateway")
        command = [sys.executable, "-m", module, "--config", str(config), "--id", id_]
        command += ["--parent-pid", str(os.getpid())]  # they end with the test, however it ends
        with (self._home / f"{id_}.log").open("ab") as log:
            self.processes[id_] = subprocess.Popen(
                self.hosts.command(host, *command),
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def _toml(self, host: str) -> str:
        own = {
            "mesh__run_dir": str(self._home / f"run-{host}"),
            "mesh__state_dir": str(self._home / f"state-{host}"),
            "network__host_id": host,
        }
        sections: dict[str, list[str]] = {}
        for key, value in (self._settings | own).items():
            section, name = key.split("__", 1)
            sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
        return "".join(f"[{name}]\n" + "\n".join(rows) + "\n" for name, rows in sections.items())

    def wait_for(self, condition: Any, what: str, deadline_s: float = 120.0) -> None:
        """Poll an observable condition until it holds or the deadline passes."""
        end = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"waited {deadline_s} s for {what}:\n{self.logs()}")
            time.sleep(0.05)

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET; status 0 while nobody listens."""
        try:
            return self._ask("GET", path, None)
        except OSError:
            return 0, ""

    def complete(self, seed: int, max_tokens: int) -> Any:
        """A seeded completion, which has one right answer."""
        body = {
            "prompt": [seed + 8, 40, 90], "max_tokens": max_tokens, "seed": seed,
            "temperature": 0.8, "ignore_eos": True, "logprobs": 1,
        }  # fmt: skip
        status, answer = self._ask("POST", "/v1/completions", json.dumps(body))
        assert status == 200, answer
        return json.loads(answer)["choices"][0]

    def _ask(self, method: str, path: str, body: str | None) -> tuple[int, str]:
        front = self.hosts.address["front"]
        link = http.client.HTTPConnection(front, HTTP_PORT, timeout=120.0)
        try:
            with self.hosts.entered("front"):
                link.connect()
            link.request(method, path, body, {"Content-Type": "application/json"})
            answer = link.getresponse()
            return answer.status, answer.read().decode()
        finally:
            link.close()

    def figure(self, name: str) -> float:
        """A gauge of the gateway."""
        _status, page = self.get("/metrics")
        rows = (line for line in page.splitlines() if line.startswith(f"moemesh_{name} "))
        return float(next(rows).split()[1])

    def status(self) -> dict[str, Any]:
        """What ``moemesh status --json`` prints on the host of the planner."""
        config = str(self._home / "front.toml")
        command = self.hosts.command("front", MOEMESH, "status", "--json", "--config", config)
        done = subprocess.run(command, check=False, capture_output=True, timeout=60, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return dict(json.loads(done.stdout))

    def memory(self, id_: str) -> str:
        """What the process has mapped."""
        return Path(f"/proc/{self.processes[id_].pid}/maps").read_text()

    def log(self, id_: str) -> str:
        return (self._home / f"{id_}.log").read_text(errors="replace")

    def logs(self) -> str:
        return "\n".join(f"--- {id_}\n{self.log(id_)[-4000:]}" for id_ in self.processes)
