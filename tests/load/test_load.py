"""Load and a benchmark, both short, on a mesh that speaks https and wants keys."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.load.run import KEYS, figure, fresh_mesh, run
from tests.support.certificates import tls_files
from tests.support.meshes import MOEMESH, Mesh

USERS = 4
SECONDS = 10


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with fresh_mesh(**tls_files(tmp_path_factory.mktemp("tls"))) as mesh:
        yield mesh


def test_mixed_load_with_several_keys_fails_no_request(mesh: Mesh, tmp_path: Path) -> None:
    """Nothing fails, and all is in locust's statistics."""
    result = run(mesh, tmp_path, seconds=SECONDS, users=USERS, rate=1.0)
    assert result.ok, result.output
    assert result.count("E2E") == result.count("TTFT") > 3
    assert result.count("SLO met") + result.count("SLO missed") == result.count("E2E")
    assert result.count("ITL") > result.count("E2E")
    names = {row["Name"] for row in result.rows if row["Type"] == "E2E"}
    assert any(name.startswith("open ") for name in names)
    assert any(name.startswith("completion ") for name in names)
    # Clients that hang up free what they had; whether one did so late is chance. So do those
    # that were under way when the time was up: a user of each loop has one.
    hung_up = figure(mesh, "request_disconnects_total")
    assert hung_up <= result.count("CANCELLED") + 2 * USERS
    for name in ("load-a", "load-b", "load-c"):
        assert f'"tenant":"{name}"' in mesh.run("logs", "--json", "gateway-0")
    assert (tmp_path / "load.html").stat().st_size > 1000
    assert (tmp_path / "load_stats_history.csv").exists()


def test_bench_speaks_https_and_sends_its_key(mesh: Mesh) -> None:
    secret = KEYS["load-a"]
    small = ("--num-prompts", "2", "--input-len", "4", "--output-len", "2")
    arguments = ("bench", "serve", "--request-rate", "inf", *small)
    assert "at once" in mesh.run(*arguments, "--api-key", secret)
    refused = subprocess.run(
        [MOEMESH, *arguments, "--set", f"mesh.run_dir={mesh.run_dir}"],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert refused.returncode == 1
    assert "No API key was sent" in refused.stderr
    assert "tokens/s" in mesh.run("bench", "step", "--tokens", "8", "--api-key", secret)
