"""The units under a systemd of their own, booted in a container that debootstrap fills.

Real start, sandbox, watchdog and stop; what the rest of the suite does with ``ExecStart=`` alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from compose.docker.roots import Builder, instructions, overlay, stages

DOCKERFILE = Path(__file__).parents[2] / "compose" / "docker" / "Dockerfile"
WORK = Path("/var/tmp/moemesh-prove")
HOST = """
FROM base AS host
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    systemd dbus && rm -rf /var/lib/apt/lists/*
COPY --from=compute-packages /opt/moemesh /opt/moemesh
"""
UNITS = ["moemesh-planner", "moemesh-expert@0", "moemesh-expert@1", "moemesh-router@0",
         "moemesh-gateway"]  # fmt: skip
DRIVER = f"""
import json, os, pathlib, signal, subprocess, threading, time, urllib.request
units = {UNITS!r}

def sh(*argv, check=True):
    return subprocess.run(argv, check=check, capture_output=True, text=True).stdout.strip()

def shown(unit, *keys):
    return [sh("systemctl", "show", "-p", key, "--value", unit) for key in keys]

def ask(tokens):
    body = json.dumps(dict(prompt="Emma was not at all", max_tokens=tokens, ignore_eos=True))
    request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body.encode(),
                                     {{"Content-Type": "application/json"}})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())["usage"]["completion_tokens"]

found = {{}}
try:
    sh("/opt/moemesh/bin/moemesh", "install-systemd")
    sh("systemd-sysusers")
    for unit in ("planner", "gateway", "expert@"):
        drop = pathlib.Path(f"/etc/systemd/system/moemesh-{{unit}}.service.d")
        drop.mkdir()
        (drop / "watchdog.conf").write_text("[Service]\\nWatchdogSec=6\\n")
    pathlib.Path("/etc/moemesh").mkdir()
    pathlib.Path("/etc/moemesh/mesh.toml").write_text("[mesh]\\nexperts = 2\\n")
    sh("systemctl", "daemon-reload")
    sh("systemctl", "enable", "moemesh.target", *units)
    sh("systemctl", "start", "moemesh.target")
    found["start"] = [shown(unit, "ActiveState") for unit in units]
    found["first"] = ask(8)
    stopped = ["moemesh-planner", "moemesh-gateway", "moemesh-expert@1"]
    for unit in stopped:
        os.kill(int(shown(unit, "MainPID")[0]), signal.SIGSTOP)
    end = time.monotonic() + 120
    while time.monotonic() < end:
        found["watchdog"] = [shown(unit, "NRestarts", "ActiveState") for unit in stopped]
        if all(int(count) and state == "active" for count, state in found["watchdog"]):
            break
        time.sleep(0.5)
    found["second"] = ask(8)
    answers = []
    long = threading.Thread(target=lambda: answers.append(ask(400)))
    long.start()
    time.sleep(1)
    sh("systemctl", "stop", "moemesh.target", *units)
    long.join()
    found["last"] = answers
    found["stop"] = [shown(unit, "ActiveState", "Result", "ExecMainStatus") for unit in units]
except BaseException as error:
    found["error"] = repr(error) + (getattr(error, "stderr", "") or "")
found["log"] = sh("journalctl", "-o", "cat", "-n", "200", check=False)
pathlib.Path("/found.json").write_text(json.dumps(found))
sh("systemctl", "poweroff", "--force", "--force", check=False)
"""
SERVICE = """
[Service]
ExecStart=/usr/bin/python3 /driver.py
"""


@pytest.mark.soak
@pytest.mark.skipif(os.getuid() != 0, reason="makes namespaces and mounts: needs root")
@pytest.mark.skipif(
    not (shutil.which("debootstrap") and shutil.which("systemd-nspawn")),
    reason="no debootstrap or no systemd-nspawn",
)
def test_the_units_start_guard_and_stop_a_mesh_under_systemd(tmp_path: Path) -> None:
    builder = Builder(WORK, [], {})
    text = DOCKERFILE.read_text() + HOST
    builder.stages = stages(instructions(text), {})
    builder.prepare()
    stage = builder.build("host")
    own = tmp_path / "own"
    wanted = own / "etc/systemd/system/multi-user.target.wants"
    wanted.mkdir(parents=True)
    (own / "driver.py").write_text(DRIVER)
    (own / "etc/systemd/system/driver.service").write_text(SERVICE)
    (wanted / "driver.service").symlink_to("../driver.service")
    # On a file system that takes an overlay, which a temporary one may not.
    upper, work, root = (WORK / "boot" / name for name in ("upper", "work", "root"))
    shutil.rmtree(WORK / "boot", ignore_errors=True)
    for path in (upper, work, root):
        path.mkdir(parents=True)
    layers = [own, *stage.layers, builder.base]
    script = (
        overlay(layers, str(root), upper=upper, work=str(work))
        + f" && cd / && exec systemd-nspawn --register=no --keep-unit --quiet --private-network"
        f" -D {root} -b --console=pipe"
    )
    with (tmp_path / "console").open("wb") as console:
        booted = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
             "sh", "-ec", script],
            stdin=subprocess.DEVNULL, stdout=console, stderr=console,
        )  # fmt: skip
        try:
            booted.wait(600)
        finally:
            booted.kill()
            booted.wait()
    found = json.loads((upper / "found.json").read_text())
    log = found.pop("log")
    assert "error" not in found, f"{found}\n{log}"
    assert found["start"] == [["active"]] * len(UNITS), log
    assert (found["first"], found["second"], found["last"]) == (8, 8, [400]), log
    assert all(int(restarts) for restarts, _ in found["watchdog"]), log
    assert found["stop"] == [["inactive", "success", "0"]] * len(UNITS), log
