from __future__ import annotations

import asyncio
import stat

import pytest

from compose.control import ControlServer, OrderFailed, Restart, Scale, order
from compose.options import UsageError
from mesh.links import Net
from mesh.settings import MeshSettings, Settings

DEADLINE_S = 20.0


def with_server(run_dir, carry_out, commands):
    """``await commands(settings, server)`` beside a launcher's end that does ``carry_out``."""
    settings = Settings(mesh=MeshSettings(run_dir=str(run_dir)))

    async def main():
        net = Net()
        try:
            async with asyncio.timeout(DEADLINE_S):
                server = asyncio.ensure_future(ControlServer(net, settings, carry_out).run())
                try:
                    await commands(settings, server)
                finally:
                    server.cancel()
                    await asyncio.wait([server])
        finally:
            net.close()

    asyncio.run(main())


def test_an_order_is_answered_with_what_is_done_and_how_it_ends(tmp_path):
    async def carry_out(given, say):
        say(f"begin {given.counts}")
        if given.counts["expert"] > 1:
            raise OrderFailed("too many")

    async def commands(settings, server):
        assert stat.S_IMODE((tmp_path / "launcher.sock").stat().st_mode) == 0o600
        told = []
        await order(settings, Scale(counts={"expert": 1}), told.append)
        assert told == ["begin {'expert': 1}"]
        with pytest.raises(UsageError, match="too many") as failed:
            await order(settings, Scale(counts={"expert": 2}), told.append)
        assert failed.value.exit_code == 1

    with_server(tmp_path, carry_out, commands)


def test_a_second_order_is_refused_meanwhile_and_a_stop_ends_the_first(tmp_path):
    begun = asyncio.Event()

    async def carry_out(given, say):
        begun.set()
        await asyncio.Event().wait()

    async def commands(settings, server):
        first = asyncio.ensure_future(order(settings, Restart(), print))
        await begun.wait()
        with pytest.raises(UsageError, match="busy: restart"):
            await order(settings, Restart(), print)
        server.cancel()
        with pytest.raises(UsageError, match=r"the mesh is stopping|the launcher has ended"):
            await first

    with_server(tmp_path, carry_out, commands)


def test_without_a_launcher_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("compose.control._CONNECT_S", 0.05)
    settings = Settings(mesh=MeshSettings(run_dir=str(tmp_path)))
    with pytest.raises(UsageError, match="no mesh was started"):
        asyncio.run(order(settings, Restart(), print))
