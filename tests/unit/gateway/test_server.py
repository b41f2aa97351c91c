"""The HTTP server over real sockets, with clients that do not read."""

import asyncio
import socket

import pytest
from uvicorn.server import ServerState

from gateway.server import Connection, Server

DEADLINE_S = 15
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Impatient(Connection):
    stalled_s = 0.05


async def until_gone(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


def run(app, client):
    """Serve ``app`` while ``client(address)`` runs; returns what it returns."""

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            server = Server(app, grace_s=1, connection=Impatient)
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
    """A connection over ``Transport`` whose buffer has just filled."""
    found = Connection(Server(None, grace_s=1).config, ServerState(), {}, _loop=Timers())
    found.connection_made(Transport())
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
