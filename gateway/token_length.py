"""How much text one token can stand for: what tells a hopeless prompt without tokenizing it.

Only tokenizers known to keep every character of a text have such a bound. Others may drop
whitespace, or turn any number of characters into one unknown token.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from gateway.byte_level import BYTE_OF_CHAR

_SPACE_MARK = "\u2581"
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "Prepend"})
"""Normalizers and pre-tokenizers that drop no character whatever their options."""


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Most characters of a text that one token stands for; None where that is not known.

    A text of ``n`` characters has at least ``n / longest_token`` tokens.
    """
    model = tokenizer.model
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    parts = [*_parts(tokenizer.normalizer), *_parts(tokenizer.pre_tokenizer)]
    added = tokenizer.get_added_tokens_decoder().values()
    whole = (
        isinstance(model, BPE)
        and _spells_all(model, vocab, {part["type"] for part in parts})
        and all(_keeps(part) for part in parts)
        # Such a token takes the whitespace beside it, however much there is.
        and not any(token.lstrip or token.rstrip for token in added)
    )
    # A token's spelling has at least as many characters as the text that it stands for.
    return max(map(len, vocab)) if whole and vocab else None


def _spells_all(model: BPE, vocab: Container[str], kinds: Container[str]) -> bool:
    """Whether every byte has a token of its own, so that no character is unknown."""
    if "ByteLevel" in kinds:
        return all(char in vocab for char in BYTE_OF_CHAR)
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))


def _keeps(part: dict[str, Any]) -> bool:
    match part["type"]:
        case "Split":
            return bool(part["behavior"] != "Removed")
        case "Replace":
            return bool(part["pattern"] == {"String": " "} and part["content"] == _SPACE_MARK)
        case kind:
            return kind in _KEEPING


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """The JSON of each step of a normalizer or pre-tokenizer."""
    if component is not None:
        # The pickle state is the component's JSON.
        yield from _flat(json.loads(component.__getstate__()))


def _flat(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state["type"] == "Sequence":
        for part in state.get("normalizers", state.get("pretokenizers", ())):
            yield from _flat(part)
    else:
        yield state
