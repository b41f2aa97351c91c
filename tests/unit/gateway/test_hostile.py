"""Clients that mean harm, against a real gateway: it answers, keeps its size, and goes on."""

import json
import random
import socket
import threading

import pytest

from gateway.service import listen
from mesh.settings import GatewaySettings
from tests.unit.gateway.scripted_mesh import DEADLINE_S, Script, wait_until
from tests.unit.gateway.test_api import CHAT, COMPLETION, post

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
MIB = 1024


def connect(mesh):
    host, port = mesh.url.removeprefix("http://").split(":")
    link = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    link.settimeout(DEADLINE_S)
    return link


def answer(link):
    """All that the server sends until it closes."""
    found = b""
    try:
        while part := link.recv(65536):
            found += part
    except ConnectionResetError:
        pass  # it closed while more of ours was on the way
    return found


def pour(link, piece, limit=64 << 20):
    """Send ``piece`` until the server closes; False when it took ``limit`` bytes."""
    sent = 0
    try:
        while sent < limit:
            link.sendall(piece)
            sent += len(piece)
    except OSError:
        return True
    return False


def resident_kib(mesh, name="VmRSS"):
    (line,) = [line for line in mesh.proc("status").splitlines() if line.startswith(name)]
    return int(line.split()[1])


@pytest.fixture(autouse=True)
def unharmed(mesh):
    """After each test the same process serves, no request was our bug, no memory is kept."""
    yield
    mesh.reset()
    assert post(mesh, COMPLETION_PATH, COMPLETION)[0] == 200
    assert not [line for line in mesh.logs() if line["event"] == "request.failed"]
    wait_until(lambda: resident_kib(mesh) < 120 * MIB, "the memory is given back")


# ---------------------------------------------------------------- heads


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET /health HTTP/1.1\r\nX: ", b"a" * 65536),
        (b"GET /", b"a" * 65536),
        (b"GET /health HTTP/1.1\r\n", b"X: a\r\n" * 1000),
        (b"GET /health HTTP/1.1\r\n" + b"X" * 100, b"X" * 65536),
    ],
)
def test_a_head_without_end_is_refused(mesh, begin, piece):
    with connect(mesh) as link:
        link.sendall(begin)
        assert pour(link, piece)
        found = answer(link)
    if found:  # a reset may swallow it
        head, _, body = found.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_a_head_somewhat_too_large_hears_why(mesh):
    headers = b"".join(b"X-%d: a\r\n" % i for i in range(250))
    with connect(mesh) as link:
        link.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
        assert answer(link).startswith(b"HTTP/1.1 431 ")
    with connect(mesh) as link:
        long = b"X: " + b"a" * 60_000 + b"\r\nConnection: close\r\n\r\n"
        link.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + long)
        assert answer(link).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "piece",
    [
        b"1;" + b"x" * 65536,  # a chunk's extension
        b"0\r\nX: " + b"x" * 65536,  # a trailer
    ],
)
def test_what_stands_beside_a_body_is_bounded_too(mesh, piece):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(mesh) as link:
        link.sendall(head)
        link.sendall(b"1\r\n{\r\n")
        link.sendall(piece)
        assert pour(link, b"x" * 65536)


def test_a_body_in_chunks_of_one_byte_is_read(mesh):
    body = json.dumps(COMPLETION | {"user": "u" * 20_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    with connect(mesh) as link:
        link.sendall(head)
        for start in range(0, len(chunks), 10_000):
            link.sendall(chunks[start : start + 10_000])
        assert answer(link).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\xff\x00 HTTP/1.1\r\n\r\n",
        random.Random(7).randbytes(5000),
    ],
)
def test_what_is_no_http_is_answered_and_closed(mesh, sent):
    with connect(mesh) as link:
        link.sendall(sent)
        assert answer(link).startswith(b"HTTP/1.1 400 ")


def test_odd_paths_are_only_not_found(mesh):
    for path in ("/%00", "/%ff%fe", "/..%2f..%2fetc%2fpasswd", "/" + "a" * 50_000, "/%0aevent"):
        assert mesh.status(path) == 404
    assert all(len(line.get("path", "")) <= 200 for line in mesh.logs())


