"""A mesh over hosts of their own, made of network namespaces, with keys on every control socket."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.meshes import Mesh
from tests.support.namespaces import Hosts, WideMesh, skip_without_namespaces

HOSTS = ("front", "near", "far")
STREAMS = 4
TOKENS = 200


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    skip_without_namespaces()
    with Hosts(HOSTS) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(tiny_deepseek: Path) -> list[Any]:
    """What a mesh on one host answers, in exact mode: the one right answer."""
    body = {"temperature": 0.8, "ignore_eos": True, "logprobs": 1, "max_tokens": TOKENS}
    with (
        Mesh(tiny_deepseek, experts=1, model__exact="true") as mesh,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        asked = [body | {"prompt": [seed + 8, 40, 90], "seed": seed} for seed in range(STREAMS)]
        answers = list(pool.map(lambda one: mesh.post("/v1/completions", one), asked))
    return [answer["choices"][0] for _, answer in answers]


@pytest.mark.alone
def test_hosts_that_share_nothing_but_a_network_serve_the_right_tokens(
    hosts: Hosts, tmp_path: Path, tiny_deepseek: Path, wanted: list[Any]
) -> None:
    """Then the link of one is cut for longer than its lane lives, and restored."""
    quick = {"network__lane_silence_ms": 1_000, "planner__dead_after_ms": 60_000}
    with WideMesh(hosts, tmp_path, tiny_deepseek, ("near", "far"), **quick) as mesh:
        assert same(mesh.complete(0, TOKENS), wanted[0])
        members = {member["id"]: member for member in mesh.status()["members"]}
        assert members["expert-1"]["host"] == "far"
        # Where a router opens its lane, and nothing of what lets it in.
        place = members["expert-1"]["lanes_tcp"]
        assert re.fullmatch(rf"tcp://{hosts.address['far']}:71\d\d", place)
        # The lane of the worker on the router's own host is in shared memory, the other is not.
        shares = {id_: "memfd:moemesh-lane" in mesh.memory(id_) for id_ in ("expert-0", "expert-1")}
        assert shares == {"expert-0": True, "expert-1": False}
        for one, want in zip(told_while_cut(hosts, mesh), wanted, strict=True):
            assert same(one, want)


@pytest.mark.soak
def test_over_gloo_hosts_serve_the_right_tokens_and_a_cut_costs_none(
    hosts: Hosts, tmp_path: Path, tiny_deepseek: Path, wanted: list[Any]
) -> None:
    quick = {
        "network__data_plane": "gloo",
        "network__lane_silence_ms": 1_000,
        "planner__dead_after_ms": 60_000,
    }
    with WideMesh(hosts, tmp_path, tiny_deepseek, ("near", "far"), **quick) as mesh:
        assert same(mesh.complete(0, TOKENS), wanted[0])
        assert mesh.log("router-0").count('"over":"gloo"') == 2
        for one, want in zip(told_while_cut(hosts, mesh), wanted, strict=True):
            assert same(one, want)
        events = [json.loads(line) for line in mesh.log("router-0").splitlines()]
        assert {e["peer"] for e in events if e["event"] == "lane.lost"} == {"expert-1"}


@pytest.mark.soak
def test_a_host_that_never_comes_back_costs_its_capacity_only(
    hosts: Hosts, tmp_path: Path, tiny_deepseek: Path, wanted: list[Any]
) -> None:
    quick = {
        "network__lane_silence_ms": 1_000,
        "planner__suspect_after_ms": 1_000,
        "planner__dead_after_ms": 3_000,
    }
    with WideMesh(hosts, tmp_path, tiny_deepseek, ("near", "far"), **quick) as mesh:
        with ThreadPoolExecutor(STREAMS) as pool:
            running = [pool.submit(mesh.complete, seed, TOKENS) for seed in range(STREAMS)]
            mesh.wait_for(lambda: mesh.figure("num_requests_running") == STREAMS, "all to run")
            hosts.cut("far")
            got = [future.result() for future in running]
        for one, want in zip(got, wanted, strict=True):
            assert same(one, want)
        mesh.wait_for(lambda: state_of(mesh, "expert-1") == "dead", "it to be given up")
        assert state_of(mesh, "expert-0") == "ready"
        assert same(mesh.complete(1, TOKENS), wanted[1])
        hosts.restore("far")
        # Its experts were given to others, so the process that held them must not come back.
        mesh.wait_for(lambda: mesh.processes["expert-1"].poll() is not None, "it to be refused")
        assert "refused by the planner: fenced" in mesh.log("expert-1")
        mesh.start("expert-1")
        mesh.wait_for(lambda: state_of(mesh, "expert-1") == "ready", "its heir to serve")
        assert same(mesh.complete(2, TOKENS), wanted[2])


@pytest.mark.soak
def test_twenty_milliseconds_and_one_percent_of_loss_cost_time_only(
    hosts: Hosts, tmp_path: Path, tiny_deepseek: Path, wanted: list[Any]
) -> None:
    few = 40
    with WideMesh(hosts, tmp_path, tiny_deepseek, ("near", "far")) as mesh:
        hosts.network.delay_s, hosts.network.loss = 0.02, 0.01
        try:
            with ThreadPoolExecutor(STREAMS) as pool:
                got = list(pool.map(lambda seed: mesh.complete(seed, few), range(STREAMS)))
        finally:
            hosts.network.delay_s, hosts.network.loss = 0.0, 0.0
        for one, want in zip(got, wanted, strict=True):
            for kind in ("tokens", "token_logprobs", "top_logprobs"):
                assert one["logprobs"][kind] == want["logprobs"][kind][:few]
        assert hosts.network.lost > 0
        assert "refused" not in mesh.log("expert-0") + mesh.log("expert-1")


@pytest.mark.soak
def test_a_network_that_comes_and_goes_costs_no_request_and_no_token(
    hosts: Hosts, tmp_path: Path, tiny_deepseek: Path, wanted: list[Any]
) -> None:
    """Hosts are cut off in turn, for a moment or for longer than any link lives."""
    draw = random.Random(3)
    quick = {"network__lane_silence_ms": 1_000, "planner__dead_after_ms": 60_000}
    ended = threading.Event()

    def ask(mesh: WideMesh, seed: int) -> int:
        asked = 0
        while not ended.is_set():
            assert same(mesh.complete(seed, TOKENS), wanted[seed])
            asked += 1
        return asked

    with WideMesh(hosts, tmp_path, tiny_deepseek, ("near", "far"), **quick) as mesh:
        hosts.network.loss = 0.005
        try:
            with ThreadPoolExecutor(STREAMS) as pool:
                running = [pool.submit(ask, mesh, seed) for seed in range(STREAMS)]
                for _ in range(12):
                    host = draw.choice(("near", "far", "far"))
                    hosts.cut(host)
                    time.sleep(draw.choice((0.3, 1.5, 6.0)))  # what the network does, no waiting
                    hosts.restore(host)
                    time.sleep(draw.uniform(0.2, 2.0))
                ended.set()
                assert all(future.result() > 0 for future in running)
        finally:
            ended.set()
            hosts.network.loss = 0.0
        assert "gone silent" in mesh.log("router-0")
        states = {member["id"]: member["state"] for member in mesh.status()["members"]}
        assert states == dict.fromkeys(states, "ready")


def told_while_cut(hosts: Hosts, mesh: WideMesh) -> list[Any]:
    """The answers to all streams, while which a host loses its lane and comes back."""
    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(mesh.complete, seed, TOKENS) for seed in range(STREAMS)]
        # Not all of them: on a busy machine the first may end before the last begins.
        mesh.wait_for(lambda: mesh.figure("num_requests_running") > 0, "one to run")
        hosts.cut("far")
        mesh.wait_for(lambda: "gone silent" in mesh.log("router-0"), "the lane to be lost")
        hosts.restore("far")
        return [future.result() for future in running]


def state_of(mesh: WideMesh, id_: str) -> str:
    return next(m["state"] for m in mesh.status()["members"] if m["id"] == id_)


def same(one: Any, want: Any) -> bool:
    return (one["text"], one["logprobs"]) == (want["text"], want["logprobs"])
