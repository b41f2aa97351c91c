"""Drawing tokens from logits, one vectorised pass for a whole batch.

What a row yields depends on its own logits, parameters and history only, never on who else is in
the batch: the number drawn is a hash of (seed, position), and sums run along a row.

Order, as in vLLM: log-probabilities are those of the raw logits; then logit bias and the ban of
stop tokens before ``min_tokens``; repetition, frequency and presence penalties; greedy rows take
the maximum, the lowest id of equal ones; temperature; min_p; top_k; top_p on what is left; inverse
CDF over what survives: by falling logit (equal ones by token id), and where none of the three cuts
anything by token id alone, for which nothing has to be sorted.

What min_p and top_k keep is found by comparing fp32 logits, so it is the same on every device
(``min_p`` as a distance from the largest logit). Sums of probabilities are rounded: where top_p
ends and which token is drawn may differ between devices if a sum lies within rounding, some 1e-6 of
it, of what is looked for.
"""

from __future__ import annotations

import math
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
Singles = npt.NDArray[np.float32]
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


class TokenSampler(Protocol):
    """Draws from the logits of one kind of model, where they lie. Belongs to one thread."""

    def draw(
        self, logits: torch.Tensor, sequences: SequenceOf[Sequence]
    ) -> tuple[list[int], list[Logprob | None]]:
        """The next token of each sequence from its row of ``logits`` ``[n, vocab]`` fp32.

        Returns tokens (``UNDRAWABLE`` where a row is not finite) and, where asked for, their
        log-probabilities. ``logits`` may be overwritten.
        """

    def score(
        self, logits: torch.Tensor, tokens: SequenceOf[int], alternatives: int
    ) -> list[Logprob]:
        """Log-probabilities of ``tokens`` that are known, one for each row of ``logits``, and of as
        many of the most likely ones.
        """


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < 1e-5


def depth(temperature: float, share: float) -> float:
    """How far a logit may be below the largest for its token to have ``share`` of the probability
    of the most likely one; ``inf`` for a share of 0.
    """
    return -temperature * math.log(share) if share else math.inf


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
class _Limits:
    """What a row's tokens are cut by, ``[rows]``."""

    top_k: Ids
    """The size of the vocabulary where off."""
    top_p: Floats
    depths: Singles
    """``[rows, shares]``: of the candidates for each of ``_CANDIDATE_SHARES``, or of min_p's."""
    min_p: npt.NDArray[np.bool_]
    """Whether min_p is on."""

    def of(self, rows: Ids) -> _Limits:
        return _Limits(self.top_k[rows], self.top_p[rows], self.depths[rows], self.min_p[rows])


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
    limits: _Limits

    @classmethod
    def of(cls, rows: SequenceOf[Sequence], vocab_size: int) -> _Batch:
        drawn = [i for i, s in enumerate(rows) if not is_greedy(s.sampling)]
        params = [rows[i].sampling for i in drawn]
        limits = _Limits(
            top_k=np.array(
                [min(p.top_k or vocab_size, vocab_size) for p in params], dtype=np.int64
            ),
            top_p=np.array([p.top_p for p in params], dtype=np.float64),
            depths=np.array(
                [
                    [depth(p.temperature, p.min_p or share) for share in _CANDIDATE_SHARES]
                    for p in params
                ],
                dtype=np.float32,
            ).reshape(len(params), len(_CANDIDATE_SHARES)),
            min_p=np.array([p.min_p > 0.0 for p in params], dtype=np.bool_),
        )
        return cls(
            rows=rows,
            adjusted=[i for i, s in enumerate(rows) if adjusts_logits(s.sampling)],
            logprobs=max((s.sampling.logprobs for s in rows), default=-1),
            drawn=np.array(drawn, dtype=np.int64),
            seeds=np.array([p.seed & _MASK64 for p in params], dtype=np.uint64),
            inverse_temperature=torch.tensor(
                [1.0 / p.temperature for p in params], dtype=torch.float32
            ).unsqueeze(1),
            filtered=(limits.top_k < vocab_size) | (limits.top_p < 1.0) | limits.min_p,
            limits=limits,
        )


