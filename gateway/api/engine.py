"""What the endpoints work with: the model being served and the way into the mesh."""

from __future__ import annotations

import asyncio
import ctypes
import secrets
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from gateway.admission import Admission
from gateway.api.prompts import check_ids
from gateway.api.sampling import Defaults
from gateway.chat import ChatTemplate
from gateway.errors import ContextTooLong, InvalidValue, ModelNotFound, shown
from gateway.meters import Meters
from gateway.pool import Pool, Spawn
from gateway.text import Tokenizer

T = TypeVar("T")

_MUCH = 65_536
"""Bytes or characters that take tens of milliseconds to go through."""
_LEAST_TEXT = 262_144
_CHARACTERS_A_TOKEN = 16
"""Texts of more characters for each token of the context are not tokenized: it takes a hundred
bytes and more for each character."""
_TRIM: Callable[[int], int] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
"""glibc's: gives free memory back to the system."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The one model of this mesh, as far as clients see it.

    ``vocab_size``: ids that the model takes, which may be more than the tokenizer has tokens for.
    ``context``: most tokens of prompt and output together.
    """

    id: str
    root: str
    created: int
    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocab_size: int
    context: int
    defaults: Defaults

    def check_name(self, name: str | None) -> None:
        """Raise ``ModelNotFound`` unless ``name`` is this model, or none was given."""
        if name is not None and name != self.id:
            raise ModelNotFound(
                f"The model {shown(name)!r} does not exist; this mesh serves {self.id!r}.",
                param="model",
            )


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The model, the mesh and the limits that requests meet.

    ``one_tenant``: whether all clients are one.
    """

    model: ServedModel
    pool: Pool
    admission: Admission
    meters: Meters
    spawn: Spawn
    max_body_bytes: int
    request_timeout_s: float
    one_tenant: bool
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="tokenize")
    )

    def random_seed(self) -> int:
        """A seed for a request that has none."""
        return secrets.randbits(63)

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``; raises ``ContextTooLong`` for one that is longer than any use."""
        self._check_length(text, "characters")
        encode = self.model.tokenizer.encode
        return await self._compute(
            text, lambda: encode(text, add_special_tokens=add_special_tokens)
        )

    async def detokenize(self, ids: Seq[int]) -> str:
        """Text of ``ids``, special tokens included; raises as ``Tokenizer.decode``, and
        ``ContextTooLong`` for more than any use.
        """
        self._check_length(ids, "tokens")
        return await self._compute(ids, lambda: self.model.tokenizer.decode(ids))

    async def spell(self, ids: Seq[int]) -> list[str]:
        """The vocabulary's spelling of each id."""
        token = self.model.tokenizer.token
        return await self._compute(ids, lambda: [token(id_) for id_ in ids])

    async def off_loop(self, body: bytes, work: Callable[[], T]) -> T:
        """Run ``work`` over what ``body`` holds: here, or on another thread where it is much, so
        that other requests' tokens go on meanwhile.
        """
        if len(body) <= _MUCH:
            return work()
        return await self._on_thread(work, trim=True)

    def _check_length(self, value: str | Seq[int], what: str) -> None:
        most = max(_LEAST_TEXT, _CHARACTERS_A_TOKEN * self.model.context)
        if len(value) > most:
            raise ContextTooLong(f"{len(value)} {what} are more than the {most} that are taken.")

    async def _compute(self, value: str | Seq[int], work: Callable[[], T]) -> T:
        """The same for tokenizing ``value``."""
        if not self.model.tokenizer.takes_long(value):
            return work()
        return await self._on_thread(work, trim=len(value) > _MUCH)

    async def _on_thread(self, work: Callable[[], T], *, trim: bool) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            if trim:
                # What the tokenizer took for a moment would else stay with the process.
                self._threads.submit(_TRIM, 0)

    async def prompt_ids(
        self, prompt: str | list[int], name: str, *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        """A prompt as ids of the model's vocabulary.

        Raises ``InvalidValue`` naming ``name``, or ``ContextTooLong`` for a text that cannot
        fit, without tokenizing it.
        """
        if isinstance(prompt, str):
            longest, context = self.model.tokenizer.longest_token, self.model.context
            if longest is not None and len(prompt) > context * longest:
                raise ContextTooLong(
                    f"This model's maximum context length is {context} tokens; the prompt's "
                    f"{len(prompt)} characters are more than {len(prompt) // longest}.",
                    param=name,
                )
            ids: Seq[int] = await self.tokenize(prompt, add_special_tokens=add_special_tokens)
            if not ids:
                raise InvalidValue(f"{name} has no tokens.", param=name)
        else:
            check_ids(prompt, self.model.vocab_size, name)
            ids = prompt
        return tuple(ids)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
