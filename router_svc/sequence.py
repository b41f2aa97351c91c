"""One sequence: its tokens, what of it is in the KV cache, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from mesh.messages import FinishReason, Logprob, Sampling
from router_svc.blocks import BlockKey, chain_key


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the router. Mutated by the scheduler (blocks, progress) and the engine
    (log-probabilities); everything else only reads it.
    """

    request: str
    owner: bytes
    """Identity of the gateway that asked; empty for the router's own warm-up."""
    trace: str
    prompt_len: int
    tokens: list[int]
    """Prompt and output so far."""
    sampling: Sampling
    stop_ids: frozenset[int]
    """Tokens that end it: its own and, unless ignored, the model's end-of-sequence tokens."""
    priority: int = 0
    """Larger runs first."""
    deadline: float = math.inf
    """On the caller's monotonic clock, in seconds."""
    arrival: int = -1
    """Set by the scheduler: order among equals."""
    num_computed: int = 0
    """Leading tokens whose keys and values are in the cache."""
    block_table: list[int] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    """Chain keys of the leading full blocks of ``tokens``, as far as computed."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)
    started: bool = False
    """Its first delta has been sent."""
    queued_at: float = 0.0
    """On the caller's monotonic clock: when it was queued, when its first tokens were scheduled and
    when its first token was drawn; 0 before."""
    begun_at: float = 0.0
    first_at: float = 0.0
    admitted: bool = False

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def final_cached_len(self) -> int:
        """Most tokens it will ever hold in the cache: the last one drawn is never written."""
        return max(len(self.tokens), self.prompt_len + self.sampling.max_tokens - 1)

    @property
    def num_prompt_logprobs(self) -> int:
        """Entries that ``prompt_logprobs`` has when complete."""
        return self.prompt_len if self.sampling.prompt_logprobs >= 0 else 0

    def full_block_keys(self, block_size: int, num_tokens: int) -> list[BlockKey]:
        """Chain keys of the full blocks within the first ``num_tokens`` tokens."""
        count = num_tokens // block_size
        keys = self.keys
        while len(keys) < count:
            start = len(keys) * block_size
            keys.append(
                chain_key(keys[-1] if keys else b"", self.tokens[start : start + block_size])
            )
        return keys[:count]

    def append(self, token: int) -> tuple[FinishReason | None, int]:
        """Take a drawn token. Returns why the sequence ends, if it does, and the stop token.

        A stop token is not part of the output.
        """
        if token in self.stop_ids and self.num_output >= self.sampling.min_tokens:
            return "stop", token
        self.tokens.append(token)
        return ("length" if self.num_output >= self.sampling.max_tokens else None), -1


def stop_ids(sampling: Sampling, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """What ends a sequence with this sampling, for a model with these end-of-sequence tokens."""
    own = frozenset(sampling.stop_token_ids)
    return own if sampling.ignore_eos else own.union(eos_token_ids)
