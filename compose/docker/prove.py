"""Build the images and run a compose file's services without a container engine.

    sudo python compose/docker/prove.py [--fresh] [--work DIR] [--lend PATH]... [--arg K=V]...

For machines where no engine runs: each instruction of the Dockerfile is carried out in its order on
a root that debootstrap makes, each layer in an overlay of its own, and its size is measured. Then
the services of ``compose.yaml`` are started as it says (user, command, environment, volumes,
read-only root, no capabilities, namespaces of processes, mounts and network), until all are healthy
and a token has come. Needs root, debootstrap, util-linux and iproute2, and access to Debian's and
Python's packages: the machine's own configuration of apt and pip is lent to what RUN runs.

Proves: that the instructions work in this order and what the images then hold, that the services
need nothing else, and that lanes work between them. Does not prove: what an engine adds (its own
base image, seccomp and AppArmor profiles, logging, port publishing).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent
SUITE = "bookworm"
LENT = ("/etc/resolv.conf", "/etc/apt", "/usr/share/keyrings", "/etc/ssl/certs", "/etc/pip.conf")
LENT_VARIABLES = re.compile(r"PIP_\w+|SSL_CERT_\w+|\w+_proxy|\w+_PROXY")
SLIMMED = ("usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/locale",
           "usr/share/lintian", "var/cache/apt", "var/lib/apt/lists", "var/log")  # fmt: skip
READY_S = 300.0


# ---------------------------------------------------------------- the Dockerfile


@dataclass(frozen=True)
class Instruction:
    word: str
    rest: str


@dataclass
class Stage:
    """A stage of the Dockerfile, and what it has become."""

    name: str
    parent: str
    instructions: list[Instruction]
    layers: list[Path] = field(default_factory=list)
    """Newest first, without the base."""
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def instructions(text: str) -> list[Instruction]:
    """Of a Dockerfile without heredocs, in their order."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    split = (line.split(None, 1) for line in whole.splitlines() if line.strip())
    return [Instruction(word.upper(), rest.strip()) for word, rest in split]


def stages(found: Sequence[Instruction], given: Mapping[str, str]) -> dict[str, Stage]:
    """By name; ``given``: build arguments."""
    defaults: dict[str, str] = {}
    named: dict[str, Stage] = {}
    for one in found:
        if one.word == "FROM":
            parent, _, name = expand(one.rest, defaults).split()
            named[name] = Stage(name, parent, [])
        elif not named:
            key, _, value = one.rest.partition("=")
            defaults[key] = given.get(key, value)
        else:
            list(named.values())[-1].instructions.append(one)
    return named


def expand(text: str, values: Mapping[str, str]) -> str:
    """``${NAME}``, ``${NAME:-otherwise}`` and ``${NAME:+instead}``, as both files have them."""

    def value(match: re.Match[str]) -> str:
        name, operator, word = match.groups()
        known = values.get(name, "")
        if operator == ":-":
            return known or word
        if operator == ":+":
            return word if known else ""
        return known

    return re.sub(r"\$\{(\w+)(?:(:[-+])([^}]*))?\}", value, text)


# ---------------------------------------------------------------- building


