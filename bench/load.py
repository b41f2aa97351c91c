"""Load OpenAI-compatible servers on this host, in turns, and compare their medians.

    python bench/load.py --model NAME --server mesh=http://127.0.0.1:8000 \
        --server other=http://127.0.0.1:8101 --streams 1,16 --repeat 3

The servers take turns (A B A B ...) in one run, because absolute rates drift with the machine;
ratios are to the first. Each measurement is also printed as a JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

import msgspec

from compose.load import Level, run_level


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=3000, help="prompt ids lie below this")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    servers: dict[str, str] = dict(item.split("=", 1) for item in arguments.server)

    async def measure(url: str, streams: int, seed: int) -> Level:
        return await run_level(
            url, arguments.model, streams, prompt_tokens=arguments.prompt_tokens,
            tokens=arguments.tokens, vocab=arguments.vocab, seed=seed,
        )  # fmt: skip

    for streams in (int(n) for n in arguments.streams.split(",")):
        measured: dict[str, list[Level]] = {name: [] for name in servers}
        for repeat in range(arguments.repeat):
            for name, url in servers.items():
                level = asyncio.run(measure(url, streams, seed=repeat * 1000 + streams))
                measured[name].append(level)
                print(name, msgspec.json.encode(level).decode(), flush=True)
        first = 0.0
        for name, levels in measured.items():
            rate = statistics.median(level.steady for level in levels)
            first = first or rate
            ttft = statistics.median(level.ttft_ms for level in levels)
            print(
                f"{streams:3d} streams, {name}: {rate:.1f} tokens/s steady, first token after "
                f"{ttft:.0f} ms; the first server makes {first / rate:.2f} times as many",
                flush=True,
            )


if __name__ == "__main__":
    main()
