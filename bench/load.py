"""Load any OpenAI-compatible server on this host; prints one JSON object a level and round.

    python bench/load.py --url http://127.0.0.1:8000 --model NAME --streams 1,16

Alternate servers (A B A B) in one run and compare medians: absolute rates drift with the machine.
"""

from __future__ import annotations

import argparse
import asyncio

import msgspec

from compose.load import run_level


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
                arguments.url, arguments.model, streams,
                prompt_tokens=arguments.prompt_tokens, tokens=arguments.tokens,
                vocab=arguments.vocab, seed=repeat * 1000 + streams,
            )  # fmt: skip
            print(msgspec.json.encode(asyncio.run(level)).decode(), flush=True)


if __name__ == "__main__":
    main()
