"""`moemesh up` with real processes: what a user does and sees, from the start to Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.support.threads import compute_cpus, shares

START_S = 120
STOP_S = 60


def moemesh(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", "from compose.cli import main; main()", *arguments)


class Up:
    """A running ``moemesh up`` whose output can be waited for."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        self.run_dir = run_dir
        self.where = ("--set", f"mesh.run_dir={run_dir}")
        state = ("--set", f"mesh.state_dir={run_dir.parent / 'state'}")
        self.text = ""
        self.shm_before = set(Path("/dev/shm").iterdir())
        self.process = subprocess.Popen(
            moemesh("up", *self.where, *state, "--port", "0", *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.children: list[psutil.Process] = []

    def shows(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """Reads on until the output matches; fails with all of it when it does not."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not (found := re.search(pattern, self.text)):
                assert selector.select(deadline - time.monotonic()), (
                    f"no {pattern!r} within {timeout_s} s in:\n{self.text}"
                )
                chunk = os.read(self.process.stdout.fileno(), 65536)
                assert chunk, f"ended without {pattern!r}:\n{self.text}"
                self.text += chunk.decode()
        return found

    def ready(self) -> str:
        url = self.shows(r"ready after .*?(http://\S+)")[1]
        self.shows("Ctrl-C stops it")
        self.children = psutil.Process(self.process.pid).children(recursive=True)
        return url

    def wait(self) -> int:
        code = self.process.wait(STOP_S)
        self.text += self.process.stdout.read().decode()
        return code

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            moemesh(*arguments, *self.where),
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def status(self) -> dict:
        done = self.run("status", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def assert_nothing_is_left(self, *, with_run_dir: bool = True) -> None:
        _, alive = psutil.wait_procs(self.children, timeout=STOP_S)
        assert not alive
        if with_run_dir:
            assert not self.run_dir.exists()
            assert str(self.run_dir) not in Path("/proc/net/unix").read_text()
        assert set(Path("/dev/shm").iterdir()) <= self.shm_before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def up(tmp_path_factory):
    started: list[Up] = []

    def start(*arguments: str) -> Up:
        one = Up(tmp_path_factory.mktemp("mesh") / "run", *arguments)
        started.append(one)
        return one

    yield start
    for one in started:
        one.close()


def test_a_mesh_until_its_launcher_is_killed_and_the_next_one_until_ctrl_c(up):
    mesh = up()
    url = mesh.ready()

    # the openai client, and the very line that was printed
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.completions.create(
        model=model, prompt="Genesis 51\n\n1 ", max_tokens=16, temperature=0
    )
    assert answer.choices[0].text.strip()
    assert answer.usage.completion_tokens == 16
    line = mesh.text[mesh.text.index("curl -s") : mesh.text.index("`moemesh status`")]
    pasted = subprocess.run(["bash", "-c", line], check=True, capture_output=True, timeout=60)
    assert json.loads(pasted.stdout)["choices"][0]["text"]

    # status
    status = mesh.status()
    assert status["ready"]
    members = {member["id"]: member for member in status["members"]}
    assert members.keys() == {"planner", "router-0", "expert-0", "expert-1", "gateway-0"}
    assert {member["state"] for member in members.values()} == {"ready"}
    assert {member["pid"] for member in members.values()} == {c.pid for c in mesh.children}
    table = mesh.run("status")
    assert "expert-1" in table.stdout

    # each worker computes on CPUs of its own
    pids = [members[f"expert-{index}"]["pid"] for index in range(2)]
    assert [compute_cpus(pid) for pid in pids] == shares(2)

    # a second launcher on the same mesh is refused and harms nothing
    second = mesh.run("up", "--port", "0")
    assert second.returncode == 1
    assert str(mesh.process.pid) in second.stderr

    # an expert worker is killed: told, started again, whole again, and it serves
    os.kill(members["expert-1"]["pid"], signal.SIGKILL)
    mesh.shows("expert-1 was killed by SIGKILL")
    mesh.shows("whole again")
    again = client.completions.create(
        model=model, prompt="Genesis 51\n\n1 ", max_tokens=16, temperature=0
    )
    assert again.choices[0].text == answer.choices[0].text
    (heir,) = (m["pid"] for m in mesh.status()["members"] if m["id"] == "expert-1")
    assert heir != pids[1]
    assert compute_cpus(heir) == shares(2)[1]

    # the launcher is killed: its children die with it, and the next start cleans up
    mesh.children = psutil.Process(mesh.process.pid).children(recursive=True)
    assert len(mesh.children) == 5
    mesh.process.kill()
    mesh.assert_nothing_is_left(with_run_dir=False)
    assert mesh.run("down").returncode == 1
    after = Up(mesh.run_dir, "--experts", "1")
    try:
        after.ready()
        after.process.send_signal(signal.SIGINT)
        assert after.wait() == 0
        after.assert_nothing_is_left()
    finally:
        after.close()


def test_ctrl_c_while_loading_leaves_nothing(up):
    mesh = up("--experts", "1")
    mesh.shows(r"router-0: \w+")
    mesh.children = psutil.Process(mesh.process.pid).children(recursive=True)
    assert len(mesh.children) == 4
    mesh.process.send_signal(signal.SIGINT)
    assert mesh.wait() == 0
    assert "stopped" in mesh.text
    mesh.assert_nothing_is_left()


def test_what_cannot_work_is_said_before_anything_starts(up, tmp_path):
    def refusal(*arguments: str) -> str:
        mesh = up(*arguments)
        assert mesh.wait() == 2
        assert not mesh.run_dir.exists()
        return mesh.text

    assert "did you mean router.max_running" in refusal("--set", "router.max_runing=1")
    assert "no such file" in refusal("--model", str(tmp_path / "none"))
    broken = tmp_path / "broken"
    source = Path(__file__).parents[2] / "demo" / "model"
    shutil.copytree(source, broken)
    with (broken / "model.safetensors").open("r+b") as weights:
        weights.truncate(1_000_000)
    assert "truncated" in refusal("--model", str(broken)).lower()


def test_weights_that_are_not_numbers_end_the_start_and_name_their_tensor(up, tmp_path):
    broken = tmp_path / "nan"
    shutil.copytree(Path(__file__).parents[2] / "demo" / "model", broken)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    weights = load_file(broken / "model.safetensors")
    weights[name][0, 0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    mesh = up("--model", str(broken), "--experts", "1")
    assert mesh.wait() == 1
    assert f"{name} holds NaN" in mesh.text
