"""A closed-loop load client for an OpenAI-compatible server on this host.

Greedy, streamed, ``ignore_eos``, random token-id prompts drawn from a seed, so that every server
does the same work and no prefix is shared. The stream is parsed by hand: the client shares the
cores with the server, and a client library would be measured too.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from compose.probes import unverified

_ERROR_BYTES = 4000
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_FIRST_TEXT_ID = 300
"""Ids below may be special tokens or half characters."""


class LoadError(Exception):
    """The server cannot be loaded or refused a request; the message has its words."""


@dataclass(slots=True)
class Stream:
    """Monotonic seconds at which the request began and each chunk of text came."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """What one number of simultaneous streams measured, in tokens per second and milliseconds."""

    streams: int
    tokens: int
    overall: float
    """All tokens / time from the first request to the last token."""
    decode: float
    """Tokens after every stream had its first / the time they took."""
    steady: float
    """Streams / median gap between chunks x tokens a chunk: the rate while all of them decode."""
    tokens_a_chunk: float
    ttft_ms: float
    gap_p99_ms: float


async def run_level(
    url: str,
    model: str,
    streams: int,
    *,
    prompt_tokens: int,
    tokens: int,
    vocab: int,
    seed: int,
    key: str = "",
    deadline_s: float = 600.0,
) -> Level:
    """Run ``streams`` requests at once, each ``prompt_tokens`` in and ``tokens`` out.

    Prompt ids lie below ``vocab``; ``key``: the API key, if one is needed. Raises ``LoadError``,
    ``OSError``, and ``TimeoutError`` after ``deadline_s``.
    """
    rng = random.Random(seed)  # noqa: S311 (a reproducible load)
    bodies = [
        body(model, rng, prompt_tokens=prompt_tokens, tokens=tokens, vocab=vocab)
        for _ in range(streams)
    ]
    async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(stream(url, body, key)) for body in bodies]
    return measure([task.result() for task in running])


def body(
    model: str, rng: random.Random, *, prompt_tokens: int, tokens: int, vocab: int
) -> dict[str, Any]:
    """A request of exactly ``prompt_tokens`` random ids below ``vocab`` in and ``tokens`` out."""
    first = min(_FIRST_TEXT_ID, vocab - 1)
    return {
        "model": model,
        "prompt": [rng.randrange(first, vocab) for _ in range(prompt_tokens)],
        "max_tokens": tokens,
        "min_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def stream(url: str, body: dict[str, Any], key: str = "") -> Stream:
    """Run one completion and note when each chunk came.

    Raises ``LoadError`` for an answer that is none, or that broke off, and ``OSError``.
    """
    parts = urlsplit(url)
    if parts.hostname not in _LOOPBACK or parts.port is None:
        raise LoadError(f"{url}: expected a loopback address with a port, such as 127.0.0.1:8000")
    payload = msgspec.json.encode(body)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
        + (f"Authorization: Bearer {key}\r\n" if key else "")
        + "\r\n"
    )
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port, ssl=unverified() if parts.scheme == "https" else None
    )
    stream = Stream(time.perf_counter())
    try:
        writer.write(head.encode() + payload)
        status = await reader.readline()
        if b" 200 " not in status:
            said = status.decode(errors="replace").strip() or "the connection was closed"
            raise LoadError(f"{url}: {said} {await _reason(reader)}".strip())
        whole = False
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                whole |= line.startswith(b"data: [DONE]")
                continue
            if line.startswith(b'data: {"error"'):
                raise LoadError(f"{url}: {line[6:].decode(errors='replace').strip()}")
            now = time.perf_counter()
            whole |= b'"finish_reason":"' in line or b'"finish_reason": "' in line
            # Only the last chunks carry usage; the rest need no JSON parser.
            if b'"usage":{' in line or b'"usage": {' in line:
                usage = msgspec.json.decode(line[6:]).get("usage") or {}
                stream.tokens = usage.get("completion_tokens", 0)
            if b'"choices":[]' not in line and b'"choices": []' not in line:
                stream.arrivals.append(now)
    finally:
        writer.close()
    if not whole:
        raise LoadError(f"{url}: the stream broke off")
    return stream


async def _reason(reader: asyncio.StreamReader) -> str:
    """Why a request was refused: the message of an error object, else the body as it is."""
    answer = b""
    # Head and body may come one after the other; the server closes behind them, as it was asked to.
    while len(answer) < _ERROR_BYTES and (more := await reader.read(_ERROR_BYTES - len(answer))):
        answer += more
    body = answer.partition(b"\r\n\r\n")[2]
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace").strip()


def measure(streams: list[Stream]) -> Level:
    """Rates of streams that ran together. Raises ``LoadError`` for one without a token."""
    if not all(stream.arrivals for stream in streams):
        raise LoadError("a stream ended without a token")
    gaps = sorted(
        later - earlier
        for stream in streams
        for earlier, later in zip(stream.arrivals, stream.arrivals[1:], strict=False)
    )
    first = max(stream.arrivals[0] for stream in streams)
    last = max(stream.arrivals[-1] for stream in streams)
    late = sum(arrival > first for stream in streams for arrival in stream.arrivals)
    total = sum(stream.tokens for stream in streams)
    # A chunk may carry several tokens: the last ones' usage says how many on the whole.
    per_chunk = total / sum(len(stream.arrivals) for stream in streams)
    waits = [stream.arrivals[0] - stream.started for stream in streams]
    return Level(
        streams=len(streams),
        tokens=total,
        overall=round(total / (last - min(stream.started for stream in streams)), 2),
        decode=round(late * per_chunk / (last - first), 2) if last > first else 0.0,
        steady=round(len(streams) * per_chunk / statistics.median(gaps), 2) if gaps else 0.0,
        tokens_a_chunk=round(per_chunk, 3),
        ttft_ms=round(statistics.median(waits) * 1e3, 1),
        gap_p99_ms=round(gaps[int(len(gaps) * 0.99)] * 1e3, 1) if gaps else 0.0,
    )
