from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
import structlog

from mesh.links import (
    SEND_QUEUE,
    ClientLink,
    LinkClosed,
    LinkError,
    Net,
    Publisher,
    ServerLink,
    Subscriber,
    request,
)
from mesh.messages import (
    Cancel,
    FromPlanner,
    FromRouter,
    GetStatus,
    GetView,
    Ping,
    Rejected,
    Status,
    ToPlanner,
    ToRouter,
    Unknown,
    View,
)


class Wire:
    """A server and a client over one address, closed at the end."""

    def __init__(self, net: Net, address: str, **server: object) -> None:
        self.net = net
        self.address = address
        self.lost: asyncio.Queue[bytes] = asyncio.Queue()
        self.events: asyncio.Queue[str] = asyncio.Queue()
        self.server = self.serve(**server)
        self.client = self.connect()

    def serve(self, **options: object) -> ServerLink[ToRouter, FromRouter]:
        return ServerLink(
            self.net, self.address, receives=ToRouter, on_lost=self.lost.put_nowait, **options
        )  # type: ignore[arg-type]

    def connect(self) -> ClientLink[FromRouter, ToRouter]:
        return ClientLink(
            self.net,
            self.address,
            receives=FromRouter,
            on_up=lambda: self.events.put_nowait("up"),
            on_down=lambda: self.events.put_nowait("down"),
        )

    async def __aenter__(self) -> Wire:
        await self.client.wait_up()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.close()
        self.server.close()


def _cancel(number: int) -> Cancel:
    return Cancel(requests=(str(number),))


def test_messages_arrive_typed_and_in_order_both_ways(run, net: Net, address: str) -> None:
    async def main() -> None:
        async with Wire(net, address) as wire:
            for i in range(500):
                assert wire.client.send(_cancel(i))
            for i in range(500):
                peer, message = await wire.server.recv()
                assert message == _cancel(i)
                assert wire.server.send(peer, Rejected(request=str(i), reason=""))
            for i in range(500):
                assert await wire.client.recv() == Rejected(request=str(i), reason="")
            assert wire.server.counters.received == wire.server.counters.sent == 500

    run(main())


def test_each_answer_goes_to_the_peer_that_asked(run, net: Net, address: str) -> None:
    async def main() -> None:
        async with Wire(net, address) as wire:
            others = [wire.connect() for _ in range(3)]
            clients = [wire.client, *others]
            for i, client in enumerate(clients):
                await client.wait_up()
                client.send(Ping(gateway=str(i), incarnation=i))
            for _ in clients:
                peer, ping = await wire.server.recv()
                assert isinstance(ping, Ping)
                wire.server.send(peer, Rejected(request=ping.gateway, reason=""))
            for i, client in enumerate(clients):
                answer = await client.recv()
                assert isinstance(answer, Rejected)
                assert answer.request == str(i)
            for client in others:
                client.close()

    run(main())


def test_a_slow_server_bounds_what_a_client_can_queue_and_loses_nothing(
    run, net: Net, address: str
) -> None:
    async def main() -> None:
        async with Wire(net, address, receive_queue=10) as wire:
            sent = 0
            refused_in_a_row = 0
            # What is on its way settles while we keep trying; ZeroMQ's thread may be late.
            while refused_in_a_row < 200 or sent <= SEND_QUEUE:
                if wire.client.send(_cancel(sent)):
                    sent += 1
                    refused_in_a_row = 0
                else:
                    refused_in_a_row += 1
                await asyncio.sleep(0)
            # Two ZeroMQ queues, our own, and what the kernel's socket buffers hold.
            assert sent < 50_000
            assert wire.client.counters.unsent >= 200
            for i in range(sent):
                _, message = await wire.server.recv()
                assert message == _cancel(i)
            assert wire.client.send(_cancel(sent))
            assert (await wire.server.recv())[1] == _cancel(sent)

    run(main())


