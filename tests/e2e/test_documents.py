"""What README and docs tell people to type does work.

Each ``sh`` and ``python`` block is run in one shared mesh, unless a comment above it says why not:

    <!-- not run: it downloads half a gigabyte -->

README's reasons are here, since its first lines are for people who meet the project.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.api import admin
from gateway.errors import ApiError
from mesh.config import knobs
from tests.support.meshes import Mesh

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "demo" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = ("sh", "python")
NOT_RUN_IN_README = {
    "make serve": "it installs; tests/e2e/test_launcher.py does what it does then",
    ".venv/bin/moemesh up --model": "the reader's own checkpoint",
    "python -m planner_svc": "five services that stay; the launcher starts them the same way",
    "make test": "this is part of it",
}
_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+?) -->\n+)?"
    r"^(?P<fence>`{3,})(?P<language>\w*)\n(?P<text>.*?)^(?P=fence)$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    reason: str
    """Why it is not run; empty where it is."""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for found in _BLOCK.finditer(text):
            if found["language"] not in RUN:
                continue
            line = text.count("\n", 0, found.start("fence")) + 1
            reason = found["reason"] or ""
            if page.name == "README.md" and page.parent == ROOT:
                reason = next(
                    (why for start, why in NOT_RUN_IN_README.items()
                     if found["text"].startswith(start)),
                    reason,
                )  # fmt: skip
            yield Block(page, line, found["language"], found["text"], reason)


def runnable() -> list[object]:
    return [pytest.param(block, id=block.name) for block in blocks() if not block.reason]


@pytest.fixture(scope="module")
def surroundings(demo_mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which ``moemesh`` means the running mesh, and curl fails on an error."""
    home = tmp_path_factory.mktemp("reader")
    (home / ".curlrc").write_text("fail-with-body\nmax-time = 60\n")
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CURL_HOME": str(home),
        "MOEMESH_MESH_RUN_DIR": str(demo_mesh.run_dir),
    }


@pytest.mark.parametrize("block", runnable())
def test_a_block_does_what_it_says(
    block: Block, demo_mesh: Mesh, surroundings: dict[str, str], tmp_path: Path
) -> None:
    text = re.sub(r"(127\.0\.0\.1|localhost):8000", rf"\1:{demo_mesh.port}", block.text)
    shell = ["bash", "-eu", "-o", "pipefail", "-c", text]
    command = shell if block.language == "sh" else [sys.executable, "-c", text]
    done = subprocess.run(
        command, check=False, cwd=tmp_path, env=surroundings, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, f"{block.name}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip() or done.stderr.strip(), f"{block.name} printed nothing"


def test_reasons_are_given_for_blocks_that_are_there() -> None:
    found = list(blocks())
    assert sum(not block.reason for block in found) > 5
    readme = [block.text for block in found if block.page == ROOT / "README.md"]
    for start in NOT_RUN_IN_README:
        assert any(text.startswith(start) for text in readme), f"README has no block {start!r}"


def test_every_link_to_a_file_leads_somewhere() -> None:
    seen = 0
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if re.match(r"[a-z]+:|#", target):
                continue
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"
            seen += 1
    assert seen > 10


def test_every_command_that_a_page_names_exists() -> None:
    files = (ROOT / "compose" / "commands").glob("*.py")
    known = {path.stem.replace("_", "-") for path in files}
    for page in PAGES:
        for quoted in re.findall(r"`([^`\n]*)`", page.read_text()):
            for name in re.findall(r"(?:^|\s|/)moemesh ([a-z][a-z-]*)", quoted):
                assert name in known, f"{page.name}: there is no `moemesh {name}`"


def test_every_setting_that_a_page_names_exists() -> None:
    known = {knob.key for knob in knobs()}
    sections = {key.partition(".")[0] for key in known}
    # Events of the logs, modules and files look the same.
    source = "".join(path.read_text() for s in sections for path in (ROOT / s).rglob("*.py"))
    for role in ("gateway", "router_svc", "expert_svc", "planner_svc", "compose"):
        source += "".join(path.read_text() for path in (ROOT / role).rglob("*.py"))
    for page in PAGES:
        for quoted in re.findall(r"`([^`\n]*)`", page.read_text()):
            found = re.fullmatch(r"(?:--set )?((\w+)\.(\w+))(?: ?=.*)?", quoted)
            if found is None or found[2] not in sections or found[1] in known:
                continue
            is_module = (ROOT / found[2] / f"{found[3]}.py").exists() or (
                ROOT / found[2] / found[3]
            ).is_dir()
            is_file = found[3] in {"svg", "json", "md", "toml", "csv", "html", "py"}
            is_event = f'"{found[1]}"' in source
            assert is_module or is_file or is_event, f"{page.name}: no setting {found[1]}"


def test_the_page_of_the_api_has_every_error() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| (\d{3}) \| ([^|]*) \|", page, re.MULTILINE)
    written = {
        (int(status), code) for status, cell in rows for code in re.findall(r"`(\w+)`", cell)
    }
    assert admin.PlannerUnavailable in subclasses(ApiError)
    there = {(kind.status, kind.code) for kind in subclasses(ApiError) if kind.code is not None}
    assert written == there


def subclasses(kind: type[ApiError]) -> set[type[ApiError]]:
    """Those of the project, whatever else was imported."""
    own = {sub for sub in kind.__subclasses__() if sub.__module__.startswith("gateway")}
    return own.union(*(subclasses(sub) for sub in own)) if own else own


def test_the_page_of_the_api_has_every_path(demo_mesh: Mesh) -> None:
    page = (ROOT / "docs" / "api.md").read_text() + (ROOT / "docs" / "placement.md").read_text()
    for path in json.loads(demo_mesh.get("/openapi.json")[1])["paths"]:
        assert re.sub(r"/\{\w+\}$", "/", path) in page, f"no page has {path}"
