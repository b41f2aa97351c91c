"""Start a fresh mesh, load it with locust, and leave a table, CSV and an HTML report.

    python -m tests.load.run --seconds 120 --users 8 --rate 2

What is written goes to ``--out`` (bench/results/load, which git ignores). Exit code 1 when a
request failed or the mesh did not come to rest.
"""

from __future__ import annotations

import argparse
import csv
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.meshes import Mesh

ROOT = Path(__file__).parents[2]
LOCUSTFILE = Path(__file__).with_name("locustfile.py")
KEYS = {name: secrets.token_hex(16) for name in ("load-a", "load-b", "load-c")}
STOP_S = 60
"""How long requests that are on their way may take to their end."""
COLUMNS = ("Type", "Name", "Request Count", "Failure Count", "Requests/s", "50%", "95%", "99%")
_TEXTS = 2
"""How many of them are no numbers."""


@dataclass(frozen=True)
class Result:
    rows: list[dict[str, str]]
    """Of locust's statistics, by type and name."""
    exit_code: int
    output: str
    at_rest: bool
    """No sequence was left on the mesh."""

    def count(self, kind: str, column: str = "Request Count") -> int:
        return sum(int(row[column]) for row in self.rows if row["Type"] == kind)

    @property
    def failures(self) -> int:
        return sum(int(row["Failure Count"]) for row in self.rows)

    @property
    def ok(self) -> bool:
        return self.at_rest and not self.exit_code and not self.failures


def run(mesh: Mesh, out: Path, *, seconds: int, users: int, rate: float) -> Result:
    """Load a mesh that knows ``KEYS`` with ``users`` in a closed loop and one open loop."""
    out.mkdir(parents=True, exist_ok=True)
    prefix = out / "load"
    command = [
        sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary",
        "-H", mesh.url, "-u", str(users + 1), "-r", str(users + 1), "-t", f"{seconds}s",
        "--stop-timeout", str(STOP_S), "--drift", str(seconds), "--rate", str(rate),
        "--api-keys", ",".join(KEYS.values()), "--csv", str(prefix), "--html", f"{prefix}.html",
    ]  # fmt: skip
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=seconds + 2 * STOP_S + 60
    )
    with Path(f"{prefix}_stats.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["Type"]]
    try:
        mesh.wait_for(lambda: open_sequences(mesh) == 0, "the mesh to come to rest")
        at_rest = True
    except AssertionError:
        at_rest = False
    return Result(rows, done.returncode, done.stdout + done.stderr, at_rest)


def open_sequences(mesh: Mesh) -> float:
    """Sequences that the gateway has in the mesh."""
    return figure(mesh, "num_requests_running") + figure(mesh, "num_requests_waiting")


def figure(mesh: Mesh, name: str) -> float:
    """A figure of the gateway, without labels."""
    _, page = mesh.get("/metrics")
    lines = (line.split() for line in page.splitlines() if line.startswith(f"moemesh_{name} "))
    return sum(float(value) for _, value in lines)


def table(result: Result) -> str:
    rows = [COLUMNS, *(tuple(_shown(name, row[name]) for name in COLUMNS) for row in result.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < _TEXTS else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _shown(column: str, value: str) -> str:
    return f"{float(value):.2f}" if column == "Requests/s" else value


def fresh_mesh(**settings: Any) -> Mesh:
    keys = ",".join(f"{name}={key}" for name, key in KEYS.items())
    return Mesh(environment={"MOEMESH_API_KEYS": keys}, **settings)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--users", type=int, default=8, help="clients in a closed loop")
    parser.add_argument("--rate", type=float, default=1.0, help="open loop: requests a second")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--experts", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "load")
    arguments = parser.parse_args()
    with fresh_mesh(routers=arguments.routers, experts=arguments.experts) as mesh:
        result = run(
            mesh, arguments.out,
            seconds=arguments.seconds, users=arguments.users, rate=arguments.rate,
        )  # fmt: skip
    (arguments.out / "load.txt").write_text(table(result) + "\n")
    print(table(result))
    print(f"\n{arguments.out}: load.txt, load.html, load_stats.csv, load_stats_history.csv")
    if not result.ok:
        print(result.output, file=sys.stderr)
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
