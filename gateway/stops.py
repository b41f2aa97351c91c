"""Stop strings in streamed text, wherever token borders fall. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the stop string that completes first; holds back text that may begin one.

    Deciding by completion makes the result the same however the text is cut into pieces.
    ``include``: whether the stop string itself belongs to the output.
    After a match ``matched`` is the stop string and nothing more may be fed.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take new text and return what may be shown now."""
        assert self.matched is None, "text after a stop string"
        if not self._stops or not text:
            return text
        text = self._held + text
        # (end, start): of two that complete together, the one that began first.
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[:end] if self._include else text[:start]
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                self._held = tail
                return text[:start]
        self._held = ""
        return text

    def flush(self) -> str:
        """The sequence ended otherwise: what was held back is ordinary text."""
        text, self._held = self._held, ""
        return text
