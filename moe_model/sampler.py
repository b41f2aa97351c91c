"""Drawing tokens from logits, one vectorised pass for a whole batch.

What a row yields depends on its own logits, parameters and history only, never on who else is in
the batch: the number drawn is a hash of (seed, position), and sums run along a row.

Order, as in vLLM: log-probabilities are those of the raw logits; then logit bias and the ban of
stop tokens before ``min_tokens``; repetition, frequency and presence penalties; greedy rows take
the maximum; temperature; min_p; top_k; top_p on what is left; inverse CDF over what survives,
most likely first (equal ones by token id).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from mesh.messages import Logprob, Sampling

Floats = npt.NDArray[np.float64]
Probs = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

UNDRAWABLE = -1
"""In place of a token where a row's logits hold no finite maximum."""

_CANDIDATE_SHARES = (1e-3, 1e-5, 0.0)
"""Tokens less likely than this share of the most likely one are looked at only when the others do
not already hold all that top_k and top_p keep. Affects speed, never the result."""

_CDF_BLOCK = 64
"""Tokens whose probabilities are summed before the search for a quantile."""

_LAST_KEY = np.iinfo(np.uint64).max

_MASK64 = (1 << 64) - 1


class Sequence(Protocol):
    """What the draw of a sequence's next token depends on, besides its logits."""

    @property
    def tokens(self) -> SequenceOf[int]:
        """Prompt and output so far."""

    @property
    def prompt_len(self) -> int: ...

    @property
    def num_output(self) -> int: ...

    @property
    def sampling(self) -> Sampling: ...

    @property
    def stop_ids(self) -> AbstractSet[int]:
        """Tokens that end it, banned before ``min_tokens``."""


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> Floats:
    """One number in [0, 1) for each (seed, position): splitmix64 of both, 53 bits of it."""
    mixed = seeds.copy()
    for value in (positions, np.uint64(0)):
        mixed += np.uint64(0x9E3779B97F4A7C15)
        mixed ^= value
        mixed ^= mixed >> np.uint64(30)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(27)
        mixed *= np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < 1e-5


