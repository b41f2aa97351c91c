"""TCP links with real sockets on loopback: who gets in, and what hostile bytes do."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import structlog
import zmq

from mesh.curve import KeyPair, write_keys
from mesh.links import (
    ClientLink,
    Counters,
    LinkError,
    Net,
    Publisher,
    ServerLink,
    Subscriber,
    new_key_pair,
)
from mesh.messages import (
    FromPlanner,
    GetStatus,
    GetView,
    Hello,
    Ping,
    Refused,
    Role,
    SetMode,
    ToPlanner,
    Unknown,
    View,
)
from mesh.settings import SecuritySettings

ROLES: dict[str, Role] = {
    "planner": "planner",
    "router-0": "router",
    "expert-0": "expert",
    "boss": "admin",
}
LOOPBACK = "tcp://127.0.0.1:*"

Server = ServerLink[ToPlanner, FromPlanner]
Client = ClientLink[FromPlanner, ToPlanner]


def make_keys(directory: Path) -> Path:
    write_keys(directory, [KeyPair(name, role, *new_key_pair()) for name, role in ROLES.items()])
    return directory


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys")


@pytest.fixture
def nets(keys: Path) -> Iterator[Callable[..., Net]]:
    """A context for each process, closed at the end."""
    made: list[Net] = []

    def make(name: str, directory: Path | None = keys) -> Net:
        security = None
        if directory is not None:
            security = SecuritySettings(curve_dir=str(directory))
        made.append(Net(security, name, ROLES.get(name, "admin")))
        return made[-1]

    yield make
    for net in made:
        net.close()


def serve(net: Net) -> Server:
    return ServerLink(
        net, LOOPBACK, receives=ToPlanner, refusal=lambda reason: Refused(reason=reason)
    )


def connect(net: Net, address: str, server: str = "planner") -> Client:
    return ClientLink(net, address, receives=FromPlanner, server=server)


def hello(id_: str, role: Role) -> Hello:
    return Hello(id=id_, role=role, incarnation=1, pid=1, host="h", model_digest="")


async def until(happened: Callable[[], bool]) -> None:
    while not happened():  # noqa: ASYNC110 - a counter of a link has no event
        await asyncio.sleep(0.01)


async def never_up(client: Client, server: Counters) -> None:
    """Both ends notice, and no connection comes about."""
    await until(lambda: server.handshakes_failed > 0 and client.counters.handshakes_failed > 0)
    assert not client.up
    assert not client.send(GetView())


def test_listed_keys_talk_both_ways(run, nets) -> None:
    async def main() -> None:
        server = serve(nets("planner"))
        client = connect(nets("router-0"), server.address)
        await client.wait_up()
        assert client.send(hello("router-0", "router"))
        peer, message = await server.recv()
        assert message == hello("router-0", "router")
        assert server.send(peer, Unknown())
        assert await client.recv() == Unknown()
        assert server.counters.handshakes_failed == server.counters.refused == 0
        client.close()
        server.close()

    run(main())


def test_what_crosses_the_wire_cannot_be_read(run, nets) -> None:
    async def main() -> None:
        server = serve(nets("planner"))
        port = int(server.address.rpartition(":")[2])
        seen = bytearray()

        async def tap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            onward, out = await asyncio.open_connection("127.0.0.1", port)

            async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while chunk := await source.read(65536):
                    seen.extend(chunk)
                    sink.write(chunk)
                sink.close()

            await asyncio.gather(pump(reader, out), pump(onward, writer))

        async with await asyncio.start_server(tap, "127.0.0.1", 0) as proxy:
            middle = proxy.sockets[0].getsockname()[1]
            client = connect(nets("router-0"), f"tcp://127.0.0.1:{middle}")
            await client.wait_up()
            client.send(hello("router-0", "router"))
            await server.recv()
            client.close()
            server.close()
        assert b"CURVE" in seen
        assert b"router-0" not in seen

    run(main())


def test_an_unknown_key_is_turned_away_counted_and_logged(run, nets, keys, tmp_path) -> None:
    strangers = make_keys(tmp_path / "strangers")
    # A stranger who knows the planner's public key, and all that is public.
    planner = (keys / "allow.toml").read_text().split("[planner]")[1].split("public = ")[1][:42]
    allow = strangers / "allow.toml"
    own = allow.read_text().split("[planner]")[1].split("public = ")[1][:42]
    allow.write_text(allow.read_text().replace(own, planner))

    async def main() -> None:
        server = serve(nets("planner"))
        with structlog.testing.capture_logs() as logs:
            client = connect(nets("router-0", strangers), server.address)
            await never_up(client, server.counters)
        assert {"curve.refused", "link.handshake_failed"} <= {line["event"] for line in logs}
        refused = next(line for line in logs if line["event"] == "curve.refused")
        assert "does not list the key" in refused["reason"]
        secret = (strangers / "router-0.key").read_text().split('secret = "')[1][:40]
        assert secret not in str(logs)
        client.close()
        server.close()

    run(main())


def test_who_is_turned_away_tries_on_and_is_let_in_once_it_is_listed(run, nets, keys) -> None:
    allow = keys / "allow.toml"
    listed = allow.read_text()

    async def main() -> None:
        server = serve(nets("planner"))
        client = connect(nets("router-0"), server.address)  # its own list still names it
        await client.wait_up()
        allow.write_text(listed.replace("[router-0]", "[other]").replace('"router"', '"expert"'))
        late = connect(nets("boss"), server.address)
        allow.write_text(listed.split("[boss]")[0] + "[planner]" + listed.split("[planner]")[1])
        await never_up(late, server.counters)
        allow.write_text(listed)
        await late.wait_up()
        for link in (client, late, server):
            link.close()

    run(main())


def test_a_server_with_a_new_key_is_found_again(run, nets, keys) -> None:
    async def main() -> None:
        server = serve(nets("planner"))
        client = connect(nets("router-0"), server.address)
        await client.wait_up()
        write_keys(keys, [KeyPair("planner", "planner", *new_key_pair())], replace=True)
        address = server.address
        server.close()
        await until(lambda: not client.up)
        server = ServerLink(nets("planner"), address, receives=ToPlanner)
        await client.wait_up()
        client.send(GetView())
        assert (await server.recv())[1] == GetView()
        client.close()
        server.close()

    run(main())


def test_a_peer_without_a_key_is_turned_away(run, nets) -> None:
    async def main() -> None:
        server = serve(nets("planner"))
        client = connect(nets("router-0", None), server.address)
        await never_up(client, server.counters)
        client.close()
        server.close()

    run(main())


def test_a_client_with_keys_does_not_talk_to_a_server_without(run, nets) -> None:
    async def main() -> None:
        server = serve(nets("planner", None))
        client = connect(nets("router-0"), server.address)
        await until(lambda: client.counters.handshakes_failed > 0)
        assert not client.up
        client.close()
        server.close()

    run(main())


def test_a_client_talks_to_the_process_that_it_means_only(run, nets) -> None:
    async def main() -> None:
        server = serve(nets("expert-0"))  # listed, but not the one that is meant
        client = connect(nets("router-0"), server.address, "planner")
        await never_up(client, server.counters)
        right = connect(nets("boss"), server.address, "expert-0")
        await right.wait_up()
        for link in (client, right, server):
            link.close()
        with pytest.raises(LinkError, match="no key of 'router-9'"):
            connect(nets("router-0"), "tcp://127.0.0.1:1", "router-9")

    run(main())


def test_a_hello_of_another_role_or_name_is_refused_and_answered(run, nets) -> None:
    async def main() -> None:
        server = serve(nets("planner"))
        client = connect(nets("router-0"), server.address)
        await client.wait_up()
        with structlog.testing.capture_logs() as logs:
            for wrong in (hello("router-0", "expert"), hello("router-1", "router")):
                client.send(wrong)
            client.send(SetMode(mode="off"))
            client.send(GetStatus())
            assert (await server.recv())[1] == GetStatus(), "only what is allowed arrives"
        answers = [await client.recv() for _ in range(3)]
        assert all(isinstance(answer, Refused) and not answer.retry for answer in answers)
        assert "role router, not expert" in answers[0].reason  # type: ignore[union-attr]
        assert server.counters.refused == 3
        assert [line["count"] for line in logs if line["event"] == "link.refused"] == [1, 2]
        client.close()
        server.close()

    run(main())


def test_a_key_that_is_taken_from_the_list_is_no_longer_listened_to(run, nets, keys) -> None:
    async def main() -> None:
        server = serve(nets("planner"))
        client = connect(nets("router-0"), server.address)
        await client.wait_up()
        client.send(GetView())
        await server.recv()
        allow = keys / "allow.toml"
        allow.write_text(allow.read_text().replace("[router-0]", "[former]"))
        client.send(GetView())
        answer = await client.recv()
        assert isinstance(answer, Refused)
        assert server.counters.refused == 1
        client.close()
        server.close()

    run(main())


def test_broadcasts_are_for_listed_keys(run, nets) -> None:
    async def main() -> None:
        publisher: Publisher[View] = Publisher(nets("planner"), LOOPBACK)
        subscriber: Subscriber[View] = Subscriber(
            nets("router-0"), publisher.address, receives=View
        )
        stranger: Subscriber[View] = Subscriber(
            nets("router-0", None), publisher.address, receives=View
        )
        heard = asyncio.ensure_future(subscriber.recv())
        while not heard.done():
            publisher.send(View(version=7, members=()))
            await asyncio.sleep(0.01)
        await until(lambda: publisher.counters.handshakes_failed > 0)
        assert stranger.counters.received == 0
        for link in (subscriber, stranger, publisher):
            link.close()

    run(main())


def test_a_second_server_of_the_process_is_guarded_too_and_outlives_the_first(run, nets) -> None:
    async def main() -> None:
        net = nets("planner")
        first, second = serve(net), serve(net)
        first.close()
        client = connect(nets("router-0"), second.address)
        stranger = connect(nets("router-0", None), second.address)
        await client.wait_up()
        await never_up(stranger, second.counters)
        for link in (client, stranger, second):
            link.close()

    run(main())


def test_keys_that_do_not_belong_together_are_refused(run, nets, keys) -> None:
    path = keys / "planner.key"
    other, _ = new_key_pair()
    own = path.read_text().split('public = "')[1][:40]
    for file in (path, keys / "allow.toml"):
        file.write_text(file.read_text().replace(own, other))

    async def main() -> None:
        with pytest.raises(LinkError, match="keys of planner do not belong together"):
            serve(nets("planner"))

    run(main())


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://[::]:*"])
def test_tcp_beyond_the_machine_needs_keys_or_an_explicit_setting(run, nets, address: str) -> None:
    async def main() -> None:
        with pytest.raises(LinkError, match=r"cannot listen .*security\.curve_dir.*allow_insecure"):
            ServerLink(nets("planner", None), address, receives=ToPlanner)
        with pytest.raises(LinkError, match=r"cannot listen .*security\.curve_dir"):
            Publisher(nets("planner", None), address)
        with pytest.raises(LinkError, match=r"cannot connect .*security\.curve_dir"):
            connect(nets("router-0", None), "tcp://192.0.2.1:7")

    run(main())


def test_explicitly_insecure_tcp_is_plain(run) -> None:
    async def main() -> None:
        net = Net(SecuritySettings(allow_insecure=True))
        server: Server = ServerLink(net, "tcp://0.0.0.0:*", receives=ToPlanner)
        client = connect(net, server.address.replace("0.0.0.0", "127.0.0.1"))
        await client.wait_up()
        client.close()
        server.close()
        net.close()

    run(main())


# ---------------------------------------------------------------- hostile bytes


@pytest.mark.parametrize("secured", [True, False])
def test_bytes_that_are_no_zeromq_hurt_nobody(run, nets, keys, secured: bool) -> None:
    rng = random.Random(4)

    async def main() -> None:
        directory = keys if secured else None
        server = serve(nets("planner", directory))
        port = int(server.address.rpartition(":")[2])
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        attacks = [rng.randbytes(size) for size in (1, 10, 64, 1000, 20_000)]
        attacks += [b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 500, greeting[:30], b"\x00" * 500]
        attacks += [greeting + rng.randbytes(300), greeting + b"\x04\xff" + b"\xff" * 7]
        attacks += [greeting + b"\x06" + (2**62).to_bytes(8, "big") + b"x" * 100]
        sockets = []
        for attack in attacks:
            sockets.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            sockets[-1].sendall(attack)
        client = connect(nets("router-0", directory), server.address)
        await client.wait_up()
        client.send(GetView())
        while (received := await server.recv())[1] != GetView():
            pass
        assert server.send(received[0], Unknown())
        assert await client.recv() == Unknown()
        if secured:
            assert server.counters.undecodable == 0, "nothing of it got past the handshake"
        for raw in sockets:
            raw.close()
        client.close()
        server.close()

    run(main())


def test_wrong_unions_truncated_and_many_frames_are_dropped_and_counted(run, net, address) -> None:
    async def main() -> None:
        server: Server = ServerLink(net, address, receives=ToPlanner)
        client = connect(net, address)
        await client.wait_up()
        good = msgspec.msgpack.encode(hello("router-0", "router"))
        rng = random.Random(5)
        hostile: list[list[bytes]] = [[good[:cut]] for cut in range(len(good))]
        hostile += [[rng.randbytes(rng.randrange(1, 200))] for _ in range(200)]
        hostile += [
            [msgspec.msgpack.encode(Ping(gateway="g", incarnation=1))],  # for a router
            [msgspec.msgpack.encode(Unknown())],  # a planner says this
            [msgspec.msgpack.encode({"type": "Hello"})],
            [msgspec.msgpack.encode({"type": "Hello", "id": 5})],
            [b"\x91" * 5_000],  # arrays in arrays
            [b"\xdd\xff\xff\xff\xff"],  # an array of four thousand million
            [b"", good],
            [good, good],
            [b"x"] * 500,
        ]
        for frames in hostile:
            client._socket.raw.send_multipart(frames)
        client.send(GetStatus())
        assert (await server.recv())[1] == GetStatus(), "nothing else came through"
        assert server.counters.undecodable == len(hostile)
        client.close()
        server.close()

    run(main())


def test_a_message_beyond_the_limit_ends_its_connection_only(
    run, net, address, monkeypatch
) -> None:
    monkeypatch.setattr("mesh.links.net.MAX_MESSAGE_BYTES", 10_000)

    async def main() -> None:
        server: Server = ServerLink(net, address, receives=ToPlanner)
        hostile, client = connect(net, address), connect(net, address)
        await hostile.wait_up()
        await client.wait_up()
        hostile._socket.raw.send(bytes(1_000_000), zmq.NOBLOCK)
        await until(lambda: not hostile.up)
        client.send(GetStatus())
        assert (await server.recv())[1] == GetStatus()
        for link in (hostile, client, server):
            link.close()

    run(main())


def test_a_flood_of_hellos_is_held_back_and_the_answers_are_bounded(run, net, address) -> None:
    async def main() -> None:
        server: Server = ServerLink(net, address, receives=ToPlanner, receive_queue=50)
        flood, member = connect(net, address), connect(net, address)
        await flood.wait_up()
        await member.wait_up()
        sent = in_a_row = 0
        while in_a_row < 200:
            if flood.send(hello(f"x{sent}", "router")):
                sent, in_a_row = sent + 1, 0
            else:
                in_a_row += 1
            await asyncio.sleep(0)
        assert len(server._inbox._items) <= 50
        flood._socket._reading = False  # it does not read what it is answered
        flood._socket._loop.remove_reader(flood._socket._fd)
        flooding, _ = await server.recv()
        answered = unsent = 0
        while unsent < 200:
            if server.send(flooding, Refused(reason="x" * 1000)):
                answered += 1
            else:
                unsent += 1
            await asyncio.sleep(0)
        assert answered < 20_000, "answers that nobody reads do not pile up"
        member.send(GetStatus())
        # The others take their turn, though the flood never ends.
        while (received := await server.recv())[1] != GetStatus():
            flood.send(hello(f"x{sent}", "router"))
        peer, _ = received
        assert server.send(peer, Unknown())
        assert await member.recv() == Unknown()
        for link in (flood, member, server):
            link.close()

    run(main())
