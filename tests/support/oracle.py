"""The independent reference: transformers, in fp32, one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_model.reference import ReferenceModel


@dataclass(frozen=True)
class Continuation:
    """Greedy tokens and, for each, the log-probabilities of the whole vocabulary."""

    tokens: list[int]
    logprobs: torch.Tensor  # [steps, vocab]


class Oracle:
    """Our own model makes a guess, so that transformers is asked for all tokens at once whether it
    would choose each of them; if not, it is asked for one after another.
    """

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._guesser = ReferenceModel(path, weights="fp32")
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, prompt: list[int]) -> torch.Tensor:
        """``[tokens, vocab]``."""
        return torch.as_tensor(self.model(torch.tensor([prompt])).logits[0])

    @torch.inference_mode()
    def greedy(self, prompt: list[int], steps: int) -> Continuation:
        guess = list(self._guesser.generate(prompt, steps, ignore_eos=True))
        logits = self.logits([*prompt, *guess[:-1]])[len(prompt) - 1 :]
        if logits.argmax(-1).tolist() == guess:
            return Continuation(guess, logits.log_softmax(-1))
        return self._one_by_one(prompt, steps)

    def _one_by_one(self, prompt: list[int], steps: int) -> Continuation:
        tokens: list[int] = []
        rows: list[torch.Tensor] = []
        ids, past = torch.tensor([prompt]), None
        for _ in range(steps):
            answer = self.model(ids, past_key_values=past, use_cache=True)
            past = answer.past_key_values
            row = answer.logits[0, -1]
            rows.append(row.log_softmax(-1))
            tokens.append(int(row.argmax()))
            ids = torch.tensor([[tokens[-1]]])
        return Continuation(tokens, torch.stack(rows))
