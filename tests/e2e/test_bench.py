"""``moemesh bench`` on a running mesh."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.meshes import Mesh


def test_bench_step_prints_where_each_process_spent_its_time(demo_mesh: Mesh) -> None:
    printed = demo_mesh.run("bench", "step", "--tokens", "12", "--streams", "2")
    for member in ("router-0", "expert-0", "expert-1", "gateway-0", "planner"):
        assert re.search(rf"^{member} +\d", printed, re.MULTILINE), printed
    assert re.search(r"router-0: [\d.]+% of a step of [\d.]+ ms passed outside", printed), printed
    assert "tokens/s with 2 streams" in printed


def test_bench_serve_sweeps_rates_and_writes_results_and_a_plot(
    demo_mesh: Mesh, tmp_path: Path
) -> None:
    output, plot = tmp_path / "results.json", tmp_path / "plot.svg"
    printed = demo_mesh.run(
        "bench", "serve", "--request-rate", "20,inf", "--num-prompts", "6", "--input-len", "20",
        "--output-len", "8", "--spread", "0.5", "--max-concurrency", "3",
        "--goodput", "e2el:100000", "--output", str(output), "--plot", str(plot),
    )  # fmt: skip
    assert "at once" in printed
    document = json.loads(output.read_bytes())
    assert [result["request_rate"] for result in document["results"]] == [20.0, "inf"]
    for result in document["results"]:
        assert (result["completed"], result["failed"]) == (6, 0)
        assert 0 < result["median_ttft_ms"] <= result["p99_e2el_ms"]
        assert result["peak_concurrency"] <= 3
        assert result["request_goodput"] == result["request_throughput"]
        assert 6 * 4 <= result["total_output_tokens"] <= 6 * 12
    assert plot.read_text().startswith("<svg")
