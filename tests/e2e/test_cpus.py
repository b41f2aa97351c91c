"""`moemesh up` divides the CPUs among its expert workers, on whatever machine this is."""

from __future__ import annotations

import os
import signal

from mesh.cpus import cpus_text, share_of
from tests.support.meshes import Mesh
from tests.support.threads import allowed_cpus


def allowed(pid: int) -> str:
    """The CPUs on which an expert worker computes."""
    return dict(allowed_cpus(pid))["compute"]


def test_workers_compute_on_cpus_of_their_own_again_after_a_death_and_among_more() -> None:
    usable = os.sched_getaffinity(0)

    def shares(workers: int) -> list[str]:
        found = [share_of(usable, index, workers, 1) for index in range(workers)]
        return [cpus_text(share or usable) for share in found]

    with Mesh(experts=2) as mesh:

        def pids() -> dict[str, int]:
            ready = [m for m in mesh.members("expert") if m["state"] == "ready"]
            return {member["id"]: member["pid"] for member in ready}

        first = pids()
        assert [allowed(first[f"expert-{index}"]) for index in range(2)] == shares(2)
        os.kill(first["expert-1"], signal.SIGKILL)
        mesh.wait_for(
            lambda: pids().get("expert-1", first["expert-1"]) != first["expert-1"],
            "the worker to be back",
        )
        assert allowed(pids()["expert-1"]) == shares(2)[1]
        mesh.run("scale", "experts=3", timeout_s=180.0)
        assert allowed(pids()["expert-2"]) == shares(3)[2]
        assert allowed(pids()["expert-0"]) == shares(2)[0], "whoever runs keeps its share"
