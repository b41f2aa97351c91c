"""Held-out bits a byte and expert load, topic by topic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .data import TOPICS, TopicSize, load_tokens
from .model import Model

BATCH = 8  # windows evaluated at a time


@dataclass(frozen=True)
class TopicResult:
    """What the model does on one topic's held-out documents."""

    bits_per_byte: float
    load: Tensor  # tokens that each expert received, int64 [moe layers, experts]


@torch.no_grad()
def evaluate(
    model: Model,
    data: Path,
    sizes: dict[str, TopicSize],
    length: int,
    limit: int | None = None,
) -> dict[str, TopicResult]:
    """Evaluate on non-overlapping windows of ``length`` tokens, at most ``limit`` a topic."""
    results = {}
    for topic in TOPICS:
        tokens = load_tokens(data, topic, "val")
        windows = (len(tokens) - 1) // length
        if limit is not None:
            windows = min(windows, limit)
        nats = 0.0
        load = torch.zeros(())
        for first in range(0, windows, BATCH):
            starts = [i * length for i in range(first, min(windows, first + BATCH))]
            rows = np.stack([tokens[s : s + length + 1] for s in starts])
            batch = torch.from_numpy(rows.astype(np.int64))
            target = batch[:, 1:]
            nats += model.loss(batch[:, :-1], target).item() * target.numel()
            load = load + torch.stack([layer.load for layer in model.moe_layers])
        bytes_per_token = sizes[topic].val_bytes / sizes[topic].val_tokens
        bits_per_token = nats / (windows * length) / math.log(2)
        results[topic] = TopicResult(bits_per_token / bytes_per_token, load.long())
    return results