def test_undecodable_bytes_are_counted_logged_and_dropped(run, net: Net, address: str) -> None:
    async def main() -> None:
        async with Wire(net, address) as wire:
            with structlog.testing.capture_logs() as logs:
                for junk in (b"\xc1", b"x", b"\x81\xa4type\xa5Tokens", b"\x81\xa4type\xa4Ping"):
                    wire.client._socket.raw.send(junk)
                wire.client.send(Ping(gateway="g", incarnation=1))
                assert (await wire.server.recv())[1] == Ping(gateway="g", incarnation=1)
            assert wire.server.counters.undecodable == 4
            events = [(line["event"], line["count"]) for line in logs]
            assert events == [("link.undecodable", n) for n in (1, 2, 4)]

    run(main())


def test_nothing_is_sent_to_a_server_that_is_not_there(run, net: Net, address: str) -> None:
    async def main() -> None:
        client: ClientLink[FromRouter, ToRouter] = ClientLink(net, address, receives=FromRouter)
        assert not client.up
        assert not client.send(_cancel(1))
        server: ServerLink[ToRouter, FromRouter] = ServerLink(net, address, receives=ToRouter)
        await client.wait_up()
        assert client.send(_cancel(2))
        assert (await server.recv())[1] == _cancel(2)
        client.close()
        server.close()

    run(main())


def test_a_client_outlives_its_server(run, net: Net, address: str) -> None:
    async def main() -> None:
        async with Wire(net, address) as wire:
            assert await wire.events.get() == "up"
            wire.client.send(_cancel(1))
            old, _ = await wire.server.recv()
            wire.server.close()
            assert await wire.events.get() == "down"
            assert not wire.client.up
            assert not wire.client.send(_cancel(2))
            wire.server = wire.serve()
            assert await wire.events.get() == "up"
            assert wire.client.send(_cancel(3))
            new, message = await wire.server.recv()
            assert message == _cancel(3), "a message for the old server is not delivered late"
            assert new != old, "a new connection is a new peer"
            assert not wire.server.send(old, Rejected(request="", reason=""))
            assert wire.server.counters.unsent == 1

    run(main())


def test_the_server_is_told_of_a_lost_peer_after_its_last_message(
    run, net: Net, address: str
) -> None:
    async def main() -> None:
        async with Wire(net, address) as wire:
            other = wire.connect()
            await other.wait_up()
            other.send(_cancel(1))
            peer, _ = await wire.server.recv()
            wire.client.send(_cancel(2))
            stays, _ = await wire.server.recv()
            other.send(_cancel(3))
            other.close()
            assert await wire.server.recv() == (peer, _cancel(3))
            assert wire.lost.empty(), "what it said last comes first"
            receiving = asyncio.ensure_future(wire.server.recv())
            assert await wire.lost.get() == peer
            receiving.cancel()
            assert not wire.server.send(peer, Rejected(request="", reason=""))
            assert wire.server.send(stays, Rejected(request="still", reason=""))
            answer = await wire.client.recv()
            assert answer == Rejected(request="still", reason=""), "probes are not messages"
            assert wire.lost.empty()

    run(main())


def test_closing_ends_a_waiting_receiver(run, net: Net, address: str) -> None:
    async def main() -> None:
        async with Wire(net, address) as wire, asyncio.TaskGroup() as tasks:

            async def receive() -> None:
                with pytest.raises(LinkClosed):
                    await wire.client.recv()

            tasks.create_task(receive())
            await asyncio.sleep(0)
            wire.client.close()
            wire.client.close()
            assert not wire.client.send(_cancel(1))

    run(main())


def test_a_cancelled_receive_loses_no_message(run, net: Net, address: str) -> None:
    async def main() -> None:
        async with Wire(net, address) as wire:
            waiting = asyncio.ensure_future(wire.server.recv())
            await asyncio.sleep(0)
            waiting.cancel()
            wire.client.send(_cancel(1))
            assert (await wire.server.recv())[1] == _cancel(1)

    run(main())


