"""Experts between two workers' tables over real links."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import torch
import uvloop
from ep_kernels.packed import Matrix, pack

from expert_svc import bundles
from expert_svc.bundles import CHUNK_BYTES, BundleClient, BundleServer, fetch_bundle
from expert_svc.loading import Held, PeerError, SupersededError
from expert_svc.slots import Applied, SlotTable
from mesh.links import Net, ServerLink
from mesh.messages import BundleChunk, FetchBundle, FromBundles, ToBundles
from tests.support.experts import Reads, apply, new_table, source

SIZE = (384, 512)
"""Hidden and intermediate: a bundle of 2.25 MiB, three chunks, in two packed matrices."""
BUNDLE_BYTES = 64 + 3 * 384 * 512 * 4
DEADLINE_S = 60.0


class Scene:
    """An owner of experts 4 and 2 in layer 1, and one that fetches them."""

    def __init__(self, net: Net, home: Path) -> None:
        self.net = net
        self.address = f"ipc://{home}/owner.bundles"
        self.owner = new_table(Reads(*SIZE))
        apply(self.owner, [4, 2], [])
        self.read = Reads(*SIZE)
        self.table = new_table(self.read, fetch=BundleClient(net).fetch)
        self.corrupt: list[tuple[int, int, Held]] = []
        self.superseded = threading.Event()

    def server(self) -> BundleServer:
        def on_corrupt(layer: int, expert: int, held: Held) -> None:
            self.owner.discard(layer, expert, held)
            self.corrupt.append((layer, expert, held))

        return BundleServer(
            self.net, self.address, self.owner, on_corrupt=on_corrupt, log=structlog.get_logger()
        )

    async def move(self, slots: list[int]) -> Applied:
        """Have the experts that the owner holds in its slots."""
        held = self.owner.held()[0]
        sources = [
            source(1, slot, self.address, held.index(expert))
            for slot, expert in enumerate(slots)
            if expert in held
        ]
        return await asyncio.to_thread(
            apply, self.table, slots, [], sources=sources, superseded=self.superseded
        )

    def same_bits(self) -> bool:
        """Whether every slot computes exactly what the checkpoint's expert does."""
        fresh = new_table(Reads(*SIZE))
        apply(fresh, *(list(row) for row in self.table.held()))
        x = torch.randn(5, SIZE[0])
        return all(
            torch.equal(ours.weights.ffn(x), theirs.weights.ffn(x))
            for slot, expert in enumerate(self.table.held()[0])
            if (ours := self.table.find(1, slot, expert)) is not None
            and (theirs := fresh.find(1, slot, expert)) is not None
        )


Answer = Callable[[FetchBundle, BundleChunk], BundleChunk | None]


@asynccontextmanager
async def serving(scene: Scene, change: Answer | None = None) -> Any:
    """The owner's server; with ``change``, one that answers what that makes of its answers, None
    for no answer at all."""
    server = scene.server()
    task = asyncio.ensure_future(_lie(scene, server, change) if change else server.run())
    try:
        yield server
    finally:
        task.cancel()
        await asyncio.wait([task])
        server.link.close()


async def _lie(scene: Scene, server: BundleServer, change: Answer) -> None:
    """As ``BundleServer.run``, with every answer changed."""
    link: ServerLink[ToBundles, FromBundles] = server.link
    while True:
        peer, request = await link.recv()
        held = scene.owner.find(request.layer, request.slot, request.expert)
        export = held and server._export(held, request.layer, request.expert)
        answer = change(request, bundles._answer(request, held, export))
        if answer is not None:
            link.send(peer, answer)


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[Scene], Awaitable[None]]], None]:
    def runner(main: Callable[[Scene], Awaitable[None]]) -> None:
        async def bounded() -> None:
            net = Net()
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await main(Scene(net, tmp_path))
            finally:
                net.close()

        uvloop.run(bounded())

    return runner


async def until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.01)