class Sampler:
    """Draws one token a row. Keeps the parameters of the last batch; belongs to one thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._batch = _Batch.of([], vocab_size)

    def draw(
        self, logits: torch.Tensor, sequences: SequenceOf[Sequence]
    ) -> tuple[list[int], list[Logprob | None]]:
        batch = self._batch
        if batch.rows != sequences:
            batch = self._batch = _Batch.of(sequences, self._vocab_size)
        raw_logprobs = torch.log_softmax(logits, -1) if batch.logprobs >= 0 else None
        for row in batch.adjusted:
            Adjustments.of(sequences[row], self._vocab_size).apply(logits[row].numpy())
        best, best_ids = logits.max(-1)
        tokens: list[int] = best_ids.tolist()
        broken = np.flatnonzero(~np.isfinite(best.numpy())).tolist()
        for row in broken:
            logits[row] = best[row] = 0.0
        if batch.drawn.size:
            if len(batch.drawn) != len(sequences):
                logits, best = logits[batch.drawn], best[batch.drawn]
            # The distance is rounded less than a large logit would be when it is scaled.
            below = torch.sub(logits, best.unsqueeze(1)).mul_(batch.inverse_temperature)
            probs = torch.softmax(below, -1).numpy()
            positions = np.array([len(sequences[i].tokens) for i in batch.drawn], dtype=np.uint64)
            chosen = _inverse_cdf(
                probs, logits.numpy(), best.numpy(), uniform(batch.seeds, positions), batch
            )
            for row, token in zip(batch.drawn.tolist(), chosen, strict=True):
                tokens[row] = token
        for row in broken:
            tokens[row] = UNDRAWABLE
        if raw_logprobs is None:
            return tokens, [None] * len(tokens)
        wanted = [s.sampling.logprobs for s in sequences]
        return tokens, logprob_rows(raw_logprobs, tokens, wanted)

    def score(
        self, logits: torch.Tensor, tokens: SequenceOf[int], alternatives: int
    ) -> list[Logprob]:
        found = logprob_rows(
            torch.log_softmax(logits, -1), list(tokens), [alternatives] * len(tokens)
        )
        return [one for one in found if one is not None]


def logprob_rows(
    logprobs: torch.Tensor, tokens: list[int], wanted: Iterable[int]
) -> list[Logprob | None]:
    """Each row's token with its log-probability and the ``wanted`` most likely alternatives.

    All values of a row come from the same ``logprobs`` ``[n, vocab]``, so a token has the same
    bits as the chosen one and among the alternatives. None where ``wanted`` is negative.
    """
    wanted = list(wanted)
    ids = torch.tensor(tokens).clamp_(min=0).unsqueeze(1)
    chosen = logprobs.gather(1, ids).squeeze(1)
    most = min(max((0, *wanted)), logprobs.shape[1])
    top = logprobs.topk(most, dim=-1)
    scored = logprobs_of(tokens, wanted, chosen, top.indices, top.values)
    return [one if count >= 0 else None for one, count in zip(scored, wanted, strict=True)]


def logprobs_of(
    tokens: SequenceOf[int],
    wanted: SequenceOf[int],
    chosen: torch.Tensor,
    top_ids: torch.Tensor,
    top_values: torch.Tensor,
) -> list[Logprob]:
    """From log-probabilities ``chosen [n]`` of ``tokens`` and ``top_values [n, most]`` of the most
    likely ones, of which each row has ``wanted``, on the host.
    """
    return [
        Logprob(token, value, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, value, count, ids, values in zip(
            tokens, chosen.tolist(), wanted, top_ids.tolist(), top_values.tolist(), strict=True
        )
    ]


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Bias, ban and penalties of one row, ``[k]`` each, for k distinct ``tokens``: to a logit the
    ``bias`` is added (``-inf``: banned), then it is divided by ``penalty`` where it is positive and
    else multiplied by it, then ``minus`` is taken away.
    """

    tokens: Ids
    bias: Singles
    penalty: Singles
    minus: Singles

    @classmethod
    def of(cls, sequence: Sequence, vocab_size: int) -> Adjustments:
        sampling = sequence.sampling
        none = np.zeros(0, dtype=np.int64)
        biased = np.array([token for token, _ in sampling.logit_bias], dtype=np.int64)
        banned = seen = distinct = none
        if sampling.min_tokens > sequence.num_output:
            # A configuration may name end-of-sequence tokens that the model has no logit for.
            stops = sorted(token for token in sequence.stop_ids if token < vocab_size)
            banned = np.array(stops, dtype=np.int64)
        if sampling.repetition_penalty != 1.0:
            seen = np.unique(np.array(sequence.tokens, dtype=np.int64))
        counts = none
        if sampling.frequency_penalty or sampling.presence_penalty:
            output = np.array(sequence.tokens[sequence.prompt_len :], dtype=np.int64)
            distinct, counts = np.unique(output, return_counts=True)
        tokens = np.unique(np.concatenate([biased, banned, seen, distinct]))
        bias = np.zeros(len(tokens), dtype=np.float32)
        biases = np.array([value for _, value in sampling.logit_bias], dtype=np.float32)
        np.add.at(bias, np.searchsorted(tokens, biased), biases)
        bias[np.searchsorted(tokens, banned)] = -np.inf
        penalty = np.ones(len(tokens), dtype=np.float32)
        penalty[np.searchsorted(tokens, seen)] = sampling.repetition_penalty
        minus = np.zeros(len(tokens), dtype=np.float32)
        minus[np.searchsorted(tokens, distinct)] = (
            sampling.frequency_penalty * counts + sampling.presence_penalty
        )
        return cls(tokens, bias, penalty, minus)

    def apply(self, row: Singles) -> None:
        """To one row ``[vocab]``, in place."""
        values = row[self.tokens] + self.bias
        values = np.where(values > 0, values / self.penalty, values * self.penalty)
        row[self.tokens] = values - self.minus


