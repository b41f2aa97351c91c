"""Decode speed of the mesh beside transformers' ``generate`` on the shipped model, in one run.

    python bench/versus_transformers.py            # prints a table of both and the ratio

The mesh is a real one (1 router, 2 expert workers) asked over REST with streaming; transformers
runs in this process with as many threads as there are cores. They take turns, A B A B, and the
medians are compared. Targets: 3x at one stream, 2x at 32 streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from compose.load import Level, run_level
from tests.support.meshes import Mesh

DEMO = Path(__file__).parents[1] / "demo" / "model"
PROMPT_TOKENS = 32


def transformers_rate(model: torch.nn.Module, streams: int, tokens: int) -> float:
    """Tokens per second after the first, at batch ``streams``."""

    def seconds(count: int) -> float:
        ids = torch.randint(300, 3000, (streams, PROMPT_TOKENS))
        start = time.perf_counter()
        model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
            do_sample=False, pad_token_id=1,
        )  # fmt: skip
        return time.perf_counter() - start

    return streams * (tokens - 1) / (seconds(tokens) - seconds(1))


async def mesh_level(url: str, model: str, streams: int, tokens: int, seed: int) -> Level:
    return await run_level(
        url, model, streams, prompt_tokens=PROMPT_TOKENS, tokens=tokens, vocab=3000, seed=seed
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--streams", default="1,32")
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    with Mesh(experts=2) as mesh, torch.inference_mode():
        name = json.loads(mesh.get("/v1/models")[1])["data"][0]["id"]
        asyncio.run(mesh_level(mesh.url, name, 2, 16, seed=0))
        for streams in (int(n) for n in arguments.streams.split(",")):
            ours: list[float] = []
            theirs: list[float] = []
            for repeat in range(arguments.repeat):
                theirs.append(transformers_rate(model, streams, arguments.tokens))
                level = asyncio.run(
                    mesh_level(mesh.url, name, streams, arguments.tokens, seed=repeat + 1)
                )
                ours.append(level.decode)
            mesh_rate, peer_rate = statistics.median(ours), statistics.median(theirs)
            print(
                f"{streams:3d} streams: mesh {mesh_rate:8.1f} tok/s {ours}, transformers "
                f"{peer_rate:8.1f} tok/s {[round(x, 1) for x in theirs]}, "
                f"ratio {mesh_rate / peer_rate:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