# ---------------------------------------------------------------- bodies

DEEP = b"[" * 900 + b"]" * 900
TOO_DEEP = b"[" * 200_000


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"x","\\udfff":1}',
        b'{"prompt":"\xff\xfe"}',
        b'{"prompt":"x","user":"\xff"}',
        b'{"prompt":"x","temperature":NaN}',
        b'{"prompt":"x","temperature":-Infinity}',
        b'{"prompt":"x","temperature":1e999}',
        b'{"prompt":"x","seed":' + b"9" * 4_000_000 + b"}",
        b'{"prompt":"x","logit_bias":{"5":1e999}}',
        b'{"prompt":' + DEEP + b"}",
        b'{"prompt":' + TOO_DEEP,
        b'{"prompt":"x","tools":' + DEEP + b"}",
        b'{"x":1e999,"b":' + DEEP + b',"x":1}',
        b'{"x":1e999,"b":' + b"[" * 5000 + b"]" * 5000 + b',"x":1}',
        b'{"prompt":[' + b"[]," * 1_300_000 + b"[]]}",
        b'{"prompt":"x","' + b"f" * 4_000_000 + b'":1}',
        b'{"prompt":"x","model":"' + b"f" * 4_000_000 + b'"}',
        b'{"messages":[' + b"{}," * 1_300_000 + b"{}]}",
        b'{"messages":[{"role":"' + b"f" * 4_000_000 + b'"}]}',
        b'{"messages":[{"role":"user","content":"","' + b"f" * 4_000_000 + b'":1}]}',
    ],
    ids=lambda body: body[:30].decode("latin-1"),
)
@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH, "/tokenize"])
def test_a_hostile_body_is_refused_in_few_words(mesh, path, body):
    status, _, found = post(mesh, path, body)
    assert status in {400, 404}
    assert len(json.dumps(found)) < 5000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["a" * 1025]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids"),
        ({"priority": 2**31}, "priority"),
    ],
)
def test_what_costs_work_for_every_token_is_bounded(mesh, fields, param):
    status, _, found = post(mesh, COMPLETION_PATH, COMPLETION | fields)
    assert (status, found["error"]["param"]) == (400, param)


def test_stop_strings_that_all_but_match_do_no_harm(mesh):
    """The output is all one letter, as a client can force by ``logit_bias``."""
    letter = mesh.tokenizer.encode("a", add_special_tokens=False)
    mesh.answer = lambda _: Script(letter * 900)
    stops = ["a" * (1000 + i) + "b" for i in range(16)]
    body = {"prompt": [5], "max_tokens": 900, "stop": stops}
    status, _, found = post(mesh, COMPLETION_PATH, body)
    assert (status, found["choices"][0]["text"]) == (200, "a" * 900)


def test_a_text_of_no_use_is_not_tokenized(mesh):
    for path, body in (
        ("/tokenize", {"prompt": "a b " * 100_000}),
        ("/detokenize", {"tokens": [5] * 300_000}),
    ):
        status, _, found = post(mesh, path, body)
        assert (status, found["error"]["code"]) == (400, "context_length_exceeded")


def test_a_template_does_not_run_what_clients_write(mesh):
    content = "{{ 7*7 }}{% for i in range(10**9) %}{% endfor %}"
    messages = [{"role": "user", "content": content}]
    assert post(mesh, CHAT_PATH, CHAT | {"messages": messages})[0] == 200
    (submit,) = mesh.routers["router-0"].submits
    assert content in mesh.tokenizer.decode(submit.prompt)


# ---------------------------------------------------------------- time


@pytest.mark.parametrize("timeout", ["nan", "inf", "-1", "0", "1e400", "soon", "9" * 5000])
def test_a_timeout_that_is_none_is_refused(mesh, timeout):
    status, _, found = post(mesh, COMPLETION_PATH, COMPLETION, {"X-Request-Timeout": timeout})
    assert (status, found["error"]["param"]) == (400, "X-Request-Timeout")


