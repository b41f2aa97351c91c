"""The whole model in one process, over the same code path as the mesh: what the mesh must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from moe_model.experts import ExpertClient, LocalExperts
from moe_model.forward import forward, run_to_end
from moe_model.kv_cache import KVCache
from moe_model.model import RouterModel, Weights, load_router_model
from moe_model.plan import Chunk

_BLOCK_SIZE = 16
_PREFILL_TOKENS = 512


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
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        ignore_eos: bool = False,
    ) -> Iterator[int]:
        """Yield up to ``max_tokens`` tokens after the prompt, until an end-of-sequence token or the
        end of the context. ``temperature`` 0 takes the most likely token.
        """
        max_tokens = min(max_tokens, self.model.spec.max_context - len(token_ids))
        if max_tokens < 1:
            return
        kv, table = self._cache(len(token_ids) + max_tokens)
        generator = torch.Generator().manual_seed(seed)
        stop = () if ignore_eos else self.model.spec.eos_token_ids
        with torch.inference_mode():
            for hidden in self._prefill(token_ids, kv, table):
                last = hidden[-1:]
        for position in range(len(token_ids), len(token_ids) + max_tokens):
            with torch.inference_mode():
                token = _draw(self.model.logits(last)[0], temperature, top_p, generator)
            if token in stop:
                return
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


def _draw(
    logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator
) -> int:
    """A token from ``logits [vocab]``: nucleus sampling (arXiv 1904.09751), or greedy at 0."""
    if temperature == 0.0:
        return int(logits.argmax())
    probs, order = torch.softmax(logits / temperature, -1).sort(descending=True)
    # A token stays while those before it hold less than top_p; the first always does.
    probs[probs.cumsum(-1) - probs >= top_p] = 0.0
    return int(order[torch.multinomial(probs, 1, generator=generator)])
