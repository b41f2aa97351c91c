"""Text to tokens and back: the checkpoint's tokenizer and incremental detokenisation.

Only ``tokenizers`` is used; no ``transformers``.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from gateway.byte_level import BYTE_OF_CHAR
from gateway.token_length import longest_token
from moe_model.errors import CheckpointError
from moe_model.text_files import read_tokenizer, read_tokenizer_config

_SPACE_MARK = "\u2581"  # SentencePiece writes a space as this
_TABLE_LIMIT = 65_536
_WINDOW_CONTEXT = 6
_MAX_CHARACTER_BYTES = 4
_LONG = 4096


class TokenizerError(Exception):
    """The checkpoint's tokenizer files cannot be used; the gateway does not start."""


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text, piece by piece."""

    def feed(self, token: int) -> str:
        """The text that ``token`` completes; never half a character."""
        ...

    def flush(self) -> str:
        """What is still held at the end: an unfinished character becomes U+FFFD."""
        ...


class Tokenizer:
    """A checkpoint's ``tokenizer.json`` and ``tokenizer_config.json``.

    ``config``: the parsed ``tokenizer_config.json``, special tokens reduced to strings.
    ``longest_token``: as ``token_length.longest_token`` finds it.
    """

    def __init__(self, path: Path) -> None:
        """Read the files under ``path``; raises ``TokenizerError`` naming the file."""
        try:
            self._tokenizer = read_tokenizer(path)
            self.config = read_tokenizer_config(path)
        except CheckpointError as error:
            raise TokenizerError(str(error)) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._added = {id_: token.content for id_, token in added.items()}
        self._bytes: dict[int, bytes] = {}
        self._alphabet = _alphabet(self._tokenizer.decoder)
        self.longest_token = longest_token(self._tokenizer)

    @staticmethod
    def takes_long(value: str | Sequence[int]) -> bool:
        """Whether ``encode`` or ``decode`` of ``value`` takes milliseconds.

        Those release the interpreter, so that another thread can do it.
        """
        return len(value) > _LONG

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``."""
        if self.takes_long(text):
            # A batch, even of one, is encoded without the interpreter's lock; one text is not.
            batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return batch[0].ids
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of whole ``ids``. Raises ``OverflowError`` for ids that are no 32-bit number."""
        if self.takes_long(ids):
            return self._tokenizer.decode_batch(
                [list(ids)], skip_special_tokens=skip_special_tokens
            )[0]
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, id_: int) -> str:
        """The vocabulary's own spelling of ``id_``, or "" if it has none."""
        return self._tokenizer.id_to_token(id_) or ""

    def is_special(self, id_: int) -> bool:
        return id_ in self._special

    def token_bytes(self, id_: int) -> bytes:
        """The UTF-8 bytes that ``id_`` stands for within a text; may be part of a character."""
        known = self._bytes.get(id_)
        if known is None:
            known = self._spell(id_)
            if len(self._bytes) < _TABLE_LIMIT:
                self._bytes[id_] = known
        return known

    def token_text(self, id_: int) -> str:
        r"""``token_bytes`` as text; OpenAI's ``bytes:\xNN`` form when they are no whole text."""
        raw = self.token_bytes(id_)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """A detokenizer for what follows ``prompt``."""
        if self._alphabet == "other":
            return _WindowDetokenizer(self, prompt, skip_special_tokens=skip_special_tokens)
        return _ByteDetokenizer(self, skip_special_tokens=skip_special_tokens)

    def _spell(self, id_: int) -> bytes:
        content = self._added.get(id_)
        if content is not None:
            return content.encode()
        token = self._tokenizer.id_to_token(id_)
        if token is None:
            return b""
        if self._alphabet == "byte_level":
            try:
                return bytes([BYTE_OF_CHAR[char] for char in token])
            except KeyError:
                return token.encode()
        if self._alphabet == "sentencepiece":
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace(_SPACE_MARK, " ").encode()
        return self._tokenizer.decode([id_], skip_special_tokens=False).encode()


def _alphabet(decoder: Any) -> str:
    """How tokens spell bytes: "byte_level", "sentencepiece" or "other"."""
    if decoder is None:
        return "other"
    # The decoder's pickle state is its JSON: all of it, without the vocabulary.
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return "byte_level"
    marks = any(
        part["type"] == "Replace" and part["pattern"].get("String") == _SPACE_MARK for part in parts
    )
    if marks or "Metaspace" in kinds:
        return "sentencepiece"
    return "other"


class _ByteDetokenizer:
    """For vocabularies whose tokens are bytes: exact, and constant work a token."""

    __slots__ = ("_bytes", "_decoder", "_skipped")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._bytes = tokenizer.token_bytes
        self._skipped = tokenizer.is_special if skip_special_tokens else None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        if self._skipped is not None and self._skipped(token):
            return ""
        return self._decoder.decode(self._bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowDetokenizer:
    """For any other decoder: decode a window of recent tokens, show what it gained.

    The window begins with a few tokens already shown, because a decoder may treat the
    first token of a text differently (a dropped space), and moves on once its text is whole.
    """

    __slots__ = ("_held", "_ids", "_shown", "_skip", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt[-_WINDOW_CONTEXT:])
        self._shown = self._decode()
        self._held = 0

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)

    def feed(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode()
        if len(text) <= len(self._shown):
            return ""
        if text.endswith("\ufffd") and self._held < _MAX_CHARACTER_BYTES:
            self._held += 1  # probably part of a character
            return ""
        self._held = 0
        new = text[len(self._shown) :]
        if len(self._ids) > 2 * _WINDOW_CONTEXT:
            self._ids = self._ids[-_WINDOW_CONTEXT:]
            text = self._decode()
        self._shown = text
        return new

    def flush(self) -> str:
        text = self._decode()
        new, self._shown = text[len(self._shown) :], text
        return new