def test_an_expert_that_came_from_a_peer_computes_the_same_bits(run, monkeypatch) -> None:
    monkeypatch.setattr(bundles, "_EXPORT_IDLE_S", 0.05)

    async def main(scene: Scene) -> None:
        async with serving(scene) as server:
            applied = await scene.move([2, 4])
            assert (applied.loaded, applied.from_peers, applied.faults) == (2, 2, ())
            assert applied.loaded_bytes == 2 * BUNDLE_BYTES == server.sent_bytes
            assert scene.read.read == []
            assert scene.same_bits()
            await until(lambda: not server._exports)

    run(main)


def flip(region: str) -> Answer:
    """Flip one bit of one transfer's bytes."""

    def change(request: FetchBundle, chunk: BundleChunk) -> BundleChunk:
        place = {"header": 9, "first": 100, "middle": CHUNK_BYTES + 5, "last": BUNDLE_BYTES - 1}
        if region in {"checksum", "shadow"}:
            value = bytearray(getattr(chunk, region))
            if value:
                value[-1] ^= 0x40
            return msgspec.structs.replace(chunk, **{region: bytes(value)})
        at = place[region] - chunk.offset
        if not 0 <= at < len(chunk.data):
            return chunk
        data = bytearray(chunk.data)
        data[at] ^= 1
        return msgspec.structs.replace(chunk, data=bytes(data))

    return change


@pytest.mark.parametrize("region", ["header", "first", "middle", "last", "checksum", "shadow"])
def test_a_bit_flipped_on_the_way_never_serves(run, region: str) -> None:
    async def main(scene: Scene) -> None:
        async with serving(scene, flip(region)):
            applied = await scene.move([2, -1])
        assert (applied.loaded, applied.from_peers, applied.faults) == (1, 0, ())
        assert scene.read.read == [(1, 2)]
        kind = "shadow" if region == "shadow" else "checksum"
        assert dict(scene.table.tally.faults) == {kind: 1}
        assert scene.same_bits()

    run(main)


def test_a_bit_flipped_in_the_owners_memory_is_found_and_serves_nowhere(run) -> None:
    async def main(scene: Scene) -> None:
        held = scene.owner.find(1, 1, 2)
        assert held is not None
        matrix = held.weights.down.matrix()
        bits = matrix.values.clone().view(torch.int32)
        bits[7, 7] ^= 1
        spoilt = pack(Matrix(matrix.storage, bits.view(torch.float32)))
        object.__setattr__(held.weights, "down", spoilt)
        async with serving(scene):
            applied = await scene.move([2, 4])
            assert (applied.from_peers, applied.faults) == (1, ())
            assert scene.read.read == [(1, 2)]
            assert scene.same_bits()
        assert [(layer, expert) for layer, expert, _ in scene.corrupt] == [(1, 2)]
        assert scene.owner.held() == ((4, -1), ()), "its owner does not serve it either"

    run(main)


def test_an_owner_that_dies_in_mid_transfer_is_replaced_by_the_checkpoint(run) -> None:
    async def main(scene: Scene) -> None:
        def die(request: FetchBundle, chunk: BundleChunk) -> BundleChunk | None:
            if request.offset == 0:
                return chunk
            server.link.close()
            return None

        async with serving(scene, die) as server:
            applied = await scene.move([2, 4])
        assert (applied.loaded, applied.from_peers, applied.faults) == (2, 0, ())
        assert scene.read.read == [(1, 2), (1, 4)]
        assert dict(scene.table.tally.faults) == {"peer": 1}, "the dead are asked once"
        assert scene.same_bits()

    run(main)


def test_a_slot_that_is_replaced_in_mid_transfer_gives_no_more(run, monkeypatch) -> None:
    async def main(scene: Scene) -> None:
        def replace(layer: int, slot: int, expert: int) -> Held | None:
            held = SlotTable.find(scene.owner, layer, slot, expert)
            calls.append(expert)
            if len(calls) == 1:
                apply(scene.owner, [4, 5], [])
            return held

        calls: list[int] = []
        monkeypatch.setattr(scene.owner, "find", replace)
        async with serving(scene):
            applied = await scene.move([2, -1])
        assert (applied.loaded, applied.from_peers, applied.faults) == (1, 0, ())
        assert scene.read.read == [(1, 2)]
        assert len(calls) > 1
        assert scene.same_bits()

    run(main)


