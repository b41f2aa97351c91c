"""``moemesh logs`` on a running mesh."""

from __future__ import annotations

import itertools
import json
import selectors
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.support.meshes import MOEMESH, Mesh


def ask(mesh: Mesh, request_id: str) -> str:
    """The id in the answer to a small request of this name."""
    call = urllib.request.Request(
        f"{mesh.url}/v1/completions",
        json.dumps({"prompt": "Emma was", "max_tokens": 3}).encode(),
        {"Content-Type": "application/json", "X-Request-Id": request_id},
    )
    with urllib.request.urlopen(call, timeout=60) as answer:
        assert answer.headers["X-Request-Id"] == request_id
        return str(json.loads(answer.read())["id"])


def events(mesh: Mesh, request_id: str) -> list[dict[str, object]]:
    printed = mesh.run("logs", "--json", "--request", request_id)
    return [json.loads(line) for line in printed.splitlines()]


def test_a_request_is_followed_through_every_process_in_order(demo_mesh: Mesh) -> None:
    answer_id = ask(demo_mesh, "followed-1")
    found = events(demo_mesh, "followed-1")
    assert [(line["id"], line["event"]) for line in found] == [
        ("router-0", "sequence.queued"),
        ("router-0", "sequence.finished"),
        ("gateway-0", "request.answered"),
    ]
    assert {line["trace"] for line in found} == {"followed-1"}
    assert found[1]["tokens"] == 3
    assert found[2]["request"] == answer_id
    assert events(demo_mesh, answer_id) == found
    done = subprocess.run(
        [MOEMESH, "logs", "--request", "followed-2", "--set", f"mesh.run_dir={demo_mesh.run_dir}"],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert "no line of a request 'followed-2'" in " ".join(done.stderr.split())


def test_all_processes_are_one_log_by_time(demo_mesh: Mesh) -> None:
    lines = [json.loads(line) for line in demo_mesh.run("logs", "--json").splitlines()]
    assert {line["id"] for line in lines} == {
        "planner", "gateway-0", "router-0", "expert-0", "expert-1",
    }  # fmt: skip
    stamps = [line["timestamp"] for line in lines]
    # Threads of one process may write a moment out of order.
    assert sum(a > b for a, b in itertools.pairwise(stamps)) <= len(stamps) // 10
    readable = demo_mesh.run("logs", "--tail", "2", "planner").splitlines()
    assert len(readable) == 2
    assert all(line.startswith("planner ") for line in readable)


def test_following_shows_what_is_written_from_then_on(demo_mesh: Mesh) -> None:
    command = [MOEMESH, "logs", "--follow", "--tail", "0", "--request", "later", "--json"]
    command += ["--set", f"mesh.run_dir={demo_mesh.run_dir}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        try:
            assert follower.stdout is not None
            for _ in range(50):  # the first may be history by the time it is looked at
                ask(demo_mesh, "later")
                if follower.poll() is None and (line := _line(follower)):
                    assert json.loads(line)["trace"] == "later"
                    return
            raise AssertionError("nothing was shown")
        finally:
            follower.kill()


def _line(follower: subprocess.Popen[str]) -> str:
    assert follower.stdout is not None
    with selectors.DefaultSelector() as ready:
        ready.register(follower.stdout, selectors.EVENT_READ)
        return follower.stdout.readline() if ready.select(2.0) else ""


def test_services_that_were_started_by_themselves_say_where_they_log(tmp_path: Path) -> None:
    log = tmp_path / "planner's own.log"
    where = ["--set", f"mesh.run_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "planner_svc", *where]
    with log.open("wb") as out, subprocess.Popen(command, stderr=out) as planner:
        try:
            deadline = time.monotonic() + 60
            while b"service.ready" not in log.read_bytes():
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            done = subprocess.run(
                [MOEMESH, "logs", *where], check=False, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 1
            said = " ".join(done.stderr.split())
            assert f"planner (pid {planner.pid}): {log}" in said
        finally:
            planner.send_signal(signal.SIGINT)
            planner.wait(30)
    assert not list((tmp_path / "run").iterdir())  # what it made goes with it


def test_a_mesh_that_is_not_there_has_no_logs(tmp_path: Path) -> None:
    done = subprocess.run(
        [MOEMESH, "logs", "--set", f"mesh.run_dir={tmp_path / 'none'}"],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "is the mesh up" in done.stderr
