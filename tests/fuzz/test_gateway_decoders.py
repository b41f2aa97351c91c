"""Whatever bytes come: what the gateway reads is a value or a client's error, nothing else."""

import asyncio
import contextlib
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from gateway.api.guard import Guard
from gateway.api.prompts import check_ids, split_prompts
from gateway.api.requests import (
    HARMLESS,
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from gateway.api.run import timeout_s
from gateway.api.sampling import Defaults, check_ranges, max_tokens, sampling, stop_strings
from gateway.chat import plain_messages
from gateway.errors import ApiError
from gateway.keys import Keyring, KeysError, parse_keys, read_keys
from gateway.server import Connection, Server

KINDS = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
FUZZ = settings(max_examples=100, deadline=None)

numbers = st.one_of(
    st.integers(-2, 40), st.integers(-(10**30), 10**30), st.floats(allow_nan=False), st.booleans()
)
leaves = st.one_of(st.none(), numbers, st.text(max_size=8), st.sampled_from(["5", "user", "text"]))
keys = st.one_of(st.text(max_size=5), st.sampled_from(["7", "role"]))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=5,
)
part = st.fixed_dictionaries({"type": st.just("text"), "text": leaves})
message = st.fixed_dictionaries(
    {},
    optional={
        "role": st.one_of(st.sampled_from(["user", "system", "assistant"]), leaves),
        "content": st.one_of(st.text(max_size=9), st.lists(part, max_size=2), values),
        "name": leaves,
    },
)
REQUIRED = {
    CompletionRequest: ("prompt", st.one_of(st.text(max_size=9), st.just([1, 2]), values)),
    ChatRequest: ("messages", st.lists(message, max_size=3)),
    TokenizeRequest: ("prompt", st.one_of(st.text(max_size=9), values)),
    DetokenizeRequest: ("tokens", st.lists(numbers, max_size=4)),
}


def refusal(action, *arguments):
    """The client's error that ``action`` raises, if it does; any other exception is a bug."""
    try:
        action(*arguments)
    except ApiError as error:
        json.loads(error.body())
        return error
    return None


def read(body, kind):
    """As the endpoints do it, without a mesh: raises ``ApiError`` or returns."""
    request = parse(body, kind)
    if not isinstance(request, (CompletionRequest, ChatRequest)):
        return
    check_ranges(request)
    stop_strings(request)
    if isinstance(request, ChatRequest):
        plain_messages(request.messages)
    else:
        for prompt in split_prompts(request.prompt):
            if isinstance(prompt, list):
                check_ids(prompt, 100, "prompt")
    budget = max_tokens(request, prompt_tokens=3, context=64, defaults=Defaults())
    sampling(
        request,
        max_tokens=budget,
        seed=1,
        logprobs=-1,
        prompt_logprobs=-1,
        vocab_size=100,
        defaults=Defaults(),
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@FUZZ
@given(st.data())
def test_any_json_is_a_request_or_a_clients_error(kind, data):
    known = sorted(set(kind.__struct_fields__) | HARMLESS | set(UNSUPPORTED))
    name = st.one_of(st.sampled_from(known), st.sampled_from(kind.__struct_fields__), keys)
    fields = data.draw(st.dictionaries(name, values, max_size=3))
    required, good = REQUIRED[kind]
    if data.draw(st.booleans()):
        fields[required] = data.draw(good)
    error = refusal(read, json.dumps(fields).encode(), kind)
    assert error is None or 400 <= error.status < 500


@FUZZ
@given(st.sampled_from(KINDS), st.binary(max_size=40), st.integers(0, 60), st.booleans())
@example(CompletionRequest, b'{"x":1e999,"b":[[]],"x":1}', 0, True)
def test_any_bytes_are_a_request_or_a_clients_error(kind, noise, at, alone):
    whole = json.dumps({"prompt": "x", "messages": [{}], "n": 2, "stop": ["a"]}).encode()
    body = noise if alone else whole[:at] + noise + whole[at:]
    error = refusal(read, body, kind)
    assert error is None or 400 <= error.status < 500


@FUZZ
@given(st.one_of(st.text(), st.floats().map(str), st.none()))
def test_any_timeout_header_is_a_bounded_time_or_a_clients_error(header):
    if refusal(timeout_s, header, 600.0) is None:
        assert 0 < timeout_s(header, 600.0) <= 600.0


headers = st.lists(
    st.tuples(
        st.sampled_from([b"authorization", b"host", b"origin", b"x"]),
        st.one_of(
            st.binary(max_size=40),
            st.binary(max_size=12).map(lambda tail: b"Bearer " + tail),
            st.binary(max_size=12).map(lambda tail: b"Basic " + tail),
            st.sampled_from([b"[", b"http://[::1", b"//", b"localhost:99999999"]),
        ),
    ),
    max_size=4,
)


@FUZZ
@given(
    st.sampled_from(["/admin/plan", "/v1/models", "/health"]),
    st.sampled_from(["GET", "POST"]),
    headers,
    st.booleans(),
)
def test_any_header_lets_nobody_in_who_has_no_key(path, method, sent, loopback):
    door = Guard(
        keys=Keyring(parse_keys("a=mm-0123456789abcdef", "K")),
        admins=Keyring(parse_keys("r=mm-fedcba9876543210", "A")),
        anonymous=None,
        loopback=loopback,
    )
    open_admin = Guard(keys=door.keys, admins=Keyring([]), anonymous=None, loopback=loopback)
    scope = {"path": path, "method": method, "headers": sent}
    for guard in (door, open_admin):
        error = refusal(guard.check, scope)
        if error is None:
            assert path == "/health" or (guard is open_admin and loopback)
        else:
            assert error.status in {401, 403}


@FUZZ
@given(st.one_of(st.binary(), st.text().map(lambda text: f'[[key]]\nname = "{text}"'.encode())))
def test_any_key_file_is_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "keys.toml"
    path.write_bytes(content)
    with contextlib.suppress(KeysError):
        Keyring(read_keys(str(path)))


class Transport(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.written = bytearray()
        self.closing = False

    def write(self, data):
        assert not self.closing, "written after close"
        self.written += data

    def is_closing(self):
        return self.closing

    def close(self):
        self.closing = True

    abort = close

    def get_write_buffer_size(self):
        return 0

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


async def echo(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


WORDS = (
    b"GET / HTTP/1.1\r\n", b"POST /x HTTP/1.1\r\n", b"Host: x\r\n", b"\r\n",
    b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"3\r\nabc\r\n", b"0\r\n\r\n",
    b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"abc", b"\0", b": ",
    b"Upgrade: websocket\r\nConnection: upgrade\r\n", b"X: " + b"a" * 70_000,
    b"X: a\r\n" * 201, b"GET http://[ HTTP/1.1\r\n",
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(WORDS), st.binary(max_size=20)), max_size=12))
def test_any_bytes_on_a_connection_are_answered_or_dropped(pieces):
    async def main():
        config = Server(echo, grace_s=1, max_connections=8).config
        connection = Connection(config, ServerState(), {})
        transport = Transport()
        connection.connection_made(transport)
        for piece in pieces:
            connection.data_received(piece)
            await asyncio.sleep(0)
        connection.connection_lost(None)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not connection.tasks
        statuses = {b"204", b"400", b"408", b"431", b"100"}
        for answer in bytes(transport.written).split(b"HTTP/1.1 ")[1:]:
            assert answer[:3] in statuses

    asyncio.run(main())