class Builder:
    def __init__(self, work: Path, lent: Sequence[str], given: Mapping[str, str]) -> None:
        self.work = work
        self.lent = [path for path in {*LENT, *pip_paths(), *lent} if Path(path).exists()]
        self.given = given
        self.base = work / "base"
        self.context = work / "context"
        self.stages = stages(instructions((HERE / "Dockerfile").read_text()), given)

    def prepare(self) -> None:
        """The base's root, kept between runs, and the build context."""
        if not (self.base / "bin/sh").exists():
            say(f"debootstrap {SUITE}")
            shutil.rmtree(self.base, ignore_errors=True)
            run(["debootstrap", "--variant=minbase", SUITE, str(self.base)])
            for path in SLIMMED:
                shutil.rmtree(self.base / path, ignore_errors=True)
                (self.base / path).mkdir(parents=True)
            # As Debian's slim images have it, for packages that come later.
            excluded = "".join(f"path-exclude /{path}/*\n" for path in SLIMMED[:5])
            (self.base / "etc/dpkg/dpkg.cfg.d/docker").write_text(excluded)
        shutil.rmtree(self.context, ignore_errors=True)
        copy_context(self.context)

    def build(self, name: str) -> Stage:
        """Carry out a stage's instructions, after those of the stages that it needs."""
        stage = self.stages[name]
        if stage.layers:
            return stage
        if stage.parent in self.stages:
            parent = self.build(stage.parent)
            stage.layers = list(parent.layers)
            stage.env = dict(parent.env)
            stage.user, stage.workdir = parent.user, parent.workdir
        else:
            stage.env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        for one in stage.instructions:
            self._carry_out(stage, one)
        return stage

    def _carry_out(self, stage: Stage, one: Instruction) -> None:
        values = stage.args | stage.env
        match one.word:
            case "ARG":
                key, _, value = one.rest.partition("=")
                stage.args[key] = self.given.get(key, value)
            case "ENV":
                for item in shlex.split(one.rest):
                    key, _, value = item.partition("=")
                    stage.env[key] = expand(value, values)
            case "USER":
                stage.user = one.rest
            case "WORKDIR":
                stage.workdir = one.rest
                place = one.rest.lstrip("/")
                if not any((layer / place).is_dir() for layer in (*stage.layers, self.base)):
                    raise SystemExit(f"WORKDIR {one.rest}: make it before, with its owner")
            case "COPY":
                self._copy(stage, one.rest)
            case "RUN":
                self._run(stage, one.rest, values)
            case "ENTRYPOINT":
                stage.entrypoint = json.loads(one.rest)
            case "CMD":
                stage.command = json.loads(one.rest)
            case "EXPOSE":
                pass
            case other:
                raise SystemExit(f"prove.py does not know {other}")

    @contextlib.contextmanager
    def _layer(self, stage: Stage, *made_of: str) -> Iterator[Path | None]:
        """A new layer to fill, or None where an earlier run made it of the same."""
        everything = [*(layer.name for layer in stage.layers), *made_of]
        key = hashlib.sha256("\0".join(everything).encode()).hexdigest()[:12]
        layer = self.work / "layers" / f"{stage.name}-{key}"
        if layer.exists():
            yield None
        else:
            new = layer.with_suffix(".new")
            shutil.rmtree(new, ignore_errors=True)
            made(new)
            yield new
            new.rename(layer)
        stage.layers.insert(0, layer)

    def _copy(self, stage: Stage, rest: str) -> None:
        words = rest.split()
        origins = [self.context]
        if words[0].startswith("--from="):
            origins = self.build(words.pop(0).removeprefix("--from=")).layers
        *sources, target = words
        # A directory may have been written in several layers; the newest comes last.
        found = [
            one
            for source in (source.lstrip("/") for source in sources)
            for origin in reversed(origins)
            for one in (sorted(origin.glob(source)) if "*" in source else [origin / source])
            if one.exists()
        ]
        if not found:
            raise SystemExit(f"COPY {rest}: nothing to copy")
        of = [digest(one) if origins == [self.context] else str(one) for one in found]
        with self._layer(stage, "COPY", rest, *of) as layer:
            if layer is None:
                return
            into = made(layer / target.lstrip("/"))
            for one in found:
                run(["cp", "-a", "--", f"{one}/." if one.is_dir() else str(one), into])
            run(["find", str(layer), "-type", "c", "-delete"])  # what a later layer had removed

    def _run(self, stage: Stage, command: str, values: Mapping[str, str]) -> None:
        lower = list(stage.layers)
        given = [f"{key}={value}" for key, value in sorted(values.items())]
        with self._layer(stage, "RUN", command, stage.user, *given) as upper:
            if upper is not None:
                say(f"[{stage.name}] {command[:100]}")
                self._run_in(lower, upper, stage, command, values)

    def _run_in(
        self,
        lower: Sequence[Path],
        upper: Path,
        stage: Stage,
        command: str,
        values: Mapping[str, str],
    ) -> None:
        scratch = self.work / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        root, done = made(scratch / "root"), made(scratch / "work")
        lent = {k: v for k, v in os.environ.items() if LENT_VARIABLES.fullmatch(k)}
        lent |= {k: v for k, v in values.items() if v}
        script = [overlay([*lower, self.base], root, upper=upper, work=done)]
        script += [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
        for path in self.lent:
            into = shlex.quote(f"{root}{path}")
            make = "mkdir -p" if Path(path).is_dir() else "touch"
            script += [
                f"mkdir -p $(dirname {into})",
                f"[ -e {into} ] || {make} {into}",
                f"mount --rbind {shlex.quote(path)} {into}",
            ]
        environment = " ".join(shlex.quote(f"{k}={v}") for k, v in lent.items())
        script.append(
            f"exec chroot --userspec={stage.user} {root} "
            f"env -i {environment} /bin/sh -c {shlex.quote(f'cd {stage.workdir}; {command}')}"
        )
        run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec",
             "\n".join(script)]
        )  # fmt: skip
        for path in self.lent:  # the places that were only made to mount on
            with contextlib.suppress(OSError):
                target = upper / path.lstrip("/")
                target.rmdir() if target.is_dir() else target.unlink()


