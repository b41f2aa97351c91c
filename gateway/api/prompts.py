"""The legacy ``prompt`` field: text, token ids, or lists of either. Pure."""

from __future__ import annotations

from typing import Any

from gateway.errors import InvalidType, InvalidValue, shown


def split_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """Each prompt as a text or a list of token ids.

    Raises ``InvalidType`` or ``InvalidValue`` naming the place.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidValue("prompt must not be an empty list.", param="prompt")
    first = prompt[0]
    if isinstance(first, str):
        return [_text(item, i) for i, item in enumerate(prompt)]
    if isinstance(first, list):
        return [_ids(item, f"prompt[{i}]") for i, item in enumerate(prompt)]
    return [_ids(prompt, "prompt")]


def check_ids(ids: list[int], vocab_size: int, name: str) -> None:
    """Raise ``InvalidValue`` when an id is outside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidValue(
            f"{name}: token id {shown(wrong)} is not in the vocabulary (0 to {vocab_size - 1}).",
            param=name,
        )


def _text(item: Any, i: int) -> str:
    if not isinstance(item, str):
        raise InvalidType(
            f"prompt[{i}]: expected a string like prompt[0], got {type(item).__name__}.",
            param=f"prompt[{i}]",
        )
    return item


def _ids(item: Any, where: str) -> list[int]:
    # bool is an int in Python, not in JSON.
    if not isinstance(item, list) or not all(type(token) is int for token in item):
        raise InvalidType(
            f"{where}: expected a string, a list of strings, token ids or lists of token ids.",
            param=where,
        )
    if not item:
        raise InvalidValue(f"{where}: no tokens in it.", param=where)
    return item
