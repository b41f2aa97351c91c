"""``moemesh bench`` on a running mesh."""

from __future__ import annotations

import re

from tests.support.meshes import Mesh


def test_bench_step_prints_where_each_process_spent_its_time(demo_mesh: Mesh) -> None:
    printed = demo_mesh.run("bench", "step", "--tokens", "12", "--streams", "2")
    for member in ("router-0", "expert-0", "expert-1", "gateway-0", "planner"):
        assert re.search(rf"^{member} +\d", printed, re.MULTILINE), printed
    assert re.search(r"router-0: [\d.]+% of a step of [\d.]+ ms passed outside", printed), printed
    assert "tokens/s with 2 streams" in printed