@pytest.mark.parametrize("there", [True, False])
def test_a_peer_that_does_not_answer_is_given_up(run, monkeypatch, there: bool) -> None:
    monkeypatch.setattr(bundles, "CONNECT_S", 5.0 if there else 0.1)
    monkeypatch.setattr(bundles, "CHUNK_S", 0.1)

    async def main(scene: Scene) -> None:
        if there:
            async with serving(scene, lambda _request, _chunk: None):
                applied = await scene.move([2, 4])
        else:
            applied = await scene.move([2, 4])
        assert (applied.loaded, applied.from_peers, applied.faults) == (2, 0, ())
        assert dict(scene.table.tally.faults) == {"peer": 1}

    run(main)


def test_a_newer_assignment_ends_a_transfer(run) -> None:
    async def main(scene: Scene) -> None:
        def supersede(_request: FetchBundle, _chunk: BundleChunk) -> None:
            scene.superseded.set()

        async with serving(scene, supersede):
            with pytest.raises(SupersededError):
                await scene.move([2, 4])
        assert scene.table.held() == ((-1, -1), ())
        assert scene.read.read == []

    run(main)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"total": 0}, "bundle of 0 bytes"),
        ({"total": 1 << 40}, "expected at most"),
        ({"data": b""}, "changed the bundle"),
        ({"expert": 4}, "another request"),
        ({"offset": 64}, "another request"),
        ({"shadow": b"xyz"}, "shadow of 3 bytes"),
        ({"error": "slot 1 is empty"}, "slot 1 is empty"),
    ],
)
def test_nonsense_from_a_peer_is_its_error(run, changes: dict[str, Any], text: str) -> None:
    async def main(scene: Scene) -> None:
        def change(_request: FetchBundle, chunk: BundleChunk) -> BundleChunk:
            return msgspec.structs.replace(chunk, **changes)

        async with serving(scene, change):
            with pytest.raises(PeerError, match=text) as failed:
                await fetch_bundle(scene.net, source(1, 0, scene.address, 1), 2, limit=BUNDLE_BYTES)
        assert not failed.value.gone

    run(main)


def test_requests_that_cannot_be_met_are_refused_and_others_served_on(run) -> None:
    async def main(scene: Scene) -> None:
        wanted = source(1, 0, scene.address, 1)
        async with serving(scene):
            for slot, expert in ((0, 2), (7, 2), (-1, 2)):
                wrong = source(1, 0, scene.address, slot)
                with pytest.raises(PeerError, match="does not hold"):
                    await fetch_bundle(scene.net, wrong, expert, limit=BUNDLE_BYTES)
            fetched = await asyncio.gather(
                *(fetch_bundle(scene.net, wanted, 2, limit=BUNDLE_BYTES) for _ in range(3))
            )
        assert all(torch.equal(each.bundle, fetched[0].bundle) for each in fetched)

    run(main)


@pytest.mark.parametrize(
    ("offset", "size"),
    [(-1, 10), (0, 0), (0, -5), (0, CHUNK_BYTES + 1), (BUNDLE_BYTES, 1), (1 << 60, 1 << 60)],
)
def test_no_request_reads_beyond_a_bundle_or_more_than_a_chunk(run, offset, size) -> None:
    async def main(scene: Scene) -> None:
        held = scene.owner.find(1, 1, 2)
        assert held is not None
        export = scene.server()._export(held, 1, 2)
        request = FetchBundle(layer=1, slot=1, expert=2, offset=offset, size=size)
        answer = bundles._answer(request, held, export)
        assert answer.error
        assert answer.data == b""

    run(main)