def test_a_deadline_of_the_client_is_kept_by_all(mesh):
    mesh.answer = lambda _: Script(mesh.story, hold_after=2)
    status, _, found = post(mesh, COMPLETION_PATH, COMPLETION, {"X-Request-Timeout": "0.3"})
    assert (status, found["error"]["code"]) == (504, "timeout")
    (submit,) = mesh.routers["router-0"].submits
    assert submit.deadline_ms <= 1300
    wait_until(mesh.idle, "the router is told to stop")


def test_a_longer_deadline_than_the_gateways_is_cut(mesh):
    post(mesh, COMPLETION_PATH, COMPLETION, {"X-Request-Timeout": "1e9"})
    (submit,) = mesh.routers["router-0"].submits
    assert submit.deadline_ms <= 601_000


# ---------------------------------------------------------------- numbers of clients


def test_a_dead_peers_connection_is_noticed_by_the_system():
    """Keep-alive probes and a limit on what is not acknowledged, on each accepted connection."""
    tcp = socket.IPPROTO_TCP
    with (
        listen(GatewaySettings(port=0)) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle = accepted.getsockopt(tcp, socket.TCP_KEEPIDLE)
            probes = accepted.getsockopt(tcp, socket.TCP_KEEPCNT)
            every = accepted.getsockopt(tcp, socket.TCP_KEEPINTVL)
            assert idle + probes * every <= 120
            assert accepted.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 120_000


def test_connections_are_bounded(own_mesh):
    own_mesh.start_gateway(gateway__max_connections=5)
    idle = [connect(own_mesh) for _ in range(5)]
    with connect(own_mesh) as link:
        head, _, body = answer(link).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in head.lower()
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    for link in idle:
        link.close()
    wait_until(lambda: own_mesh.status("/health") == 200, "there is room again")


def ask_at_once(mesh, path, bodies):
    """A thread for each request, already running; its statuses end in the list."""
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda body=body: seen.append(post(mesh, path, body)[0]))
        for body in bodies
    ]
    for thread in threads:
        thread.start()
    return threads, seen


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
def test_a_large_body_is_not_kept_while_its_request_runs(mesh, path):
    before = resident_kib(mesh)
    mesh.answer = lambda _: Script(mesh.story, hold_after=1)
    fields = CHAT | {"chat_template_kwargs": {"x": "u" * 3_000_000}}
    body = json.dumps(fields if path == CHAT_PATH else COMPLETION | {"user": "u" * 3_000_000})
    threads, seen = ask_at_once(mesh, path, [body.encode()] * 12)
    router = mesh.routers["router-0"]
    try:
        wait_until(lambda: len(router.submits) == 12, "all run")
        wait_until(lambda: resident_kib(mesh) < before + 16 * MIB, "the bodies are dropped")
    finally:
        mesh.call(router.release)
        for thread in threads:
            thread.join(DEADLINE_S)
    assert seen == [200] * 12


def test_memory_is_flat_at_four_times_the_load(own_mesh):
    """Every place is taken and 4 times as many clients keep asking, each with a large body."""
    places = 8
    own_mesh.add_router("router-0")
    own_mesh.start_gateway(gateway__max_queue=places, gateway__max_body_bytes=262_144)
    own_mesh.wait_ready()
    own_mesh.answer = lambda _: Script(own_mesh.story, hold_after=1)
    body = json.dumps({"prompt": [5] * 900, "user": "u" * 200_000, "max_tokens": 100}).encode()
    seen: list[int] = []
    stop = threading.Event()

    def client():
        while not stop.is_set():
            status, headers, _ = post(own_mesh, COMPLETION_PATH, body)
            seen.append(status)
            assert status == 200 or int(headers["retry-after"]) >= 1

    threads = [threading.Thread(target=client) for _ in range(4 * places)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: seen.count(429) >= 100, "the queue is full")
        full = resident_kib(own_mesh, "VmHWM")
        wait_until(lambda: seen.count(429) >= 500, "many more are refused")
        assert resident_kib(own_mesh, "VmHWM") <= full + 8 * MIB
        assert full < 120 * MIB
    finally:
        stop.set()
        own_mesh.routers["router-0"].answer = lambda _: Script(own_mesh.story)
        own_mesh.call(own_mesh.routers["router-0"].release)
        for thread in threads:
            thread.join(DEADLINE_S)
    assert set(seen) == {200, 429}
    assert seen.count(200) >= places
