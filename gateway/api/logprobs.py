"""Log-probabilities in the two shapes that OpenAI's endpoints give them. Pure.

Values are passed on bit for bit: clients call a token greedy when its value equals the largest
of its dict, so the token itself is always in the dict.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.output import Entry
from gateway.text import Tokenizer
from mesh.messages import Logprob

_FLOOR = -9999.0  # JSON has no infinity


class LegacyLogprobs(msgspec.Struct):
    """Of ``/v1/completions``: lists with one item per token; a prompt's first token has None."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def extend(self, other: LegacyLogprobs) -> None:
        """Append ``other``'s tokens."""
        self.text_offset += other.text_offset
        self.token_logprobs += other.token_logprobs
        self.tokens += other.tokens
        self.top_logprobs += other.top_logprobs


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """Of ``/v1/chat/completions``: one per token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


def legacy(entries: Sequence[Entry], tokenizer: Tokenizer, top: int) -> LegacyLogprobs:
    """``entries`` as lists; each dict holds the ``top`` most likely tokens and the token itself."""
    found = LegacyLogprobs([], [], [], [])
    for entry in entries:
        text = tokenizer.token_text(entry.logprob.token)
        found.text_offset.append(entry.offset)
        found.token_logprobs.append(_finite(entry.logprob.logprob))
        found.tokens.append(text)
        found.top_logprobs.append(_dict(entry.logprob, tokenizer, top))
    return found


def legacy_prompt(
    prompt: Sequence[int],
    text: str,
    logprobs: Sequence[Logprob | None],
    tokenizer: Tokenizer,
    top: int,
    *,
    special_tokens_shown: bool,
) -> LegacyLogprobs:
    """A prompt's tokens for ``echo``; offsets count in ``text``, which is echoed.

    ``special_tokens_shown``: whether special tokens are part of that text.
    """
    found = LegacyLogprobs([], [], [], [])
    detokenizer = tokenizer.detokenizer((), skip_special_tokens=not special_tokens_shown)
    pieces = [detokenizer.feed(token) for token in prompt]
    spelled = "".join(pieces) + detokenizer.flush()
    # SentencePiece writes a space before the first word that is not in the text.
    offset = len(text) - len(spelled) if spelled.endswith(text) else 0
    for token, piece, logprob in zip(prompt, pieces, logprobs, strict=True):
        found.text_offset.append(max(0, offset))
        found.tokens.append(tokenizer.token_text(token))
        found.token_logprobs.append(None if logprob is None else _finite(logprob.logprob))
        found.top_logprobs.append(None if logprob is None else _dict(logprob, tokenizer, top))
        offset += len(piece)
    return found


def chat(entries: Sequence[Entry], tokenizer: Tokenizer, top: int) -> list[ChatLogprob]:
    """``entries`` as objects, each with its ``top`` most likely tokens."""
    return [
        ChatLogprob(
            tokenizer.token_text(entry.logprob.token),
            _finite(entry.logprob.logprob),
            list(tokenizer.token_bytes(entry.logprob.token)),
            [
                TopLogprob(
                    tokenizer.token_text(token),
                    _finite(logprob),
                    list(tokenizer.token_bytes(token)),
                )
                for token, logprob in entry.logprob.top[:top]
            ],
        )
        for entry in entries
    ]


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR)


def _dict(logprob: Logprob, tokenizer: Tokenizer, top: int) -> dict[str, float]:
    # Two tokens may spell the same text; the likelier one keeps the place, so that the largest
    # value of the dict is the largest of all.
    found: dict[str, float] = {}
    for token, value in (*logprob.top[:top], (logprob.token, logprob.logprob)):
        text = tokenizer.token_text(token)
        found[text] = max(found.get(text, _FLOOR), _finite(value))
    return found
