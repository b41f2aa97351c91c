"""What a sampler is given in tests, and what it may draw: the rules written down again, in fp64."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import torch

from mesh.messages import Sampling
from moe_model.sampler import UNDRAWABLE, Adjustments, uniform

ROUNDING = 1e-5
"""Of a cumulative sum, which each sampler rounds its own way."""
INF = float("inf")


@dataclass(frozen=True, eq=False)
class Row:
    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len


def some_row(rng: random.Random, vocab: int) -> Row:
    def maybe(value: float, neutral: float, share: float = 0.4) -> float:
        return value if rng.random() < share else neutral

    prompt, output = rng.randrange(1, 6), rng.randrange(5)
    return Row(
        [rng.randrange(vocab) for _ in range(prompt + output)],
        prompt,
        Sampling(
            temperature=rng.choice((0.0, 0.3, 0.8, 1.0, 1.7)),
            top_p=maybe(rng.choice((1e-6, 0.4, 0.9)), 1.0),
            top_k=int(maybe(rng.choice((1, 4, vocab, 10 * vocab)), 0)),
            min_p=maybe(rng.choice((0.01, 0.3, 1.0)), 0.0, 0.3),
            repetition_penalty=maybe(1.3, 1.0),
            presence_penalty=maybe(0.4, 0.0),
            frequency_penalty=maybe(-0.7, 0.0),
            seed=rng.randrange(-(1 << 63), 1 << 63),
            logit_bias=tuple(
                (rng.randrange(vocab), rng.uniform(-3, 3)) for _ in range(rng.choice((0, 0, 5)))
            ),
            min_tokens=rng.choice((0, 0, 3)),
            logprobs=rng.choice((-1, -1, 0, 3)),
        ),
        frozenset({rng.randrange(vocab), vocab + 3}),
    )


def some_logits(rng: random.Random, vocab: int, generator: torch.Generator) -> torch.Tensor:
    row = torch.randn(vocab, generator=generator) * rng.choice((0.1, 1.0, 5.0))
    kind = rng.randrange(4)
    if kind == 0:  # many are equal
        row = row.round()
    elif kind == 1:
        row[torch.rand(vocab, generator=generator) < 0.3] = -INF
        row[rng.randrange(vocab)] = 0.0
    elif kind == 2:
        row = row.bfloat16().float()
    return row


def drawable(logits: torch.Tensor, row: Row, slack: float = ROUNDING) -> set[int]:
    """The tokens that the rules allow for one row ``[vocab]``, in fp64, if each cumulative sum of
    probabilities may be off by ``slack``.
    """
    single = logits.numpy().copy()
    Adjustments.of(row, len(single)).apply(single)
    peak, sampling = single.max(), row.sampling
    if not np.isfinite(peak):
        return {UNDRAWABLE}
    if not sampling.temperature:
        return {int(single.argmax())}
    ids = np.arange(len(single))
    if 0 < sampling.top_k < len(single) or sampling.top_p < 1 or sampling.min_p > 0:
        ids = ids[np.lexsort((ids, -single))]
    if sampling.min_p:
        below = np.float32(-sampling.temperature * math.log(sampling.min_p))
        ids = ids[single[ids] >= peak - below]
    ids = ids[: sampling.top_k or None]
    weights = np.exp((single[ids].astype(np.float64) - peak) / sampling.temperature)
    shares = np.cumsum(weights) / weights.sum()
    seed, position = np.uint64(sampling.seed & ((1 << 64) - 1)), np.uint64(len(row.tokens))
    number = float(uniform(np.array([seed]), np.array([position]))[0])

    def drawn(off: float) -> int:
        kept = len(ids)
        if sampling.top_p < 1.0:
            kept = 1 + int(np.searchsorted(shares[:-1], sampling.top_p + off))
        goal = (number + off) * shares[kept - 1]
        return int(np.searchsorted(shares[: kept - 1], goal, side="right"))

    # A token of no weight is never drawn, whatever the sums are.
    found = range(drawn(-slack), drawn(slack) + 1)
    return {int(ids[at]) for at in found if weights[at] > 0}
