"""Encoded corpus: training windows and held-out text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TOPICS = ("scripture", "novels", "atlas", "manual", "code")

Tokens = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class TopicSize:
    """How much text a topic has."""

    train_tokens: int
    val_tokens: int
    train_bytes: int
    val_bytes: int


def load_sizes(data: Path) -> dict[str, TopicSize]:
    """The size of each topic, as ``tokenizer.py`` recorded it."""
    raw = json.loads((data / "meta.json").read_text(encoding="utf-8"))
    return {topic: TopicSize(**raw[topic]) for topic in TOPICS}


def load_tokens(data: Path, topic: str, split: str) -> Tokens:
    """The token ids of a topic's ``train`` or ``val`` documents, one after the other."""
    tokens: Tokens = np.load(data / f"{topic}.{split}.npy")
    return tokens


class Windows:
    """Shuffled, non-overlapping windows of ``length + 1`` tokens.

    An epoch cuts each topic at its own random offset, so that later epochs see other windows. The
    order depends on the seed alone.
    """

    def __init__(self, topics: list[Tokens], length: int, seed: int) -> None:
        self._topics, self._length, self._seed = topics, length, seed
        self._epoch = 0
        self._queue: list[tuple[int, int]] = []  # (topic, first token)

    def _take(self, count: int) -> list[tuple[int, int]]:
        while len(self._queue) < count:
            rng = np.random.default_rng([self._seed, self._epoch])
            self._epoch += 1
            windows: list[tuple[int, int]] = []
            for topic, tokens in enumerate(self._topics):
                offset = int(rng.integers(0, self._length))
                starts = range(offset, len(tokens) - self._length - 1, self._length)
                windows += [(topic, start) for start in starts]
            rng.shuffle(windows)
            self._queue += windows
        taken, self._queue = self._queue[:count], self._queue[count:]
        return taken

    def next(self, batch: int) -> Tensor:
        """The next ``batch`` windows, int64 [batch, length + 1]."""
        rows = [self._topics[k][i : i + self._length + 1] for k, i in self._take(batch)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def skip(self, windows: int) -> None:
        """Pass over windows that an interrupted run has already used."""
        self._take(windows)
