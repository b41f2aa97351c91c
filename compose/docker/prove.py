"""Build the images and run a compose file's services without a container engine.

    sudo python compose/docker/prove.py [--fresh] [--work DIR] [--lend PATH]... [--arg K=V]...

For machines where no engine runs: each instruction of the Dockerfile is carried out in its order on
a root that debootstrap makes, each layer in an overlay of its own, and its size is measured. Then
the services of ``compose.yaml`` are started as it says (user, command, environment, volumes,
read-only root, no capabilities, namespaces of processes, mounts and network), until all are healthy
and a token has come. Needs root, debootstrap, util-linux and iproute2, and access to Debian's and
Python's packages: the machine's own configuration of apt and pip is lent to what RUN runs.

Proves: that the instructions work in this order and what the images then hold, that the services
need nothing else, and that lanes work between them, in memory and, for ``compose.multi-host.yaml``
on two loopback addresses, over TCP with keys. Does not prove: what an engine adds (its own
base image, seccomp and AppArmor profiles, logging, port publishing).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from compose.docker.roots import SOURCE, Builder, Stage, expand, made, overlay, run, say, size_mb

READY_S = 300.0
PORT_OF_TWO_HOSTS = 8400


# ---------------------------------------------------------------- running


class Container:
    """A service of the compose file, started as it says."""

    def __init__(
        self,
        name: str,
        service: Mapping[str, Any],
        image: Stage,
        base: Path,
        volumes: Mapping[str, Path],
        secrets: Mapping[str, str],
        work: Path,
    ) -> None:
        """``secrets``: target -> the file."""
        self.name = name
        self.service = service
        self._image = image
        self._base = base
        self._volumes = volumes
        self._secrets = secrets
        self._root = made(work / "roots" / name)
        self.log = work / "logs" / f"{name}.log"
        made(self.log.parent)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [*self._image.entrypoint, *self.service["command"]]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command(argv, alone=self.service["network_mode"] == "none"),
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def healthy(self) -> tuple[bool, str]:
        """What its health check says, run in a container of its own with the same volumes."""
        kind, *argv = self.service["healthcheck"]["test"]
        assert kind == "CMD"
        done = subprocess.run(
            self._command(argv, alone=True), capture_output=True, text=True, timeout=60, check=False
        )
        return done.returncode == 0, (done.stdout + done.stderr).strip()

    def inside(self, script: str) -> str:
        return run(self._command(["/bin/sh", "-c", script], alone=True), capture=True)

    def stop(self) -> int:
        """SIGTERM to the process that is the first of its namespace; its exit code."""
        assert self.process is not None
        limit_s = float(self.service["stop_grace_period"].removesuffix("s"))
        self._signal(signal.SIGTERM)
        return self.process.wait(limit_s)

    def _signal(self, number: signal.Signals) -> None:
        """To the first process of its namespace; all others there end with it."""
        assert self.process is not None
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), number)

    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            # Not unshare alone: whoever has changed its user does not die with its parent.
            self._signal(signal.SIGKILL)
            self.process.kill()
            self.process.wait()

    def _command(self, argv: Sequence[str], *, alone: bool) -> list[str]:
        root, service = str(self._root), self.service
        # An engine makes the places to mount on in a layer of the container's own.
        places = Path(f"{self._root}.places")
        for item in service["tmpfs"]:
            made(places / item.split(":")[0].lstrip("/"))
        for item in service["volumes"]:
            made(places / item.split(":")[1].lstrip("/"))
        for target in self._secrets:
            made(places / "run/secrets")
            (places / "run/secrets" / target).touch()
        script = [overlay([places, *self._image.layers, self._base], root)]
        assert service["read_only"]
        script += [
            f"mount -t proc proc {root}/proc",
            f"mount -t tmpfs tmpfs {root}/dev",
            f"mkdir {root}/dev/shm",
            *(f"touch {root}/dev/{d} && mount --bind /dev/{d} {root}/dev/{d}"
              for d in ("null", "zero", "random", "urandom")),
            f"mount -t tmpfs -o size=64m tmpfs {root}/dev/shm",
        ]  # fmt: skip
        for item in service["tmpfs"]:
            place, _, options = item.partition(":")
            script.append(f"mount -t tmpfs -o {options} tmpfs {root}{place}")
        for item in service["volumes"]:
            source, place, *mode = item.split(":")
            if source in self._volumes:
                flag = "-o ro" if mode == ["ro"] else ""
                script.append(f"mount {flag} --bind {self._volumes[source]} {root}{place}")
        for target, path in self._secrets.items():
            script.append(f"mount -o ro --bind {path} {root}/run/secrets/{target}")
        if alone:
            script.append("ip link set lo up")
        if name := service.get("hostname"):
            script.append(f"hostname {name}")
        env = self._image.env | service["environment"]
        shown = " ".join(shlex.quote(f"{k}={v}") for k, v in env.items() if v)
        uid, _, gid = self._image.user.partition(":")
        script.append(
            f"cd / && exec chroot {root} /usr/bin/env -i {shown} /usr/bin/setpriv --reuid={uid}"
            f" --regid={gid} --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all "
            + shlex.join(argv)
        )
        spaces = ["--mount", "--pid", "--ipc", "--uts", *(["--net"] if alone else [])]
        return ["unshare", *spaces, "--fork", "--kill-child", "sh", "-ec", "\n".join(script)]


@dataclass(frozen=True)
class Host:
    """One machine's part of a mesh: what ``docker compose`` is given there."""

    name: str
    file: str
    variables: Mapping[str, str]
    profiles: frozenset[str] = frozenset()

    def containers(self, builder: Builder) -> dict[str, Container]:
        """By service, with volumes of its own, which are empty."""
        text = (SOURCE / "compose" / self.file).read_text()
        document = yaml.safe_load(expand(text, self.variables))
        work = builder.work / "hosts" / self.name
        shutil.rmtree(work, ignore_errors=True)
        volumes: dict[str, Path] = {}
        for name in document["volumes"]:
            volumes[name] = Path(made(work / "volumes" / name))
            volumes[name].chmod(0o700)
            os.chown(volumes[name], 10001, 10001)
        found = {}
        for name, service in document["services"].items():
            if not self.profiles.issuperset(service.get("profiles", ())):
                continue
            secrets = {}
            for item in service.get("secrets", ()):
                source, target = (
                    (item, item) if isinstance(item, str) else (item["source"], item["target"])
                )
                secrets[target] = document["secrets"][source]["file"]
            image = builder.build(service["build"]["target"])
            found[name] = Container(name, service, image, builder.base, volumes, secrets, work)
        return found