def adjusts_logits(sampling: Sampling) -> bool:
    """The row needs more than its raw logits before the maximum or the temperature."""
    return bool(
        sampling.logit_bias
        or sampling.min_tokens
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


@dataclass(frozen=True, slots=True)
class _Batch:
    """The parameters of one composition of the batch, kept from step to step."""

    rows: SequenceOf[Sequence]
    adjusted: list[int]
    logprobs: int
    """Most alternatives any row wants, or -1."""
    drawn: Ids
    """Rows that are not greedy; the arrays below are parallel to it."""
    seeds: npt.NDArray[np.uint64]
    inverse_temperature: torch.Tensor  # [drawn, 1]
    filtered: npt.NDArray[np.bool_]
    top_k: Ids
    top_p: Floats
    min_p: Probs

    @classmethod
    def of(cls, rows: SequenceOf[Sequence], vocab_size: int) -> _Batch:
        drawn = [i for i, s in enumerate(rows) if not is_greedy(s.sampling)]
        params = [rows[i].sampling for i in drawn]
        top_k = np.array([min(p.top_k or vocab_size, vocab_size) for p in params], dtype=np.int64)
        top_p = np.array([p.top_p for p in params], dtype=np.float64)
        min_p = np.array([p.min_p for p in params], dtype=np.float32)
        return cls(
            rows=rows,
            adjusted=[i for i, s in enumerate(rows) if adjusts_logits(s.sampling)],
            logprobs=max((s.sampling.logprobs for s in rows), default=-1),
            drawn=np.array(drawn, dtype=np.int64),
            seeds=np.array([p.seed & _MASK64 for p in params], dtype=np.uint64),
            inverse_temperature=torch.tensor(
                [1.0 / p.temperature for p in params], dtype=torch.float32
            ).unsqueeze(1),
            filtered=(top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0),
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )


class Sampler:
    """Draws one token a row. Keeps the parameters of the last batch; belongs to one thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._batch = _Batch.of([], vocab_size)

    def draw(
        self, logits: torch.Tensor, sequences: SequenceOf[Sequence]
    ) -> tuple[list[int], list[Logprob | None]]:
        """The next token of each sequence from its row of ``logits`` ``[n, vocab]`` fp32.

        Returns tokens (``UNDRAWABLE`` where a row is not finite) and, where asked for, their
        log-probabilities. ``logits`` may be overwritten.
        """
        batch = self._batch
        if batch.rows != sequences:
            batch = self._batch = _Batch.of(sequences, self._vocab_size)
        raw_logprobs = torch.log_softmax(logits, -1) if batch.logprobs >= 0 else None
        for row in batch.adjusted:
            _adjust(logits[row].numpy(), sequences[row])
        best, best_ids = logits.max(-1)
        tokens: list[int] = best_ids.tolist()
        broken = np.flatnonzero(~np.isfinite(best.numpy())).tolist()
        for row in broken:
            logits[row] = 0.0
        if batch.drawn.size:
            scaled = logits if len(batch.drawn) == len(sequences) else logits[batch.drawn]
            probs = torch.softmax(scaled * batch.inverse_temperature, -1).numpy()
            positions = np.array([len(sequences[i].tokens) for i in batch.drawn], dtype=np.uint64)
            chosen = _inverse_cdf(probs, uniform(batch.seeds, positions), batch)
            for row, token in zip(batch.drawn.tolist(), chosen, strict=True):
                tokens[row] = token
        for row in broken:
            tokens[row] = UNDRAWABLE
        if raw_logprobs is None:
            return tokens, [None] * len(tokens)
        wanted = [s.sampling.logprobs for s in sequences]
        return tokens, logprob_rows(raw_logprobs, tokens, wanted)


def logprob_rows(
    logprobs: torch.Tensor, tokens: list[int], wanted: Iterable[int]
) -> list[Logprob | None]:
    """Each row's token with its log-probability and the ``wanted`` most likely alternatives.

    All values of a row come from the same ``logprobs`` ``[n, vocab]``, so a token has the same
    bits as the chosen one and among the alternatives. None where ``wanted`` is negative.
    """
    wanted = list(wanted)
    ids = torch.tensor(tokens).clamp_(min=0).unsqueeze(1)
    chosen = logprobs.gather(1, ids).squeeze(1).tolist()
    most = min(max(wanted, default=0), logprobs.shape[1])
    top_values: list[list[float]] = [[]] * len(tokens)
    top_ids: list[list[int]] = [[]] * len(tokens)
    if most > 0:
        values, indices = logprobs.topk(most, dim=-1)
        top_values, top_ids = values.tolist(), indices.tolist()
    return [
        Logprob(token, value, tuple(zip(ids_[:count], values_[:count], strict=True)))
        if count >= 0
        else None
        for token, value, count, ids_, values_ in zip(
            tokens, chosen, wanted, top_ids, top_values, strict=True
        )
    ]


def _adjust(row: npt.NDArray[np.float32], sequence: Sequence) -> None:
    """Bias, ban and penalties on one row ``[vocab]``, in place."""
    sampling = sequence.sampling
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        np.add.at(row, np.array(ids), np.array(biases, dtype=np.float32))
    if sampling.min_tokens > sequence.num_output and sequence.stop_ids:
        row[list(sequence.stop_ids)] = -np.inf
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.array(sequence.tokens))
        values = row[seen]
        penalty = np.float32(sampling.repetition_penalty)
        row[seen] = np.where(values > 0, values / penalty, values * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        output = np.array(sequence.tokens[sequence.prompt_len :], dtype=np.int64)
        distinct, counts = np.unique(output, return_counts=True)
        row[distinct] -= (sampling.frequency_penalty * counts + sampling.presence_penalty).astype(
            np.float32
        )


def _inverse_cdf(probs: Probs, numbers: Floats, batch: _Batch) -> list[int]:
    """A token per row of ``probs`` ``[n, vocab]`` at the quantile ``numbers`` ``[n]``."""
    chosen = np.zeros(len(probs), dtype=np.int64)
    plain = np.flatnonzero(~batch.filtered)
    if plain.size:
        some = probs if plain.size == len(probs) else probs[plain]
        chosen[plain] = _unfiltered(some, numbers[plain])
    pending = np.flatnonzero(batch.filtered)
    for share in _CANDIDATE_SHARES:
        if not pending.size:
            break
        some = probs if pending.size == len(probs) else probs[pending]
        limits = _Limits(batch.top_k[pending], batch.top_p[pending], batch.min_p[pending])
        tokens, enough = _filtered(some, numbers[pending], limits, share)
        chosen[pending[enough]] = tokens[enough]
        pending = pending[~enough]
    result: list[int] = chosen.tolist()
    return result


def _unfiltered(probs: Probs, numbers: Floats) -> Ids:
    """A token per row, in order of token ids; found by blocks so that no long sum is stored."""
    n, vocab = probs.shape
    blocks = -(-vocab // _CDF_BLOCK)
    if vocab != blocks * _CDF_BLOCK:
        padded = np.zeros((n, blocks * _CDF_BLOCK), dtype=np.float32)
        padded[:, :vocab] = probs
        probs = padded
    split = probs.reshape(n, blocks, _CDF_BLOCK)
    block_cdf = split.sum(2).cumsum(1, dtype=np.float64)
    target = numbers * block_cdf[:, -1]
    block = _first_beyond(block_cdf, target)
    rows = np.arange(n)
    target -= np.where(block > 0, block_cdf[rows, block - 1], 0.0)
    inside = split[rows, block].cumsum(1, dtype=np.float64)
    return block * _CDF_BLOCK + _first_beyond(inside, target)


@dataclass(frozen=True, slots=True)
class _Limits:
    top_k: Ids
    """The size of the vocabulary where off."""
    top_p: Floats
    min_p: Probs


def _filtered(
    probs: Probs, numbers: Floats, limits: _Limits, share: float
) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """A token per row, drawn after min_p, top_k and top_p (each on what the one before left).

    Where min_p does not say it already, only tokens with at least ``share`` of the best one's
    probability are looked at; the second array says for which rows that was enough.
    """
    top_k, top_p, min_p = limits.top_k, limits.top_p, limits.min_p
    n, vocab = probs.shape
    floor = probs.max(1) * np.where(min_p > 0.0, min_p, np.float32(share))
    flat = np.flatnonzero(probs >= floor[:, None])
    rows, ids = np.divmod(flat, vocab)
    counts = np.bincount(rows, minlength=n)
    columns = np.arange(int(counts.max()))
    # One integer orders by falling probability, then by id: the bits of a non-negative float
    # grow with it.
    keys = np.full((n, len(columns)), _LAST_KEY, dtype=np.uint64)
    bits = probs.reshape(-1)[flat].view(np.uint32).astype(np.uint64)
    keys[columns < counts[:, None]] = (~bits << np.uint64(32)) | ids.astype(np.uint64)
    keys.sort(1)
    cdf = (~keys >> np.uint64(32)).astype(np.uint32).view(np.float32).astype(np.float64)
    cdf[columns >= np.minimum(counts, top_k)[:, None]] = 0.0
    np.cumsum(cdf, 1, out=cdf)
    total = cdf[:, -1]
    # Nothing cut yet: the nucleus is a share of all probability, of which the candidates may
    # hold too little. After a cut it is a share of what was left.
    uncut = (top_k >= vocab) & (min_p == 0.0)
    enough = np.where(uncut, total >= top_p, (min_p > 0.0) | (counts >= top_k)) | (share == 0.0)
    before = (cdf < (top_p * np.where(uncut, 1.0, total))[:, None]).sum(1)
    last = np.minimum(before, np.minimum(counts, top_k) - 1)
    rows = np.arange(n)
    kept = cdf[rows, last]
    picked = _first_beyond(np.minimum(cdf, kept[:, None]), numbers * kept)
    return (keys[rows, picked] & np.uint64(0xFFFFFFFF)).astype(np.int64), enough


def _first_beyond(cdf: Floats, target: Floats) -> Ids:
    """First column of each row where ``cdf`` exceeds ``target``.

    Rounding can push the target onto the total itself; then the last column with mass wins.
    """
    beyond = np.add.reduce(cdf <= target[:, None], axis=1, dtype=np.int64)
    last = np.add.reduce(cdf < cdf[:, -1:], axis=1, dtype=np.int64)
    first: Ids = np.minimum(beyond, last)
    return first
