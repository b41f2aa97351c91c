"""The router's sampler on a device: logits stay there, tokens come down.

The rules are ``moe_model.sampler``'s. A step's parameters go up in one copy: the draws' positions,
and of rows whose logits are adjusted the tokens that this concerns. The number of bytes that come
down is 4 a row, and for rows that want log-probabilities another 4, and 12 for each alternative.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np
import torch
from ep_kernels.triton.device import Device, Stream
from ep_kernels.triton.sampling import Draws, log_sum, most_likely, sample
from ep_kernels.triton.transfer import download, upload

from mesh.messages import Logprob
from moe_model.sampler import Adjustments, Sequence, adjusts_logits, is_greedy, logprobs_of

_ROWS_RANKED = 64
"""Rows whose most likely tokens are looked for at once: each needs 16 bytes for each token of the
vocabulary meanwhile."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The parameters of one composition of the batch, kept from step to step."""

    rows: SequenceOf[Sequence]
    adjusted: list[int]
    draws: Draws
    """On the device, but for the positions."""
    scored: list[int]
    """Rows that want log-probabilities."""
    at: torch.Tensor
    """The same on the device."""
    alternatives: int
    """Most that any of them wants."""

    @classmethod
    def of(cls, rows: SequenceOf[Sequence], device: Device) -> _Batch:
        params = [sequence.sampling for sequence in rows]
        scored = [i for i, one in enumerate(params) if one.logprobs >= 0]
        host = Draws.of(
            [0.0 if is_greedy(one) else one.temperature for one in params],
            [one.top_k for one in params],
            [one.top_p for one in params],
            [one.min_p for one in params],
            [one.seed for one in params],
            [0] * len(rows),
        )
        *fields, at = upload(
            device,
            *(getattr(host, name) for name in Draws.__dataclass_fields__),
            torch.tensor(scored, dtype=torch.int64),
        )
        return cls(
            rows=rows,
            adjusted=[i for i, one in enumerate(params) if adjusts_logits(one)],
            draws=Draws(*fields),
            scored=scored,
            at=at,
            alternatives=max((one.logprobs for one in params), default=-1),
        )


class DeviceSampler:
    """``TokenSampler`` for logits on ``device``. Keeps the parameters of the last batch."""

    def __init__(self, vocab_size: int, device: Device, stream: Stream) -> None:
        """``stream``: the calling thread's, in which the logits are made."""
        self._vocab_size = vocab_size
        self._device = device
        self._stream = stream
        self._batch: _Batch | None = None

    def draw(
        self, logits: torch.Tensor, sequences: SequenceOf[Sequence]
    ) -> tuple[list[int], list[Logprob | None]]:
        batch = self._batch
        if batch is None or batch.rows != sequences:
            batch = self._batch = _Batch.of(sequences, self._device)
        position, *adjustments = upload(
            self._device,
            torch.tensor([len(sequence.tokens) for sequence in sequences], dtype=torch.int64),
            *self._adjustments(batch),
        )
        raw = logits
        if batch.scored and (adjustments or len(batch.scored) < len(sequences)):
            raw = logits.index_select(0, batch.at)
        if adjustments:
            _adjust(logits.view(-1), *adjustments)
        tokens = sample(logits, replace(batch.draws, position=position))
        results: list[Logprob | None] = [None] * len(sequences)
        if not batch.scored:
            (host,) = download(self._device, self._stream, tokens)
            return host.tolist(), results
        # A row that cannot be drawn has no token: any will do.
        chosen = tokens.index_select(0, batch.at).clamp(min=0)
        host, *scores = download(
            self._device, self._stream, tokens, *self._scores(raw, chosen, batch.alternatives)
        )
        drawn: list[int] = host.tolist()
        wanted = [sequences[i].sampling.logprobs for i in batch.scored]
        found = logprobs_of([drawn[i] for i in batch.scored], wanted, *scores)
        for i, one in zip(batch.scored, found, strict=True):
            results[i] = one
        return drawn, results

    def score(
        self, logits: torch.Tensor, tokens: SequenceOf[int], alternatives: int
    ) -> list[Logprob]:
        (chosen,) = upload(self._device, torch.tensor(tokens, dtype=torch.int64))
        scores = self._scores(logits, chosen, alternatives)
        host = download(self._device, self._stream, *scores)
        return logprobs_of(tokens, [alternatives] * len(tokens), *host)

    def warm_up(self) -> None:
        """Run each kernel once."""
        logits = torch.zeros(1, self._vocab_size, device=self._device.place)
        one = Draws.of([1.0], [1], [1.0], [0.0], [0], [0])
        sample(logits, one.on(self._device.place))
        log_sum(logits)

    def _adjustments(self, batch: _Batch) -> list[torch.Tensor]:
        """``Adjustments`` of all rows one behind the other, with the tokens' places in
        ``[rows * vocab]``; nothing if there are none.
        """
        vocab, parts = self._vocab_size, []
        for row in batch.adjusted:
            one = Adjustments.of(batch.rows[row], vocab)
            if one.tokens.size:
                parts.append((row * vocab + one.tokens, one.bias, one.penalty, one.minus))
        return [torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True)]

    def _scores(
        self, raw: torch.Tensor, chosen: torch.Tensor, alternatives: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities of ``chosen``; ids and log-probabilities of the most likely tokens."""
        sums = log_sum(raw).unsqueeze(1)
        count = min(max(alternatives, 0), raw.shape[1])
        ids = torch.zeros(raw.shape[0], 0, dtype=torch.int64, device=raw.device)
        if count:
            rows = range(0, raw.shape[0], _ROWS_RANKED)
            ids = torch.cat([most_likely(raw[i : i + _ROWS_RANKED], count) for i in rows])

        def scored(ids: torch.Tensor) -> torch.Tensor:
            return (raw.gather(1, ids).double() - sums).float()

        return scored(chosen.long().unsqueeze(1)).squeeze(1), ids, scored(ids)


def _adjust(
    logits: torch.Tensor,
    at: torch.Tensor,
    bias: torch.Tensor,
    penalty: torch.Tensor,
    minus: torch.Tensor,
) -> None:
    """See ``Adjustments``; no place is named twice."""
    values = logits.index_select(0, at).add_(bias)
    values = torch.where(values > 0, values / penalty, values * penalty)
    logits.index_copy_(0, at, values.sub_(minus))