@contextlib.contextmanager
def mesh(builder: Builder, *hosts: Host) -> Iterator[dict[str, Container]]:
    """All services of these hosts, as ``HOST/SERVICE``, healthy; killed at the end, if they still
    run.
    """
    containers = {
        f"{host.name}/{name}": one
        for host in hosts
        for name, one in host.containers(builder).items()
    }
    try:
        for one in containers.values():
            one.start()
        end = time.monotonic() + READY_S
        waiting = dict(containers)
        while waiting:
            for name, one in list(waiting.items()):
                good, words = one.healthy()
                if good:
                    say(f"{name} is healthy")
                    del waiting[name]
                elif time.monotonic() > end or one.ended():
                    raise SystemExit(f"{name}: {words}\n{one.log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield containers
    finally:
        for one in containers.values():
            one.kill()


# ---------------------------------------------------------------- what is proven


def prove(builder: Builder) -> dict[str, Any]:
    """Returns the figures; raises ``SystemExit`` for what does not hold."""
    builder.prepare()
    sizes = {"base": size_mb(builder.base)}
    for target in ("gateway", "planner", "router", "expert"):
        layers = builder.build(target).layers
        sizes[target] = sizes["base"] + sum(size_mb(layer) for layer in layers)
    figures: dict[str, Any] = {"megabytes": {k: round(v) for k, v in sizes.items()}}
    for target in ("gateway", "planner"):
        if sizes[target] >= 200:
            raise SystemExit(f"{target} has {sizes[target]:.0f} MB, 200 at most")
    with mesh(builder, Host("one", "compose.yaml", {"PORT": "8000"})) as containers:
        for name, one in containers.items():
            look(name.partition("/")[2], one)
        figures["tokens"] = ask(8000)
        files = containers["one/router-0"].inside("ls -A /dev/shm | wc -l")
        figures["dev_shm_files"] = int(files)
        stop(containers)
        left = (builder.work / "hosts/one/volumes/run").iterdir()
        figures["left_in_run_dir"] = [path.name for path in left]
    with mesh(builder, *two_hosts(builder.work / "keys")) as containers:
        figures["tokens_of_two_hosts"] = ask(PORT_OF_TWO_HOSTS)
        lines = containers["a/router-0"].log.read_text().splitlines()
        opened = [json.loads(line) for line in lines if '"lane.opened"' in line]
        figures["lanes_of_two_hosts"] = sorted(line["peer"] for line in opened)
        stop(containers)
    builder.prune()
    return figures


def two_hosts(keys: Path) -> tuple[Host, Host]:
    """Two machines' parts of a mesh, here at two loopback addresses, with keys of their own."""
    names = {"planner": "planner", "gateway-0": "gateway", "router-a-0": "router",
             "expert-a-0": "expert", "expert-b-0": "expert"}  # fmt: skip
    shutil.rmtree(keys, ignore_errors=True)
    moemesh = str(Path(sys.executable).with_name("moemesh"))
    pairs = [word for pair in names.items() for word in pair]
    run([moemesh, "keygen", *pairs, "--out", str(keys)])
    for path in keys.iterdir():
        os.chown(path, 10001, 10001)
    variables = {"PLANNER": "127.0.0.1", "KEYS": str(keys), "EXPERTS": "2",
                 "PORT": str(PORT_OF_TWO_HOSTS)}  # fmt: skip
    file = "compose.multi-host.yaml"
    return (
        Host("a", file, variables | {"NODE": "a", "ADDRESS": "127.0.0.1"},
             frozenset({"head", "router", "expert"})),
        Host("b", file, variables | {"NODE": "b", "ADDRESS": "127.0.0.2"}, frozenset({"expert"})),
    )  # fmt: skip


def stop(containers: Mapping[str, Container]) -> None:
    """Clients first, as an engine does that goes by depends_on."""
    for role in ("gateway", "router", "expert", "planner"):
        for name, one in containers.items():
            if name.partition("/")[2].startswith(role) and (code := one.stop()):
                raise SystemExit(f"{name} ended with {code}:\n{one.log.read_text()[-3000:]}")


def look(name: str, one: Container) -> None:
    """Hold an image to what it promises."""
    script = (
        "id -u; for p in gcc cc ld as make pip; do command -v $p; done; "
        "find /bin /etc /lib /opt /sbin /usr -writable -not -type l 2>/dev/null | head -3; "
        "touch /opt/moemesh/x 2>/dev/null && echo writable; "
        "python -P -c 'import torch' 2>/dev/null && echo torch"
    )
    found = one.inside(script + "; true").split()
    wanted = ["10001"] + (["torch"] if name.startswith(("router", "expert")) else [])
    if found != wanted:
        raise SystemExit(f"{name}: expected {wanted}, found {found}")


def ask(port: int) -> int:
    body = {"model": "moemesh-demo", "prompt": "Emma was not at all", "max_tokens": 8}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.loads(answer.read())["usage"]["completion_tokens"])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("/var/tmp/moemesh-prove"))
    parser.add_argument("--fresh", action="store_true", help="use nothing of an earlier run")
    parser.add_argument("--lend", action="append", default=[], help="a path that RUN may read")
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE")
    flags = parser.parse_args(argv)
    if flags.fresh:
        shutil.rmtree(flags.work, ignore_errors=True)
    given = dict(item.split("=", 1) for item in flags.arg)
    print(json.dumps(prove(Builder(flags.work, flags.lend, given)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
