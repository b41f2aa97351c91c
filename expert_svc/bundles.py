"""Experts from memory to memory: each worker hands its own out and fetches others'.

A bundle travels in chunks that the receiver asks for, a few at a time, so that neither side ever
holds more than a few unsent ones. The event loop only cuts and sends: bundles are made and hashed
on a thread of their own, from weights that are immutable, without the compute thread's lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ep_kernels.bundle import checksum, pack_bundle
from structlog.typing import FilteringBoundLogger

from expert_svc.heap import is_out_of_memory
from expert_svc.loading import Fetched, Held, PeerError, SupersededError
from expert_svc.slots import SlotTable
from mesh.links import ClientLink, LinkClosed, LinkError, Net, ServerLink
from mesh.messages import BundleChunk, FetchBundle, FromBundles, Source, ToBundles

CHUNK_BYTES = 1 << 20
WINDOW = 4
"""Chunks asked for and not yet received."""
CONNECT_S = 2.0
CHUNK_S = 5.0
"""How long a peer may take for a chunk; for the first one it packs the bundle, after others'."""

_REQUESTS = 256
_EXPORTS = 2
"""Bundles kept for receivers that are not done with them."""
_EXPORT_IDLE_S = 1.0
"""Without a request for so long, none are kept."""
_LOOK_S = 0.05
"""How often a waiting loader looks whether it is still wanted."""


@dataclass(frozen=True, slots=True)
class _Export:
    held: Held
    bundle: torch.Tensor


class BundleServer:
    """Hands this worker's experts out to its peers."""

    def __init__(
        self,
        net: Net,
        address: str,
        table: SlotTable[Any],
        *,
        on_corrupt: Callable[[int, int, Held], None],
        log: FilteringBoundLogger,
    ) -> None:
        """Bind; raises ``LinkError``. ``on_corrupt(layer, expert, held)``: what is held no longer
        has the checksum that it was loaded with.
        """
        self.link: ServerLink[ToBundles, FromBundles] = ServerLink(
            net,
            address,
            receives=ToBundles,
            receive_queue=_REQUESTS,
            refusal=lambda reason: BundleChunk(layer=0, slot=0, expert=0, offset=0, error=reason),
        )
        self._table = table
        self._on_corrupt = on_corrupt
        self._log = log
        self._exports: OrderedDict[tuple[int, int], _Export] = OrderedDict()
        self.sent_bytes = 0

    async def run(self) -> None:
        """Answer one request after another until cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "bundles", torch.set_num_threads, (1,)) as pool:
            try:
                while True:
                    try:
                        async with asyncio.timeout(_EXPORT_IDLE_S if self._exports else None):
                            peer, request = await self.link.recv()
                    except TimeoutError:
                        self._exports.clear()
                        continue
                    held = self._table.find(request.layer, request.slot, request.expert)
                    key = (request.layer, request.expert)
                    export = self._exports.get(key)
                    if held is not None and (export is None or export.held is not held):
                        export = await loop.run_in_executor(pool, self._export, held, *key)
                        self._keep(key, export)
                    answer = _answer(request, held, export)
                    if self.link.send(peer, answer):
                        self.sent_bytes += len(answer.data)
            finally:
                self.link.close()

    def _export(self, held: Held, layer: int, expert: int) -> _Export | None:
        """None when it must not or cannot be handed out. On the exporting thread."""
        try:
            bundle = pack_bundle(held.weights.kept(), layer, expert)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._log.warning("bundle.no_memory", layer=layer, expert=expert)
            return None
        if checksum(bundle) == held.checksum:
            return _Export(held, bundle)
        self._log.error("bundle.corrupt", layer=layer, expert=expert)
        self._on_corrupt(layer, expert, held)
        return None

    def _keep(self, key: tuple[int, int], export: _Export | None) -> None:
        self._exports.pop(key, None)
        if export is not None:
            self._exports[key] = export
            while len(self._exports) > _EXPORTS:
                self._exports.popitem(last=False)


def _answer(request: FetchBundle, held: Held | None, export: _Export | None) -> BundleChunk:
    """The bytes that ``request`` asks for, or why there are none."""
    total = 0 if export is None else export.bundle.nbytes
    begin, end = request.offset, min(request.offset + request.size, total)
    if held is None:
        error = f"slot {request.slot} of layer {request.layer} does not hold {request.expert}"
    elif export is None:
        error = f"expert {request.expert} of layer {request.layer} cannot be handed out"
    elif not 0 <= begin < end or end - begin > CHUNK_BYTES:
        error = f"bytes {begin} to {begin + request.size} of {total}, at most {CHUNK_BYTES} a chunk"
    else:
        return BundleChunk(
            layer=request.layer,
            slot=request.slot,
            expert=request.expert,
            offset=begin,
            total=total,
            checksum=held.checksum,
            shadow=held.shadow.numpy().tobytes() if begin == 0 else b"",
            data=bytes(export.bundle[begin:end].numpy()),
        )
    return BundleChunk(
        layer=request.layer,
        slot=request.slot,
        expert=request.expert,
        offset=request.offset,
        error=error,
    )


class BundleClient:
    """Fetches experts from peers for the loader thread, over links of the event loop."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._loop = asyncio.get_running_loop()

    def fetch(
        self, source: Source, expert: int, limit: int, superseded: threading.Event
    ) -> Fetched:
        """As ``loading.Fetch``; on any thread but the event loop's."""
        future = asyncio.run_coroutine_threadsafe(
            fetch_bundle(self._net, source, expert, limit), self._loop
        )
        while not superseded.is_set():
            try:
                return future.result(_LOOK_S)
            except TimeoutError:
                continue  # ours: the coroutine has made its own a PeerError
        future.cancel()
        raise SupersededError


