"""The HTTP server over real sockets, with clients that do not read."""

import asyncio
import json
import socket

import pytest
from starlette.requests import Request
from uvicorn.server import ServerState

from gateway.api import http
from gateway.api.http import BodyBudget, HeldBody, error_response, read_body
from gateway.errors import ApiError, Overloaded
from gateway.server import Connection, Server

DEADLINE_S = 15
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Impatient(Connection):
    stalled_s = 0.05


class Hasty(Connection):
    head_s = 0.5


async def until_gone(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


def run(app, client, connection=Impatient):
    """Serve ``app`` while ``client(address)`` runs; returns what it returns."""

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            server = Server(app, grace_s=1, max_connections=8, connection=connection)
            async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
                tasks.create_task(server.serve(sockets=[listener]))
                try:
                    return await client(listener.getsockname())
                finally:
                    server.should_exit = True

    return asyncio.run(main())


def test_a_client_that_stops_reading_is_dropped():
    ended = asyncio.Event()

    async def app(scope, receive, send):
        gone = asyncio.ensure_future(until_gone(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
            await asyncio.sleep(0)
        ended.set()

    async def client(address):
        loop = asyncio.get_running_loop()
        with socket.socket() as link:
            link.setblocking(False)
            await loop.sock_connect(link, address)
            await loop.sock_sendall(link, REQUEST)
            await ended.wait()

    run(app, client)


async def read_the_body(scope, receive, send):
    scope["state"]["held"] = HeldBody(BodyBudget(1000))
    try:
        await read_body(Request(scope, receive), 100)
    except ApiError as error:
        await error_response(error)(scope, receive, send)


async def refuse_at_once(scope, receive, send):
    await error_response(ApiError("no"))(scope, receive, send)


def answers(app, sent, connection=Hasty):
    """All that the server sends to a client that sends ``sent`` and then only listens."""

    async def client(address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        found = await reader.read()  # to the end: the server must close
        writer.close()
        return found

    return run(app, client, connection)


def split(answer):
    """(status, JSON) of the one answer in ``answer``."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower().split(b"\r\n")
    assert b"content-type: application/json" in head.split(b"\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n"


def test_a_body_that_does_not_come_is_answered_and_the_connection_closed(monkeypatch):
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.05)
    status, error = split(answers(read_the_body, POST + b"{", Impatient))
    assert (status, error["code"]) == (408, "request_timeout")


def test_a_body_that_is_cut_off_closes_the_connection():
    chunk = b"400\r\n" + bytes(0x400) + b"\r\n"
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    status, error = split(answers(read_the_body, head + chunk, Impatient))
    assert (status, error["code"]) == (413, "body_too_large")


def test_bodies_are_read_within_what_all_may_hold():
    budget = BodyBudget(100)
    held = [HeldBody(budget), HeldBody(budget)]
    held[0].take(60)
    held[1].take(40)
    for one in held:
        with pytest.raises(Overloaded):
            one.take(1)
    held[0].release()
    held[0].release()
    held[1].take(60)
    with pytest.raises(Overloaded):
        held[0].take(1)


@pytest.mark.parametrize("sent", [b"GET / HT", b"GET / HTTP/1.1\r\nHost"])
def test_half_a_head_is_answered_and_the_connection_closed(sent):
    status, error = split(answers(None, sent))
    assert (status, error["code"]) == (408, "request_timeout")


def test_half_a_second_head_closes_the_connection_too():
    found = answers(refuse_at_once, REQUEST + b"GET / HT")
    first, _, second = found.partition(b"HTTP/1.1 408")
    assert first.startswith(b"HTTP/1.1 500")
    assert second


def test_a_silent_connection_is_closed():
    assert answers(None, b"") == b""


def test_a_body_that_nobody_waited_for_must_end_too():
    assert answers(refuse_at_once, POST + b"{").startswith(b"HTTP/1.1 500")


def test_what_is_no_http_gets_an_error_object():
    status, error = split(answers(None, b"no http\r\n\r\n", Impatient))
    assert (status, error["code"]) == (400, "invalid_http")


def test_an_endpoint_may_take_longer_than_a_head():
    async def slow(scope, receive, send):
        await asyncio.sleep(1.5 * Hasty.head_s)
        await refuse_at_once(scope, receive, send)

    # The second head is begun while the first request is still answered.
    found = answers(slow, REQUEST + b"GET / HT")
    assert found.startswith(b"HTTP/1.1 500")
    assert b"HTTP/1.1 408" in found


class Transport(asyncio.Transport):
    """Holds as much unsent as the test says."""

    waiting = 100_000
    aborted = False

    def get_write_buffer_size(self):
        return self.waiting

    def abort(self):
        self.aborted = True


class Timer:
    def __init__(self, function, args):
        self.fire = lambda: function(*args)
        self.cancelled = False

    def cancel(self):
        self.cancelled = True


class Timers:
    """The event loop's timers, fired by the test."""

    def __init__(self):
        self.due = []

    def call_later(self, _delay, function, *args):
        self.due.append(Timer(function, args))
        return self.due[-1]

    def fire(self):
        due, self.due = self.due, []
        for timer in due:
            if not timer.cancelled:
                timer.fire()


@pytest.fixture
def connection():
    """A connection over ``Transport``, its request read, whose buffer has just filled."""
    found = Connection(
        Server(None, grace_s=1, max_connections=8).config, ServerState(), {}, _loop=Timers()
    )
    found.connection_made(Transport())
    found.loop.due.clear()
    found.pause_writing()
    return found


def test_a_client_that_reads_slowly_is_not_dropped(connection):
    for waiting in (90_000, 80_000, 70_000):
        connection.transport.waiting = waiting
        connection.loop.fire()
    assert not connection.transport.aborted
    connection.transport.waiting = 69_999
    connection.loop.fire()
    assert connection.transport.aborted


def test_a_client_that_has_caught_up_may_wait(connection):
    connection.resume_writing()
    connection.loop.fire()
    assert not connection.transport.aborted


def test_a_connection_that_is_gone_is_not_watched(connection):
    connection.connection_lost(ConnectionResetError())
    connection.loop.fire()
    assert not connection.transport.aborted
