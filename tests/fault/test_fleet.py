"""A mesh is scaled, drained and started again under load: no request fails, no token is lost. Then
it is stopped.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.meshes import STOP_DEADLINE_S, Mesh
from tests.support.streams import Clients, Reference, asks
from tests.support.threads import compute_cpus, shares

STREAMS = 2
PATIENCE_S = 300.0
"""For a command that starts processes, one after another, on cores that are busy with tokens."""


def pids(mesh: Mesh) -> dict[str, int]:
    """Member -> process, on a mesh that is ready; those that have left are still told of."""
    status = mesh.status()
    assert status["ready"], status["reason"]
    there = [member for member in status["members"] if member["state"] != "left"]
    assert {member["state"] for member in there} == {"ready"}
    return {member["id"]: member["pid"] for member in there}


def placed(mesh: Mesh) -> set[str]:
    """Expert workers that hold experts."""
    return {member["id"] for member in mesh.members("expert") if member["slots_per_layer"]}


def test_no_change_of_the_fleet_costs_a_request_or_a_token(tiny_deepseek: Path) -> None:
    choices = asks(7, STREAMS, prompt_tokens=20, max_tokens=80)
    with Mesh(tiny_deepseek, experts=2, routers=1, model__exact="true") as mesh:
        reference = Reference(mesh)
        reference.learn(choices)
        before = pids(mesh)

        with Clients([mesh.port], choices, STREAMS, reference=reference) as clients:

            def flows() -> None:
                """Each client has begun and ended another request since."""
                enough = len(clients.answers) + 2 * STREAMS
                mesh.wait_for(
                    lambda: clients.failures or len(clients.answers) >= enough, "answers", 60.0
                )
                assert not clients.failures, mesh.logs()

            flows()
            mesh.run("scale", "experts=3", "routers=2", timeout_s=PATIENCE_S)
            more = pids(mesh)
            assert more.keys() - before.keys() == {"expert-2", "router-1"}
            assert compute_cpus(more["expert-2"]) == shares(3)[2]
            assert compute_cpus(more["expert-0"]) == shares(2)[0], "whoever runs keeps its share"
            assert placed(mesh) == {"expert-0", "expert-1", "expert-2"}
            flows()

            mesh.run("drain", "expert-1")
            assert placed(mesh) == {"expert-0", "expert-2"}
            assert "draining" in mesh.run("status", "--once")
            flows()
            mesh.run("drain", "expert-1", "--undo")
            mesh.wait_for(lambda: "expert-1" in placed(mesh), "expert-1 to get a share again")

            mesh.run("scale", "experts=2", "routers=1", timeout_s=PATIENCE_S)
            assert pids(mesh) == before
            assert placed(mesh) == {"expert-0", "expert-1"}
            flows()

            # The one router and the one gateway are stood in for meanwhile.
            mesh.run("restart", "--rolling", timeout_s=PATIENCE_S)
            after = pids(mesh)
            assert after.keys() == before.keys()
            assert not set(after.values()) & set(before.values())
            flows()
        assert not clients.failures, mesh.logs()
        mesh.run("down")  # what Ctrl-C does, from elsewhere
        assert mesh.process is not None
        assert mesh.process.wait(STOP_DEADLINE_S) == 0
        assert not mesh.run_dir.exists()