def digest(path: Path) -> str:
    """Of a file's content, or of all files in a directory."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    total = hashlib.sha256()
    for one in files:
        total.update(str(one.relative_to(path)).encode() + b"\0" + one.read_bytes() + b"\0")
    return total.hexdigest()


def pip_paths() -> list[str]:
    """Files and folders that this machine's configuration of pip names."""
    said = run([sys.executable, "-m", "pip", "config", "debug"], capture=True)
    said += os.environ.get("PIP_FIND_LINKS", "")
    return [path.removesuffix("/simple") for path in re.findall(r"(/(?!/)[\w./+-]+)", said)]


def copy_context(into: Path) -> None:
    """What .dockerignore lets through, of an allow-list of names."""
    rules = [line for line in (SOURCE / ".dockerignore").read_text().split("\n") if line.strip()]
    for rule in rules:
        if rule.startswith("!"):
            source, target = SOURCE / rule[1:], into / rule[1:]
            made(target.parent)
            run(["cp", "-a", "--", str(source), str(target)])
    for rule in rules:
        if rule.startswith("**/"):
            run(["find", str(into), "-name", rule[3:], "-exec", "rm", "-rf", "{}", "+"])


def overlay(
    lower: Sequence[Path], root: str, *, upper: Path | None = None, work: Path | str = ""
) -> str:
    """The mount command; read-only without ``upper``."""
    options = "lowerdir=" + ":".join(str(path) for path in lower)
    if upper is not None:
        options += f",upperdir={upper},workdir={work}"
    return f"mount -t overlay overlay -o {shlex.quote(options)} {root}"


def size_mb(path: Path) -> float:
    """Of all files, each link counted once."""
    text = run(["du", "-sk", "--apparent-size", str(path)], capture=True)
    return int(text.split()[0]) * 1024 / 1e6


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
        work: Path,
    ) -> None:
        self.name = name
        self.service = service
        self._image = image
        self._base = base
        self._volumes = volumes
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


def compose(path: Path, values: Mapping[str, str]) -> dict[str, Any]:
    """The file with its variables replaced and its anchors merged."""
    return dict(yaml.safe_load(expand(path.read_text(), values)))


@contextlib.contextmanager
def mesh(builder: Builder, file: Path, values: Mapping[str, str]) -> Iterator[dict[str, Container]]:
    """All services of a compose file, healthy; killed at the end, if they still run."""
    document = compose(file, values)
    volumes: dict[str, Path] = {}
    for name in document["volumes"]:
        volumes[name] = Path(made(builder.work / "volumes" / name))
        shutil.rmtree(volumes[name])
        volumes[name].mkdir(mode=0o700)
        os.chown(volumes[name], 10001, 10001)
    containers = {
        name: Container(
            name,
            service,
            builder.build(service["build"]["target"]),
            builder.base,
            volumes,
            builder.work,
        )
        for name, service in document["services"].items()
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
    with mesh(builder, SOURCE / "compose/compose.yaml", {}) as containers:
        for name, one in containers.items():
            look(name, one)
        figures["tokens"] = ask()
        figures["dev_shm_files"] = containers["router-0"].inside("ls -A /dev/shm | wc -l").strip()
        for name in ("gateway-0", "router-0", "expert-0", "expert-1", "planner"):
            code = containers[name].stop()
            if code:
                raise SystemExit(f"{name} ended with {code}:\n{containers[name].log.read_text()}")
        left = [p.name for p in (builder.work / "volumes/run").iterdir()]
        figures["left_in_run_dir"] = left
    return figures


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


def ask() -> int:
    body = {"model": "moemesh-demo", "prompt": "Emma was not at all", "max_tokens": 8}
    request = urllib.request.Request(
        "http://127.0.0.1:8000/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.loads(answer.read())["usage"]["completion_tokens"])


def run(argv: Sequence[str], *, capture: bool = False) -> str:
    done = subprocess.run(argv, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(argv)[:300]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout if capture else ""


def made(path: Path) -> str:
    path.mkdir(parents=True, exist_ok=True)
    return str(path)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
