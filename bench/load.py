"""Closed-loop load on any OpenAI-compatible server on this host; prints one JSON object a level.

    python bench/load.py --url http://127.0.0.1:8000 --streams 1,16 --prompt-tokens 128 --tokens 128

Greedy, streamed, `ignore_eos`, random token-id prompts drawn from a seed, so that every server does
the same work and no prefix is shared. Streaming is parsed by hand: the client shares two cores
with the server, and a client library would be measured too. Rates:

* ``decode``: tokens after the first of each stream / time from the last first token to the end;
* ``steady``: streams / median gap between tokens, the rate while all of them decode;
* ``ttft_ms``: median time to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

DEADLINE_S = 600.0


@dataclass
class Stream:
    """Arrival time, in seconds of the monotonic clock, of each chunk that carries text."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0


async def one_stream(url: str, body: dict[str, Any]) -> Stream:
    parts = urlsplit(url)
    if parts.hostname not in {"127.0.0.1", "localhost", "::1"}:
        raise SystemExit(f"{url}: load goes to this host only")
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    stream = Stream(time.perf_counter())
    writer.write(head.encode() + payload)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{url}: {status.decode().strip()} {(await reader.read(2000)).decode()}")
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        # Only the last chunks carry usage; the rest need no JSON parser.
        if b'"usage":{' in line or b'"usage": {' in line:
            usage = json.loads(line[6:]).get("usage") or {}
            stream.tokens = usage.get("completion_tokens", 0)
        if b'"choices":[]' not in line and b'"choices": []' not in line:
            stream.arrivals.append(now)
    writer.close()
    return stream


async def run_level(
    url: str, model: str, streams: int, prompt_tokens: int, tokens: int, vocab: int, seed: int
) -> dict[str, Any]:
    rng = random.Random(seed)
    bodies = [
        {
            "model": model, "prompt": [rng.randrange(300, vocab) for _ in range(prompt_tokens)],
            "max_tokens": tokens, "min_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }
        for _ in range(streams)
    ]  # fmt: skip
    async with asyncio.timeout(DEADLINE_S):
        done = await asyncio.gather(*(one_stream(url, body) for body in bodies))
    gaps = [b - a for s in done for a, b in zip(s.arrivals, s.arrivals[1:], strict=False)]
    first = max(s.arrivals[0] for s in done)
    last = max(s.arrivals[-1] for s in done)
    start = min(s.started for s in done)
    late = sum(sum(t > first for t in s.arrivals) for s in done)
    total = sum(s.tokens for s in done)
    return {
        "streams": streams,
        "tokens": total,
        "overall": round(total / (last - start), 2),
        "decode": round(late / (last - first), 2) if last > first else 0.0,
        "steady": round(streams / statistics.median(gaps), 2),
        "ttft_ms": round(statistics.median(s.arrivals[0] - s.started for s in done) * 1e3, 1),
        "gap_p99_ms": round(sorted(gaps)[int(len(gaps) * 0.99)] * 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=3000, help="prompt ids lie below this")
    parser.add_argument("--repeat", type=int, default=1)
    arguments = parser.parse_args()
    for repeat in range(arguments.repeat):
        for streams in (int(n) for n in arguments.streams.split(",")):
            level = run_level(
                arguments.url, arguments.model, streams, arguments.prompt_tokens,
                arguments.tokens, arguments.vocab, seed=repeat * 1000 + streams,
            )  # fmt: skip
            print(json.dumps(asyncio.run(level)), flush=True)


if __name__ == "__main__":
    main()
