"""The systemd units that ship: well formed, hardened, and what they start does what they say."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.meshes import MOEMESH, free_port
from tests.support.supervision import Supervised, Unit, frozen_thread

START_S = 90.0
WATCHDOG_S = 2.5
"""Instead of the units' minute, so that a test need not wait for so long."""
SERVICES = {
    "planner": ("moemesh-planner.service", ""),
    "expert": ("moemesh-expert@.service", "0"),
    "router": ("moemesh-router@.service", "0"),
    "gateway": ("moemesh-gateway.service", ""),
}
analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root directory with the units in it, and a settings file outside of it."""
    root = tmp_path_factory.mktemp("root")
    run("install-systemd", "--root", str(root), "--config", str(root / "mesh.toml"))
    return root


def run(*arguments: str) -> str:
    done = subprocess.run(
        [MOEMESH, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def unit(root: Path, role: str) -> Unit:
    name, instance = SERVICES[role]
    return Unit(root / "etc/systemd/system" / name, instance)


def test_a_dry_run_writes_nothing_and_shows_all(tmp_path: Path) -> None:
    shown = run("install-systemd", "--root", str(tmp_path), "--dry-run")
    assert list(tmp_path.iterdir()) == []
    assert shown.count("new: ") == 6
    assert "WatchdogSec=60" in shown


def test_installing_again_changes_nothing(installed: Path) -> None:
    again = run("install-systemd", "--root", str(installed), "--config", f"{installed}/mesh.toml")
    assert again.count("as it is: ") == 6


@analyze
def test_systemd_accepts_the_units(installed: Path) -> None:
    for name in ("moemesh.target", "moemesh-gateway.service", "moemesh-planner.service",
                 "moemesh-router@.service", "moemesh-expert@.service"):  # fmt: skip
        done = subprocess.run(
            ["systemd-analyze", "verify", str(installed / "etc/systemd/system" / name)],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), name


@analyze
@pytest.mark.parametrize(
    ("name", "most"), [("gateway", 3.0), ("planner", 3.0), ("router@", 4.0), ("expert@", 4.0)]
)
def test_services_may_do_little(installed: Path, name: str, most: float) -> None:
    path = installed / f"etc/systemd/system/moemesh-{name}.service"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={int(most * 10)}", path],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


class Host:
    """The services of one host, each supervised as its unit says."""

    def __init__(self, root: Path, home: Path, model: Path) -> None:
        self.home = home
        self.port = free_port()
        self.services: dict[str, Supervised] = {}
        self._root = root
        (root / "mesh.toml").write_text(
            f'[mesh]\nexperts = 1\n[model]\npath = "{model}"\n'
            f"[gateway]\nport = {self.port}\n[planner]\nfirst_placement_wait_s = 1.0\n"
        )

    def start(self, role: str) -> Supervised:
        self.services[role] = Supervised(
            unit(self._root, role),
            self.home / role,
            {
                "MOEMESH_MESH_RUN_DIR": str(self.home / "run"),
                "MOEMESH_MESH_STATE_DIR": str(self.home / "state"),
            },
            watchdog_s=WATCHDOG_S,
        )
        return self.services[role]

    def complete(self) -> int:
        body = json.dumps({"prompt": [9, 10, 11], "max_tokens": 5, "ignore_eos": True}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            body,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(json.loads(answer.read())["usage"]["completion_tokens"])


@pytest.fixture
def host(installed: Path, tmp_path: Path, tiny_deepseek: Path) -> Iterator[Host]:
    host = Host(installed, tmp_path, tiny_deepseek)
    yield host
    for service in host.services.values():
        service.end(signal.SIGKILL)


def test_what_the_units_start_tells_systemd_the_truth(host: Host) -> None:
    gateway, router = host.start("gateway"), host.start("router")
    host.start("planner").wait_for("READY=1", START_S)
    # Neither can do its work before there are experts, and both ask for the time that it takes.
    for waiting in (gateway, router):
        waiting.wait_for("EXTEND_TIMEOUT_USEC=90000000", START_S)
    gateway.wait_for("STATUS=router-0: no placement has come from the planner", START_S)
    assert not any("READY=1" in one.states for one in (gateway, router))
    expert = host.start("expert")
    for service in (expert, router, gateway):
        service.wait_for("READY=1", START_S)
        service.wait_for("STATUS=ready", START_S)
    assert host.complete() == 5

    # A compute thread that hangs is found though all other threads go on; so is a whole process.
    with frozen_thread(expert.process.pid, "compute"):
        assert expert.watchdog_expires(START_S)
        expert.abort()
    assert "Current thread" in expert.aborted()  # it logged where each thread was
    with frozen_thread(router.process.pid, "compute"):
        assert router.watchdog_expires(START_S)
        router.abort()
    router.aborted()
    gateway.process.send_signal(signal.SIGSTOP)
    assert gateway.watchdog_expires(START_S)
    gateway.process.send_signal(signal.SIGCONT)

    # Told to leave, they say so and end well.
    for service in (gateway, host.services["planner"]):
        assert service.end() == 0, service.tail()
        assert any("STOPPING=1" in state for state in service.states)


def test_a_service_that_cannot_serve_is_not_started_again(host: Host, installed: Path) -> None:
    (installed / "mesh.toml").write_text('[model]\npath = "/nowhere"\n')
    planner = host.start("planner")
    assert planner.process.wait(START_S) == 2
    assert unit(installed, "planner").never_after == {"2"}
