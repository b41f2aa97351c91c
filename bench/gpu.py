"""The Triton kernels on a GPU: first whether they are right, then how fast they are.

    bench/gpu.sh [--only NAME] [--json FILE] [--seconds 450]

Each section runs in a process of its own and within a time limit, so that one that fails, hangs or
breaks the CUDA context is reported and the others run all the same. A section checks its kernels
against their references on the card before it measures anything; values are drawn afresh and the
seed is told. Speeds stand beside what the card was measured to do in this run: torch's largest
matrix product and a copy of memory.

A section is a function in its module's ``SECTIONS``, called with a ``gpu_harness.Meter``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from gpu_harness import Meter, Row

SECTIONS = {
    "peaks": "gpu_peaks",
    "gate": "gpu_moe",
    "replicas": "gpu_moe",
    "permute": "gpu_moe",
    "quantise": "gpu_moe",
    "grouped GEMM bf16": "gpu_moe",
    "grouped GEMM FP8": "gpu_moe",
    "all-to-all": "gpu_mesh",
    "all-to-all, processes": "gpu_mesh",
    "attention": "gpu_mesh",
    "rows": "gpu_mesh",
    "sampling": "gpu_mesh",
    "draws": "gpu_serve",
    "mesh": "gpu_serve",
    "mesh FP8": "gpu_serve",
    "mesh TP": "gpu_serve",
    "mesh, symm": "gpu_serve",
    "mesh, nccl": "gpu_serve",
}
"""Each section's module, in the order in which they run. The parent imports none of them."""
SECTION_SECONDS = 100.0
"""For one section, compiling its kernels included."""


def run_here(name: str, peaks: dict[str, float], seed: int) -> int:
    """The child's part: one section, told on stdout as a line of JSON for each row."""
    import torch  # noqa: PLC0415  (the parent needs none)

    try:
        if not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device")
        torch.manual_seed(seed)
        meter = Meter(torch.device("cuda"), peaks)
        importlib.import_module(SECTIONS[name]).SECTIONS[name](meter)
    except Exception as error:  # noqa: BLE001  (the section's boundary: reported, others run on)
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    return 0


def run_section(
    name: str, peaks: dict[str, float], seed: int, limit_s: float
) -> tuple[list[Row], str | None]:
    """The parent's part: rows of one section, and why it failed, if it did."""
    arguments = ["--section", name, "--peaks", json.dumps(peaks)]
    command = [sys.executable, __file__, *arguments, "--seed", str(seed)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        output, failed = done.stdout, done.returncode != 0
        reason = f"exit {done.returncode}: {done.stderr[-600:]}"
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        failed, reason = True, f"took longer than {limit_s:.0f} s"
    rows = []
    for line in output.splitlines():
        if not line.startswith("{"):
            continue
        told = json.loads(line)
        if "error" in told:
            reason = told["error"]
        else:
            rows.append(Row(**told))
    return rows, reason if failed else None


def print_table(rows: list[Row], failures: dict[str, str]) -> None:
    head = Row("section", "what", "speed", "unit", "reference", "of it", "check")
    cells = [
        [str(getattr(row, field)) for field in Row.__dataclass_fields__] for row in (head, *rows)
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    for name, reason in failures.items():
        print(f"\nFAILED {name}: {reason}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of a section's name")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--seconds", type=float, default=450.0, help="for all sections together")
    parser.add_argument("--seed", type=int, default=random.getrandbits(31))
    for hidden in ("--section", "--peaks"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        peaks = json.loads(options.peaks)
        return run_here(options.section, peaks, options.seed)
    begin = time.monotonic()
    rows: list[Row] = []
    failures: dict[str, str] = {}
    peaks: dict[str, float] = {}
    for name in SECTIONS:
        if options.only not in name and name != "peaks":
            continue
        left = options.seconds - (time.monotonic() - begin)
        if left < 10:
            failures[name] = "not run: no time is left"
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        found, failure = run_section(name, peaks, options.seed, min(left, SECTION_SECONDS))
        rows += found
        if failure:
            failures[name] = failure
        if name == "peaks":
            peaks = {row.what: float(row.speed) for row in found}
    print_table(rows, failures)
    print(f"\nseed {options.seed}, {time.monotonic() - begin:.0f} s")
    told: dict[str, Any] = {
        "seed": options.seed,
        "rows": [row.as_json() for row in rows],
        "failures": failures,
    }
    options.json.write_text(json.dumps(told, indent=2) + "\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
