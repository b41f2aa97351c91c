from __future__ import annotations

import asyncio

import pytest

from compose.load import LoadError, Stream, measure, stream


def test_rates_count_tokens_however_many_a_chunk_carries() -> None:
    one = Stream(started=0.0, arrivals=[1.0, 2.0, 3.0, 4.0], tokens=8)
    two = Stream(started=0.0, arrivals=[2.0, 3.0, 4.0], tokens=6)
    level = measure([one, two])
    assert level.tokens == 14
    assert level.tokens_a_chunk == 2
    assert level.overall == pytest.approx(14 / 4)
    assert level.decode == pytest.approx(4 * 2 / 2)  # four chunks after both had begun, in 2 s
    assert level.steady == pytest.approx(2 * 2 / 1)
    assert level.ttft_ms == pytest.approx(1500)


def test_a_stream_without_a_token_is_an_error() -> None:
    with pytest.raises(LoadError, match="without a token"):
        measure([Stream(started=0.0)])


async def answered(*payload: bytes) -> tuple[bytes, Stream | LoadError]:
    """What a server was sent that answers with ``payload``, and what the client made of it."""
    got = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        got = await reader.readuntil(b"}")
        for part in payload:
            writer.write(part)
            for _ in range(20):  # turns of the loop in which the client, too, reads
                await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            found = await stream(url, {}, "a-key")
        except LoadError as error:
            return got, error
        return got, found


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
CHUNK = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'


@pytest.mark.parametrize(("payload", "reason"), [
    (HEAD + CHUNK, "broke off"),
    (HEAD + CHUNK + b'data: {"error":{"message":"no worker"}}\n\n', "no worker"),
    (b"HTTP/1.1 429 Too Many Requests\r\nX: y\r\n\r\nthe queue is full", "the queue is full"),
    (b"", "127.0.0.1"),
])  # fmt: skip
def test_an_answer_that_is_none_is_an_error_with_its_words(payload: bytes, reason: str) -> None:
    _, error = asyncio.run(answered(payload))
    assert isinstance(error, LoadError)
    assert reason in str(error)


def test_a_refusal_whose_body_comes_after_its_head_is_told_in_the_servers_words() -> None:
    body = b'{"error":{"message":"The queue is full.","type":"rate_limit_error","code":null}}'
    head = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\n\r\n"
    _, error = asyncio.run(answered(head, body))
    assert str(error).endswith(": HTTP/1.1 429 Too Many Requests The queue is full.")


def test_a_whole_stream_has_its_chunks_and_was_asked_for_with_the_key() -> None:
    payload = HEAD + CHUNK + CHUNK + b"data: [DONE]\n\n"
    got, found = asyncio.run(answered(payload))
    assert b"Authorization: Bearer a-key\r\n" in got
    assert isinstance(found, Stream)
    assert len(found.arrivals) == 2
