"""A control link over TCP whose peer is cut off: nothing comes, and nobody closes anything."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from mesh.links import ClientLink, Net, ServerLink
from mesh.messages import FromPlanner, GetView, Goodbye, ToPlanner, Unknown


class Wire:
    """Passes bytes between whoever connects and ``port``, while it is ``whole``."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.whole = asyncio.Event()
        self.whole.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.whole.wait()
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._tasks.add(asyncio.create_task(self._pass(source, sink)))

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                await self.whole.wait()
                sink.write(data)
        sink.close()


def test_a_client_notices_silence_and_connects_anew_once_it_ends(net: Net, run: Any) -> None:
    async def main() -> None:
        server = ServerLink[ToPlanner, FromPlanner](net, "tcp://127.0.0.1:0", receives=ToPlanner)
        wire = Wire(int(server.address.rpartition(":")[2]))
        went_down = asyncio.Event()
        async with wire as address:
            client = ClientLink[FromPlanner, ToPlanner](
                net, address, receives=FromPlanner, on_down=went_down.set
            )
            await client.wait_up()
            client.send(GetView())
            first, _ = await server.recv()
            wire.whole.clear()
            await went_down.wait()
            assert not client.send(Goodbye(id="x", incarnation=1))
            wire.whole.set()
            await client.wait_up()
            client.send(GetView())
            again, message = await server.recv()
            assert message == GetView()
            assert again != first
            assert server.send(again, Unknown())
            assert await client.recv() == Unknown()
            client.close()
        server.close()

    run(main())
