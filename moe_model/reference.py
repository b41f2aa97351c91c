"""The whole model in one process, over the same code path as the mesh: what the mesh must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mesh.messages import Sampling
from moe_model.experts import ExpertClient, LocalExperts
from moe_model.forward import forward, run_to_end
from moe_model.kv_cache import KVCache
from moe_model.model import RouterModel, Weights, load_router_model
from moe_model.plan import Chunk
from moe_model.sampler import UNDRAWABLE

_BLOCK_SIZE = 16
_PREFILL_TOKENS = 512
_GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class _Row:
    """The one sequence, as the sampler sees it."""

    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len


class ReferenceModel:
    """One sequence at a time, greedily or sampled.

    Raises ``CheckpointError`` when the checkpoint at ``path`` cannot be served. ``progress`` is
    called with the share of the weights that is loaded.
    """

    def __init__(
        self,
        path: Path,
        *,
        weights: Weights = "auto",
        exact: bool = False,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        report = progress or (lambda _share: None)
        self.model: RouterModel = load_router_model(
            path, weights=weights, exact=exact, progress=lambda share: report(share / 2)
        )
        self.experts: ExpertClient = LocalExperts.load(
            path, weights=weights, exact=exact, progress=lambda share: report(0.5 + share / 2)
        )

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits after each token of a prompt, ``[tokens, vocab]`` fp32."""
        kv, table = self._cache(len(token_ids))
        with torch.inference_mode():
            return torch.cat([self.model.logits(h) for h in self._prefill(token_ids, kv, table)])

    def generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        sampling: Sampling = _GREEDY,
        ignore_eos: bool = False,
    ) -> Iterator[int]:
        """Yield up to ``max_tokens`` tokens after the prompt, until an end-of-sequence token or the
        end of the context. Of ``sampling``, what says how to draw is used: the draws are a
        router's for the same logits. Raises ``ArithmeticError`` for logits that are not finite.
        """
        max_tokens = min(max_tokens, self.model.spec.max_context - len(token_ids))
        if max_tokens < 1:
            return
        kv, table = self._cache(len(token_ids) + max_tokens)
        sampler = self.model.sampler()
        row = _Row(list(token_ids), len(token_ids), sampling)
        stop = () if ignore_eos else self.model.spec.eos_token_ids
        with torch.inference_mode():
            for hidden in self._prefill(token_ids, kv, table):
                last = hidden[-1:]
        for position in range(len(token_ids), len(token_ids) + max_tokens):
            with torch.inference_mode():
                (token,), _ = sampler.draw(self.model.logits(last), [row])
            if token == UNDRAWABLE:
                raise ArithmeticError(f"the logits after {position} tokens are not finite")
            if token in stop:
                return
            row.tokens.append(token)
            yield token
            with torch.inference_mode():
                last = self._step(Chunk([token], position, table), kv)

    def _cache(self, tokens: int) -> tuple[KVCache, range]:
        blocks = -(-max(tokens, 1) // _BLOCK_SIZE)
        return self.model.new_kv_cache(blocks, _BLOCK_SIZE), range(blocks)

    def _prefill(
        self, token_ids: Sequence[int], kv: KVCache, table: range
    ) -> Iterator[torch.Tensor]:
        for start in range(0, len(token_ids), _PREFILL_TOKENS):
            piece = list(token_ids[start : start + _PREFILL_TOKENS])
            yield self._step(Chunk(piece, start, table), kv)

    def _step(self, chunk: Chunk, kv: KVCache) -> torch.Tensor:
        plan = self.model.plan([chunk], kv.block_size)
        return run_to_end(forward(self.model, plan, kv, self.experts))