async def fetch_bundle(net: Net, source: Source, expert: int, limit: int) -> Fetched:
    """One expert of a peer's memory, unchecked, at most ``limit`` bytes. Raises ``PeerError``."""
    loop = asyncio.get_running_loop()

    def on_down() -> None:
        loop.call_soon(link.close)  # not from within its own call

    try:
        link: ClientLink[FromBundles, ToBundles] = ClientLink(
            net, source.address, receives=FromBundles, server=source.peer, on_down=on_down
        )
    except LinkError as error:
        raise PeerError(str(error), gone=True) from None
    try:
        async with asyncio.timeout(CONNECT_S):
            await link.wait_up()
        return await _receive(link, source, expert, limit)
    except TimeoutError:
        raise PeerError(f"{source.peer} does not answer", gone=True) from None
    except LinkClosed:
        raise PeerError(f"{source.peer} is gone", gone=True) from None
    finally:
        link.close()


async def _receive(
    link: ClientLink[FromBundles, ToBundles], source: Source, expert: int, limit: int
) -> Fetched:
    asked = 0

    def ask(up_to: int) -> None:
        nonlocal asked
        size = min(CHUNK_BYTES, up_to - asked)
        request = FetchBundle(
            layer=source.layer, slot=source.peer_slot, expert=expert, offset=asked, size=size
        )
        if not link.send(request):
            raise PeerError(f"{source.peer} takes no requests", gone=True)
        asked += size

    async def answer(begin: int) -> BundleChunk:
        async with asyncio.timeout(CHUNK_S):
            chunk = await link.recv()
        if chunk.error:
            raise PeerError(f"{source.peer}: {chunk.error}", gone=False)
        found = (chunk.layer, chunk.slot, chunk.expert, chunk.offset)
        if found != (source.layer, source.peer_slot, expert, begin):
            raise PeerError(f"{source.peer} answered another request", gone=False)
        return chunk

    ask(CHUNK_BYTES)
    chunk = first = await answer(0)
    total = first.total
    if not 0 < total <= limit:
        raise PeerError(
            f"{source.peer}: a bundle of {total} bytes, expected at most {limit}", gone=False
        )
    bundle = torch.empty(total, dtype=torch.uint8)
    memory = bundle.numpy()
    asked = min(CHUNK_BYTES, total)
    received = 0
    while True:
        end = min(received + CHUNK_BYTES, total)
        if (chunk.total, chunk.checksum, len(chunk.data)) != (
            total,
            first.checksum,
            end - received,
        ):
            raise PeerError(f"{source.peer} changed the bundle on its way", gone=False)
        memory[received:end] = np.frombuffer(chunk.data, dtype=np.uint8)
        received = end
        if received == total:
            break
        while asked < min(total, received + WINDOW * CHUNK_BYTES):
            ask(total)
        chunk = await answer(received)
    if len(first.shadow) % 4:
        raise PeerError(f"{source.peer}: a shadow of {len(first.shadow)} bytes", gone=False)
    shadow = torch.from_numpy(np.frombuffer(first.shadow, dtype=np.float32).copy())
    return Fetched(bundle, first.checksum, shadow)
