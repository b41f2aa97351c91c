"""The launcher over small real processes; the whole mesh is in tests/e2e/test_launcher.py."""

import asyncio
import os
import signal
import sys

import pytest
from rich.console import Console

from compose.child import Child
from compose.console import LauncherConsole
from compose.control import Restart, order
from compose.launcher import Launcher
from compose.processes import ProcessSpec
from compose.restarts import RestartPolicy
from mesh.settings import MeshSettings, Settings

DEADLINE_S = 90

OBEDIENT = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT}})
print('{{"level": "error", "event": "up.{name}"}}', flush=True)
signal.sigwait({{signal.SIGINT}})
with open({journal!r}, "a") as f: f.write({name!r} + "\\n")
"""
"""Not a handler and a pause: a signal that is handled just before the pause would not end it."""


class Screen:
    """Collects what the launcher prints and lets a test wait for a text, or its n-th time."""

    def __init__(self) -> None:
        self.text = ""
        self.changed = asyncio.Event()

    def write(self, text: str) -> None:
        self.text += text
        self.changed.set()

    def flush(self) -> None:
        pass

    async def shows(self, text: str, times: int = 1) -> None:
        while self.text.count(text) < times:
            self.changed.clear()
            await self.changed.wait()


class NoFleet:
    """Nobody gives orders here."""

    def __init__(self, crew, planner):
        pass


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "journal"


def obedient(name, journal):
    code = OBEDIENT.format(journal=str(journal), name=name)
    return ProcessSpec(name, name.split("-")[0], (sys.executable, "-c", code))


def launch(tmp_path, specs, scenario, **options):
    """Runs a launcher beside ``scenario(screen)``; returns its exit code and what it printed."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()

    async def main():
        screen = Screen()
        with LauncherConsole(Console(file=screen, width=300)) as console:
            settings = Settings(mesh=MeshSettings(run_dir=str(run_dir)))
            launcher = Launcher(
                settings, specs, run_dir, console, model="m", **({"fleet_of": NoFleet} | options)
            )
            async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
                code = group.create_task(launcher.run())
                group.create_task(scenario(screen))
        return code.result(), screen.text

    return asyncio.run(main())


def test_children_stop_from_the_client_inwards(tmp_path, journal):
    names = ["planner", "expert-0", "router-0", "gateway-0"]

    async def scenario(screen):
        for name in names:
            await screen.shows(f"up.{name}")
        os.kill(os.getpid(), signal.SIGTERM)

    specs = [obedient(name, journal) for name in names]
    code, text = launch(tmp_path, specs, scenario)
    assert code == 0
    assert "logs are kept" not in text
    assert journal.read_text().split() == names[::-1]


def test_errors_of_children_reach_the_console(tmp_path, journal):
    async def scenario(screen):
        await screen.shows("planner up.planner")
        os.kill(os.getpid(), signal.SIGINT)

    assert launch(tmp_path, [obedient("planner", journal)], scenario)[0] == 0


def test_a_child_that_is_killed_is_reported_and_started_again(tmp_path, journal):
    code_line = "import os; print('my pid', os.getpid(), flush=True); os.kill(os.getpid(), 9)"
    dies = ProcessSpec("expert-0", "expert", (sys.executable, "-c", code_line))

    async def scenario(screen):
        await screen.shows("expert-0 was killed by SIGKILL; starting again in", times=2)
        os.kill(os.getpid(), signal.SIGTERM)

    policy = RestartPolicy(first_delay_s=0.01, max_delay_s=0.01)
    code, text = launch(tmp_path, [obedient("planner", journal), dies], scenario, policy=policy)
    assert code == 0
    assert "my pid" in text


def test_a_child_that_keeps_dying_at_the_start_ends_the_mesh_and_leaves_nobody(tmp_path, journal):
    go = tmp_path / "go"
    line = (
        "import os, sys, time\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "sys.exit(1)"
    )
    dies = ProcessSpec("router-0", "router", (sys.executable, "-c", line))

    async def scenario(screen):
        await screen.shows("up.planner")  # before that, a signal ends it without a word
        go.touch()
        await screen.shows("stopped")

    policy = RestartPolicy(max_deaths=3, first_delay_s=0.01)
    code, text = launch(tmp_path, [obedient("planner", journal), dies], scenario, policy=policy)
    assert code == 1
    assert "router-0 exited with code 1 before the mesh was ready" in text
    assert text.count("starting again") == 2
    assert f"logs are kept until the next start: {tmp_path / 'run' / 'logs'}" in text
    assert (tmp_path / "run" / "logs" / "router-0.log").exists()
    assert journal.read_text().split() == ["planner"]