def test_sockets_are_private_and_removed_on_close(run, net: Net, tmp_path: Path) -> None:
    async def main() -> None:
        server: ServerLink[ToRouter, FromRouter] = ServerLink(
            net, f"ipc://{tmp_path}/s", receives=ToRouter
        )
        publisher: Publisher[View] = Publisher(net, f"ipc://{tmp_path}/p")
        modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "sp"]
        assert modes == [0o600, 0o600]
        server.close()
        publisher.close()

    run(main())
    assert list(tmp_path.iterdir()) == []


def test_the_net_closes_what_was_forgotten(run, net: Net, tmp_path: Path) -> None:
    async def main() -> None:
        Publisher(net, f"ipc://{tmp_path}/p")
        net.close()

    run(main())
    assert list(tmp_path.iterdir()) == []


def test_closing_leaves_a_socket_that_another_process_has_bound_since(
    run, net: Net, address: str
) -> None:
    async def main() -> None:
        other = Net()
        first: ServerLink[ToRouter, FromRouter] = ServerLink(other, address, receives=ToRouter)
        heir: ServerLink[ToRouter, FromRouter] = ServerLink(net, address, receives=ToRouter)
        first.close()
        other.close()
        client: ClientLink[FromRouter, ToRouter] = ClientLink(net, address, receives=FromRouter)
        await client.wait_up()
        client.close()
        heir.close()

    run(main())


def test_an_address_that_cannot_be_bound_is_named(run, net: Net, tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(LinkError, match=r"cannot listen at ipc://.*/none/x"):
            ServerLink(net, f"ipc://{tmp_path}/none/x", receives=ToRouter)
        with pytest.raises(LinkError, match="cannot connect to nonsense"):
            ClientLink(net, "nonsense", receives=ToRouter)

    run(main())


def test_a_tcp_server_says_which_port_it_got(run, net: Net) -> None:
    async def main() -> None:
        server: ServerLink[ToPlanner, FromPlanner] = ServerLink(
            net, "tcp://127.0.0.1:*", receives=ToPlanner
        )
        client: ClientLink[FromPlanner, ToPlanner] = ClientLink(
            net, server.address, receives=FromPlanner
        )
        await client.wait_up()
        client.send(GetView())
        peer, _ = await server.recv()
        server.send(peer, Unknown())
        assert await client.recv() == Unknown()
        client.close()
        server.close()

    run(main())


def test_a_subscriber_gets_the_newest_of_what_it_missed(run, net: Net, address: str) -> None:
    async def main() -> None:
        publisher: Publisher[View] = Publisher(net, address)
        subscriber: Subscriber[View] = Subscriber(net, address, receives=View)
        version = 0
        while True:  # a subscription takes effect a moment after it was asked for
            version += 1
            publisher.send(View(version=version, members=()))
            try:
                async with asyncio.timeout(0.05):
                    await subscriber.recv()
                    break
            except TimeoutError:
                continue
        for later in range(version + 1, version + 101):
            publisher.send(View(version=later, members=()))
        seen = version
        while seen < version + 100:
            view = await subscriber.recv()
            assert view.version > seen
            seen = view.version
        subscriber.close()
        with pytest.raises(LinkClosed):
            await subscriber.recv()
        publisher.close()

    run(main())


def test_a_request_takes_the_first_answer_of_its_kind(run, net: Net, address: str) -> None:
    status = Status(
        mesh="m", model="d", view=View(version=1, members=()), ready=True, reason="",
        epoch=0, balancedness=1.0, tokens=0,
    )  # fmt: skip

    async def main() -> None:
        server: ServerLink[ToPlanner, FromPlanner] = ServerLink(net, address, receives=ToPlanner)

        async def answer() -> None:
            peer, message = await server.recv()
            assert message == GetStatus()
            server.send(peer, Unknown())
            server.send(peer, status)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answer())
            got = await request(
                net, address, GetStatus(), receives=FromPlanner, want=Status, timeout_s=10.0
            )
        assert got == status
        server.close()
        with pytest.raises(TimeoutError):
            await request(
                net, address, GetStatus(), receives=FromPlanner, want=Status, timeout_s=0.05
            )

    run(main())
