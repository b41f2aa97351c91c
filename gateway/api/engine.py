"""What the endpoints work with: the model being served and the way into the mesh."""

from __future__ import annotations

import asyncio
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
from gateway.errors import ContextTooLong, InvalidValue, ModelNotFound
from gateway.meters import Meters
from gateway.pool import Pool, Spawn
from gateway.text import Tokenizer

T = TypeVar("T")


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
        """Token ids of ``text``."""
        encode = self.model.tokenizer.encode
        return await self._compute(
            text, lambda: encode(text, add_special_tokens=add_special_tokens)
        )

    async def detokenize(self, ids: Seq[int]) -> str:
        """Text of ``ids``, special tokens included; raises as ``Tokenizer.decode``."""
        return await self._compute(ids, lambda: self.model.tokenizer.decode(ids))

    async def spell(self, ids: Seq[int]) -> list[str]:
        """The vocabulary's spelling of each id."""
        token = self.model.tokenizer.token
        return await self._compute(ids, lambda: [token(id_) for id_ in ids])

    async def _compute(self, value: str | Seq[int], work: Callable[[], T]) -> T:
        """Run ``work`` over ``value``: here, or on another thread where it takes long."""
        if not self.model.tokenizer.takes_long(value):
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

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
        self._thread.shutdown(wait=False, cancel_futures=True)
