"""A mesh is scaled, drained and started again under load: no request fails, no token is lost."""

from __future__ import annotations

import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.meshes import Mesh

STREAMS = 4
TOKENS = 150


class Load:
    """Clients that stream the same completion again and again, each its own."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.done: list[tuple[int, Any]] = []
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(STREAMS)
        self._running = [self._pool.submit(self._client, index) for index in range(STREAMS)]

    def _client(self, index: int) -> None:
        while not self._stop.is_set():
            self.done.append((index, streamed(self.mesh, index)))

    def flows(self) -> None:
        """Waits until each client has had another whole answer; raises what one of them did."""
        before = len(self.done)

        def all_answered() -> bool:
            for one in self._running:
                if one.done():
                    one.result()
            return {index for index, _ in self.done[before:]} == set(range(STREAMS))

        self.mesh.wait_for(all_answered, "every client to be answered again", 60.0)

    def end(self) -> None:
        self._stop.set()
        for one in self._running:
            one.result()
        self._pool.shutdown()


def streamed(mesh: Mesh, index: int) -> list[Any]:
    """Text, tokens and log-probabilities, chunk by chunk; raises for anything but a whole stream."""
    body = {
        "model": "deepseek", "prompt": [index + 8, 40, 90], "max_tokens": TOKENS, "seed": index,
        "temperature": 0.8, "ignore_eos": True, "logprobs": 1, "stream": True,
    }  # fmt: skip
    request = urllib.request.Request(
        mesh.url + "/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    pieces: list[Any] = []
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                choice = chunk["choices"][0]
                pieces += zip(
                    choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True
                )
            elif line.startswith(b"data: [DONE]"):
                return pieces
    raise AssertionError(f"the stream broke off after {len(pieces)} tokens")


def pids(mesh: Mesh) -> dict[str, int]:
    status = mesh.status()
    assert status["ready"], status["reason"]
    assert {member["state"] for member in status["members"]} <= {"ready", "left"}
    return {m["id"]: m["pid"] for m in status["members"] if m["state"] == "ready"}


def placed(mesh: Mesh) -> set[str]:
    return {member["id"] for member in mesh.members("expert") if member["slots_per_layer"]}


def test_no_change_of_the_fleet_costs_a_request_or_a_token(tiny_deepseek: Path) -> None:
    with Mesh(tiny_deepseek, experts=2, routers=1, model__exact="true") as mesh:
        wanted = [streamed(mesh, index) for index in range(STREAMS)]
        assert {len(pieces) for pieces in wanted} == {TOKENS}
        before = pids(mesh)
        load = Load(mesh)

        mesh.run("scale", "experts=3", "routers=2", timeout_s=120)
        assert pids(mesh).keys() - before.keys() == {"expert-2", "router-1"}
        assert placed(mesh) == {"expert-0", "expert-1", "expert-2"}
        load.flows()

        mesh.run("drain", "expert-1")
        assert placed(mesh) == {"expert-0", "expert-2"}
        assert "draining" in mesh.run("status", "--once")
        load.flows()
        mesh.run("drain", "expert-1", "--undo")
        mesh.wait_for(lambda: "expert-1" in placed(mesh), "expert-1 to get a share again")

        mesh.run("scale", "experts=2", "routers=1", timeout_s=120)
        assert pids(mesh) == before
        assert placed(mesh) == {"expert-0", "expert-1"}
        load.flows()

        mesh.run("restart", "--rolling", timeout_s=300)
        after = pids(mesh)
        assert after.keys() == before.keys()
        assert not set(after.values()) & set(before.values())
        load.flows()

        load.end()
        for index, pieces in load.done:
            assert pieces == wanted[index]
