"""What a Dockerfile builds, without a container engine: a root of overlays on one of debootstrap's.

Each instruction is carried out in its order, in a layer of its own, which is kept for later runs
that come to the same instruction from the same layers. Needs root. The machine's own configuration
of apt and pip is lent to what RUN runs, since that is how it reaches packages.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent
SUITE = "bookworm"
LENT = ("/etc/resolv.conf", "/etc/apt", "/usr/share/keyrings", "/etc/pip.conf")
LENT_VARIABLES = re.compile(r"PIP_\w+|\w+_proxy|\w+_PROXY")
# Whom this machine trusts, where no package that RUN installs writes.
TRUST = ("/etc/ssl/certs/ca-certificates.crt", "/run/lent-ca-certificates.crt")
SLIMMED = ("usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/locale",
           "usr/share/lintian", "var/cache/apt", "var/lib/apt/lists", "var/log")  # fmt: skip


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
    """``${NAME}``, ``${NAME:-otherwise}`` and ``${NAME:+instead}``, as both files have them.

    Raises ``ValueError`` with the message of ``${NAME:?message}`` for one that is not set.
    """

    def value(match: re.Match[str]) -> str:
        name, operator, word = match.groups()
        known = values.get(name, "")
        if operator == ":-":
            return known or word
        if operator == ":+":
            return word if known else ""
        if operator == ":?" and not known:
            raise ValueError(f"{name} is not set: {word}")
        return known

    return re.sub(r"\$\{(\w+)(?:(:[-+?])([^}]*))?\}", value, text)


# ---------------------------------------------------------------- building


class Builder:
    def __init__(self, work: Path, lent: Sequence[str], given: Mapping[str, str]) -> None:
        self.work = work
        own = {path: path for path in (*LENT, *pip_paths(), *lent) if Path(path).exists()}
        self.lent = own | ({TRUST[0]: TRUST[1]} if Path(TRUST[0]).exists() else {})
        """Path here -> where RUN finds it."""
        self.given = given
        self.base = work / "base"
        self.context = work / "context"
        self._used: set[Path] = set()
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
        self._used.add(layer)

    def prune(self) -> None:
        """Remove the layers that this run had no use for."""
        for layer in set((self.work / "layers").iterdir()) - self._used:
            shutil.rmtree(layer)

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
        if TRUST[0] in self.lent:
            lent |= {"PIP_CERT": TRUST[1], "SSL_CERT_FILE": TRUST[1]}
        lent |= {k: v for k, v in values.items() if v}
        script = [overlay([*lower, self.base], root, upper=upper, work=done)]
        script += [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
        for path, place in self.lent.items():
            into = shlex.quote(f"{root}{place}")
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
        for place in self.lent.values():  # which were only made to mount on
            with contextlib.suppress(OSError):
                target = upper / place.lstrip("/")
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
