"""How a step is split so that one micro-batch computes attention while another is with the experts.

Pure. The rule: two micro-batches iff ``max(t_attn, 2 t_exp(b/2)) < t_attn + t_exp(b)``, where
``t_attn`` counts both halves, since each pays its fixed costs. Times are measured: attention and
round trip are taken as affine in the tokens of a micro-batch, fitted to recent steps; and where
both ways of running a step of some size have been timed, the faster is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from router_svc.scheduler import Chunk

_FORGET = 0.98
"""Weight of what was known when a sample is added."""
_MIN_GAIN = 0.97
"""Predicted or measured time of two micro-batches, as a share of that of one, below which two are
used: a tie is not worth the switching."""
_MIN_SAMPLES = 8
_TRY_AGAIN_EVERY = 64
"""Steps of one size after which the way not chosen is timed again."""


class AffineFit:
    """``t(b) = fixed + slope * b`` by least squares over exponentially forgotten samples."""

    def __init__(self) -> None:
        self.samples = 0
        self._n = self._b = self._t = self._bb = self._bt = 0.0

    def add(self, tokens: int, time_ns: float) -> None:
        self.samples += 1
        self._n = self._n * _FORGET + 1.0
        self._b = self._b * _FORGET + tokens
        self._t = self._t * _FORGET + time_ns
        self._bb = self._bb * _FORGET + tokens * tokens
        self._bt = self._bt * _FORGET + tokens * time_ns

    def at(self, tokens: float) -> float:
        """Predicted time in ns. Samples of one size only say nothing of others: all is fixed."""
        spread = self._n * self._bb - self._b * self._b
        if spread <= 1e-6 * self._n * self._bb:
            return self._t / self._n
        slope = max(0.0, (self._n * self._bt - self._b * self._t) / spread)
        return max(0.0, (self._t - slope * self._b) / self._n + slope * tokens)


class MicroBatchRule:
    """Chooses one or two micro-batches a step from what steps have taken."""

    def __init__(self) -> None:
        self._attention = AffineFit()
        self._experts = AffineFit()
        self._step_ns: dict[tuple[int, int], float] = {}  # (size class, micro-batches)
        self._steps: dict[int, int] = {}

    def choose(self, tokens: int, chunks: int) -> int:
        """For a step of ``tokens`` in ``chunks`` sequences, which cannot be split themselves."""
        if chunks < 2 or self._attention.samples < _MIN_SAMPLES:
            return 1
        size = tokens.bit_length()
        steps = self._steps[size] = self._steps.get(size, 0) + 1
        better = self._better(tokens, size)
        if steps % _TRY_AGAIN_EVERY == 0 and (size, 2) in self._step_ns:
            return 3 - better
        return better

    def _better(self, tokens: int, size: int) -> int:
        one, two = self._step_ns.get((size, 1)), self._step_ns.get((size, 2))
        if one is not None and two is not None:
            return 2 if two < one * _MIN_GAIN else 1
        one = self._attention.at(tokens) + self._experts.at(tokens)
        two = max(2 * self._attention.at(tokens / 2), 2 * self._experts.at(tokens / 2))
        return 2 if two < one * _MIN_GAIN else 1

    def observe(
        self, micro_batches: int, tokens: int, attention_ns: int, experts_ns: int, step_ns: int
    ) -> None:
        """A step took ``step_ns``: attention and what belongs to it ``attention_ns`` in all, round
        trips to the experts ``experts_ns`` in all (true only without ping-pong: ignored with it).
        """
        key = (tokens.bit_length(), micro_batches)
        known = self._step_ns.get(key, float(step_ns))
        self._step_ns[key] = known + (step_ns - known) * (1 - _FORGET) * 5
        self._attention.add(tokens // micro_batches, attention_ns / micro_batches)
        if micro_batches == 1:
            self._experts.add(tokens, experts_ns)


def split_chunks(chunks: Sequence[Chunk], parts: int) -> list[list[Chunk]]:
    """Divide sequences over at most ``parts`` micro-batches of about equally many tokens, each
    keeping their order. None is empty.
    """
    parts = min(parts, len(chunks))
    if parts <= 1:
        return [list(chunks)]
    loads = [0] * parts
    place: dict[int, int] = {}
    # Largest first; equal ones in order, so that a decode batch falls into the same parts again.
    for index in sorted(range(len(chunks)), key=lambda i: -chunks[i].count):
        part = loads.index(min(loads))
        place[index] = part
        loads[part] += chunks[index].count
    return [[c for i, c in enumerate(chunks) if place[i] == part] for part in range(parts)]