@pytest.mark.parametrize("code", [1, 2])
def test_a_mesh_that_was_ready_starts_a_dying_child_again_however_often(
    tmp_path, journal, monkeypatch, code
):
    async def at_once(self, planner):
        self._incomplete.clear()

    monkeypatch.setattr(Launcher, "_until_whole", at_once)
    go = tmp_path / "go"
    line = (
        "import os, sys, time\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        f"sys.exit({code})"
    )
    dies = ProcessSpec("expert-0", "expert", (sys.executable, "-c", line))

    async def scenario(screen):
        await screen.shows("ready after")
        go.touch()
        await screen.shows(f"expert-0 exited with code {code}; starting again in", times=4)
        os.kill(os.getpid(), signal.SIGTERM)

    policy = RestartPolicy(max_deaths=2, first_delay_s=0.01, max_delay_s=0.01)
    specs = [obedient("planner", journal), dies]
    assert launch(tmp_path, specs, scenario, policy=policy)[0] == 0


def test_a_mesh_that_does_not_get_ready_in_time_is_stopped(tmp_path, journal):
    async def scenario(screen):
        await screen.shows("stopped")

    specs = [obedient("planner", journal)]
    code, text = launch(tmp_path, specs, scenario, start_timeout_s=0.5)
    assert code == 1
    assert "not ready after 0.5 s" in text


def test_a_second_signal_kills_at_once(tmp_path):
    stubborn = (
        "import signal; signal.signal(signal.SIGINT, lambda *a: print("
        '\'{"level":"error","event":"ignored"}\', flush=True))\n'
        'print(\'{"level":"error","event":"up"}\', flush=True)\nwhile True: signal.pause()'
    )
    spec = ProcessSpec("gateway-0", "gateway", (sys.executable, "-c", stubborn))

    async def scenario(screen):
        await screen.shows("gateway-0 up")
        os.kill(os.getpid(), signal.SIGINT)
        await screen.shows("gateway-0 ignored")
        os.kill(os.getpid(), signal.SIGINT)

    code, _ = launch(tmp_path, [spec], scenario, grace_s=1000)
    assert code == 0


def test_a_signal_while_children_are_started_stops_further_starts(tmp_path, journal, monkeypatch):
    started = []
    start = Child.start

    async def noted(self):
        started.append(self.spec.id)
        if len(started) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        await start(self)

    monkeypatch.setattr(Child, "start", noted)

    async def scenario(screen):
        await screen.shows("stopped")

    specs = [obedient(f"expert-{index}", journal) for index in range(12)]
    assert launch(tmp_path, specs, scenario)[0] == 0
    assert len(started) <= 2


def test_an_ignored_hang_up_stays_ignored(tmp_path, journal):
    async def scenario(screen):
        await screen.shows("up.planner")
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)  # a second signal of one that stops would kill

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch(tmp_path, [obedient("planner", journal)], scenario)[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert journal.read_text().split() == ["planner"]


LEAVES = """
import signal
awaited = {{signal.SIGINT, signal.SIGTERM}}
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
print('{{"level": "error", "event": "up.{name}"}}', flush=True)
number = signal.sigwait(awaited)
with open({journal!r}, "a") as f: f.write(f"{name} {{signal.Signals(number).name}}\\n")
"""


def test_processes_that_are_let_go_may_end_their_work_and_are_started_again_only_if_asked(
    tmp_path, journal, monkeypatch
):
    async def at_once(self, planner):
        self._incomplete.clear()

    monkeypatch.setattr(Launcher, "_until_whole", at_once)

    def leaves(name):
        code = LEAVES.format(journal=str(journal), name=name)
        return ProcessSpec(name, name.split("-")[0], (sys.executable, "-c", code))

    class Orders:
        def __init__(self, crew, planner):
            self.crew = crew

        async def carry_out(self, order, say):
            self.crew.hire(leaves("router-1"))
            await screens[0].shows("up.router-1")
            await self.crew.renew("router-0")
            await screens[0].shows("up.router-0", times=2)
            await self.crew.dismiss("router-1")
            say(" ".join(spec.id for spec in self.crew.specs()))

    screens, told = [], []

    async def scenario(screen):
        screens.append(screen)
        await screen.shows("ready after")
        await screen.shows("up.planner")  # before that, a signal ends it without a word
        await screen.shows("up.router-0")
        settings = Settings(mesh=MeshSettings(run_dir=str(tmp_path / "run")))
        await order(settings, Restart(), told.append)
        os.kill(os.getpid(), signal.SIGTERM)

    specs = [leaves("planner"), leaves("router-0")]
    code, text = launch(tmp_path, specs, scenario, fleet_of=Orders)
    assert code == 0
    assert told == ["planner router-0"]
    assert "starting again in" not in text
    assert journal.read_text().splitlines() == [
        "router-0 SIGTERM", "router-1 SIGTERM", "router-0 SIGINT", "planner SIGINT",
    ]  # fmt: skip
