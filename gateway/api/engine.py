"""What the endpoints work with: the model being served and the way into the mesh."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from gateway.admission import Admission
from gateway.api.prompts import check_ids
from gateway.api.sampling import Defaults
from gateway.chat import ChatTemplate
from gateway.errors import InvalidValue, ModelNotFound
from gateway.meters import Meters
from gateway.pool import Pool, Spawn
from gateway.text import Tokenizer

_THREAD_CHARS = 16_384
"""A longer text takes milliseconds to tokenize: another thread does it."""


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
                f"The model {name!r} does not exist; this mesh serves {self.id!r}.", param="model"
            )


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The model, the mesh and the limits that requests meet."""

    model: ServedModel
    pool: Pool
    admission: Admission
    meters: Meters
    spawn: Spawn
    max_body_bytes: int
    request_timeout_s: float
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="tokenize")
    )

    def random_seed(self) -> int:
        """A seed for a request that has none."""
        return secrets.randbits(63)

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``; a long one is tokenized on another thread."""
        encode = self.model.tokenizer.encode
        if len(text) < _THREAD_CHARS:
            return encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: encode(text, add_special_tokens=add_special_tokens)
        )

    async def prompt_ids(
        self, prompt: str | list[int], name: str, *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        """A prompt as ids of the model's vocabulary; raises ``InvalidValue`` naming ``name``."""
        if isinstance(prompt, str):
            ids: Seq[int] = await self.tokenize(prompt, add_special_tokens=add_special_tokens)
            if not ids:
                raise InvalidValue(f"{name} has no tokens.", param=name)
        else:
            check_ids(prompt, self.model.vocab_size, name)
            ids = prompt
        return tuple(ids)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
