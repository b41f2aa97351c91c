"""A mesh is upgraded, and taken back, while clients stream: two releases serve together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.meshes import Mesh
from tests.support.releases import Installation
from tests.support.streams import Clients, Reference, asks

STREAMS = 2
PATIENCE_S = 300.0


def protocols(mesh: Mesh, members: Sequence[str]) -> dict[str, int]:
    """Member -> the protocol that it was last welcomed with."""
    found = {}
    for member in members:
        lines = (mesh.run_dir / "logs" / f"{member}.log").read_text().splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        welcomed = [e for e in events if e["event"] == "planner.welcomed"]
        found[member] = welcomed[-1]["protocol"]
    return found


class Upgraded:
    """A mesh under load whose processes are started again with another release."""

    def __init__(self, mesh: Mesh, installation: Installation, clients: Clients) -> None:
        self.mesh = mesh
        self._installation = installation
        self._clients = clients

    def restart(self, release: str, *members: str) -> None:
        self._installation.use(release)
        self.mesh.run("restart", *members, timeout_s=PATIENCE_S)
        self.flows()

    def flows(self) -> None:
        """Each client has begun and ended another request since."""
        enough = len(self._clients.answers) + 2 * STREAMS
        self.mesh.wait_for(
            lambda: self._clients.failures or len(self._clients.answers) >= enough, "answers", 60.0
        )
        assert not self._clients.failures, self.mesh.logs()


def upgraded(model: Path, directory: Path, steps: Sequence[tuple[str, tuple[str, ...]]]) -> list:
    """Takes a mesh through ``steps`` of (release, what is restarted); the protocols after each."""
    choices = asks(11, STREAMS, prompt_tokens=20, max_tokens=60)
    installation = Installation(directory)
    members = ("gateway-0", "router-0", "expert-0", "expert-1")
    seen = []
    with Mesh(
        model,
        experts=2,
        environment=installation.environ(),
        model__exact="true",
        logs__format="json",
    ) as mesh:
        reference = Reference(mesh)
        reference.learn(choices)
        seen.append(protocols(mesh, members))
        with Clients([mesh.port], choices, STREAMS, reference=reference) as clients:
            under_load = Upgraded(mesh, installation, clients)
            under_load.flows()
            for release, restarted in steps:
                under_load.restart(release, *restarted)
                seen.append(protocols(mesh, members))
        assert not clients.failures, mesh.logs()
    return seen


def test_neighbouring_releases_serve_together(tiny_deepseek: Path, tmp_path: Path) -> None:
    seen = upgraded(
        tiny_deepseek,
        tmp_path,
        [("next", ("planner", "expert-1"))],
    )
    old, new = ("gateway-0", "router-0", "expert-0"), ("expert-1",)
    assert set(seen[0].values()) == {1}
    assert {seen[1][member] for member in old} == {1}
    assert {seen[1][member] for member in new} == {2}


@pytest.mark.soak
def test_a_rolling_upgrade_and_its_way_back_lose_nothing(
    tiny_deepseek: Path, tmp_path: Path
) -> None:
    seen = upgraded(tiny_deepseek, tmp_path, [("next", ("--rolling",)), ("this", ("--rolling",))])
    assert [set(step.values()) for step in seen] == [{1}, {2}, {1}]