def _inverse_cdf(
    probs: Singles, logits: Singles, peaks: Singles, numbers: Floats, batch: _Batch
) -> list[int]:
    """A token per row of ``probs`` and ``logits`` ``[n, vocab]``, whose largest logits are
    ``peaks`` ``[n]``, at the quantile ``numbers`` ``[n]``.
    """
    chosen = np.zeros(len(probs), dtype=np.int64)
    plain = np.flatnonzero(~batch.filtered)
    if plain.size:
        some = probs if plain.size == len(probs) else probs[plain]
        chosen[plain] = _unfiltered(some, numbers[plain])
    pending = np.flatnonzero(batch.filtered)
    for share in range(len(_CANDIDATE_SHARES)):
        if not pending.size:
            break
        whole = pending.size == len(probs)
        tokens, enough = _filtered(
            probs if whole else probs[pending],
            logits if whole else logits[pending],
            peaks[pending],
            numbers[pending],
            batch.limits.of(pending),
            share,
        )
        chosen[pending[enough]] = tokens[enough]
        pending = pending[~enough]
    result: list[int] = chosen.tolist()
    return result


def _unfiltered(probs: Singles, numbers: Floats) -> Ids:
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


def _filtered(
    probs: Singles, logits: Singles, peaks: Singles, numbers: Floats, limits: _Limits, share: int
) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """A token per row, drawn after min_p, top_k and top_p (each on what the one before left).

    Where min_p does not say it already, only tokens with at least the ``share``-th of
    ``_CANDIDATE_SHARES`` of the best one's probability are looked at; the second array says for
    which rows that was enough.
    """
    top_k, top_p = limits.top_k, limits.top_p
    n, vocab = probs.shape
    flat = np.flatnonzero(logits >= (peaks - limits.depths[:, share])[:, None])
    rows, ids = np.divmod(flat, vocab)
    counts = np.bincount(rows, minlength=n)
    columns = np.arange(int(counts.max()))
    # One integer orders by falling logit, then by id.
    keys = np.full((n, len(columns)), _LAST_KEY, dtype=np.uint64)
    keys[columns < counts[:, None]] = (_falling(logits.reshape(-1)[flat]) << np.uint64(32)) | (
        ids.astype(np.uint64)
    )
    keys.sort(1)
    order = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    rows = np.arange(n)
    cdf = probs[rows[:, None], np.minimum(order, vocab - 1)].astype(np.float64)
    cdf[columns >= np.minimum(counts, top_k)[:, None]] = 0.0
    np.cumsum(cdf, 1, out=cdf)
    total = cdf[:, -1]
    # Nothing cut yet: the nucleus is a share of all probability, of which the candidates may
    # hold too little. After a cut it is a share of what was left.
    uncut = (top_k >= vocab) & ~limits.min_p
    all_of_them = _CANDIDATE_SHARES[share] == 0.0
    enough = np.where(uncut, total >= top_p, limits.min_p | (counts >= top_k)) | all_of_them
    before = (cdf < (top_p * np.where(uncut, 1.0, total))[:, None]).sum(1)
    last = np.minimum(before, np.minimum(counts, top_k) - 1)
    kept = cdf[rows, last]
    picked = _first_beyond(np.minimum(cdf, kept[:, None]), numbers * kept)
    return order[rows, picked], enough


def _falling(logits: Singles) -> npt.NDArray[np.uint64]:
    """Integers of 32 bits, smaller for larger logits; both zeros are one."""
    bits = (logits + np.float32(0.0)).view(np.uint32)
    return np.where(bits >> 31, bits, ~bits & np.uint32(0x7FFFFFFF)).astype(np.uint64)


def _first_beyond(cdf: Floats, target: Floats) -> Ids:
    """First column of each row where ``cdf`` exceeds ``target``.

    Rounding can push the target onto the total itself; then the last column with mass wins.
    """
    beyond = np.add.reduce(cdf <= target[:, None], axis=1, dtype=np.int64)
    last = np.add.reduce(cdf < cdf[:, -1:], axis=1, dtype=np.int64)
    first: Ids = np.minimum(beyond, last)
    return first
