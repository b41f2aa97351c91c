"""One choice's output: from a router's deltas to text, log-probabilities and an end. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.stops import StopMatcher
from gateway.text import Detokenizer
from mesh.messages import Delta, FinishReason, Logprob


class Entry(msgspec.Struct, frozen=True):
    """A token's log-probability and where its text begins in the choice's text."""

    logprob: Logprob
    offset: int


class Piece(msgspec.Struct, frozen=True):
    """What a choice gained. ``finish`` is set on its last piece."""

    choice: int
    text: str
    entries: Sequence[Entry] = ()
    finish: FinishReason | None = None


class Choice:
    """Turns deltas into pieces: whole characters, stop strings cut off, log-probs with the text.

    ``done`` after the last piece. ``stopped``: ended by a stop string, which the router does not
    know of: the caller must cancel the sequence. ``tokens``: tokens that the model produced, the
    stop token included. ``offset``: where the output begins in the text that the client sees.
    """

    __slots__ = (
        "_detokenizer",
        "_matcher",
        "_min_tokens",
        "_offset",
        "_pending",
        "_shown",
        "_want_entries",
        "cached_tokens",
        "done",
        "index",
        "logprob_sum",
        "prompt_logprobs",
        "stopped",
        "tokens",
    )

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        entries: bool = False,
        offset: int = 0,
    ) -> None:
        self.index = index
        self.tokens = 0
        self.cached_tokens = 0
        self.prompt_logprobs: Sequence[Logprob | None] = ()
        self.logprob_sum = 0.0
        self.done = False
        self.stopped = False
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include=include_stop) if stops else None
        self._min_tokens = min_tokens
        self._want_entries = entries
        self._pending: list[Entry] = []
        self._offset = offset  # where the next token's text begins
        self._shown = offset  # where the next shown character goes

    def feed(self, delta: Delta) -> Piece | None:
        """The piece that ``delta`` completes, or None while it shows nothing yet.

        Must not be called once ``done``. ``delta.finish`` is "stop", "length" or None.
        """
        assert not self.done
        if delta.cached_tokens:
            self.cached_tokens = delta.cached_tokens
        if delta.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs
        text = ""
        for i, token in enumerate(delta.tokens):
            self.tokens += 1
            if delta.logprobs:
                self.logprob_sum += delta.logprobs[i].logprob
                if self._want_entries:
                    self._pending.append(Entry(delta.logprobs[i], self._offset))
            new = self._detokenizer.feed(token)
            self._offset += len(new)
            text += self._match(new)
            if self.stopped:
                break
        finish = delta.finish
        if self.stopped:
            finish = "stop"
            end = self._shown + len(text)
            self._pending = [entry for entry in self._pending if entry.offset < end]
        elif finish is not None:
            if delta.stop_token >= 0:
                self.tokens += 1
            text += self._match(self._detokenizer.flush())
            if self._matcher is not None and not self.stopped:
                text += self._matcher.flush()
            if self.stopped:
                finish = "stop"
        if finish is None and not text:
            return None
        self._shown += len(text)
        self.done = finish is not None
        entries, self._pending = self._pending, []
        return Piece(self.index, text, entries, finish)

    def _match(self, text: str) -> str:
        if self._matcher is None or self.tokens <= self._min_tokens:
            return text
        shown = self._matcher.feed(text)
        self.stopped = self._matcher.matched is not None
        return shown
