"""Stop strings in streamed text, wherever token borders fall. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class _Stop:
    """One stop string, matched character by character in time linear in the text, whatever both
    are (Knuth, Morris and Pratt 1977).

    ``length``: how much of the text's end is a beginning of the stop string.
    """

    __slots__ = ("_borders", "length", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        # _borders[i]: the longest proper beginning of text[:i + 1] that is also its end.
        self._borders = [0]
        border = 0
        for char in text[1:]:
            border = self._extend(border, char)
            self._borders.append(border)

    def _extend(self, length: int, char: str) -> int:
        while length and self.text[length] != char:
            length = self._borders[length - 1]
        return length + 1 if self.text[length] == char else 0

    def feed(self, char: str) -> bool:
        """Take the next character; True when it completes the stop string."""
        self.length = self._extend(self.length, char)
        return self.length == len(self.text)


class StopMatcher:
    """Finds the stop string that completes first; holds back text that may begin one.

    Deciding by completion makes the result the same however the text is cut into pieces.
    ``stops``: not empty ones. ``include``: whether the stop string itself belongs to the output.
    After a match ``matched`` is the stop string and nothing more may be fed.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        # Of two that complete together, the one that began first.
        self._stops = [_Stop(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take new text and return what may be shown now."""
        assert self.matched is None, "text after a stop string"
        before = len(self._held)
        text = self._held + text
        for end in range(before, len(text)):
            char = text[end]
            completed = [stop.text for stop in self._stops if stop.feed(char)]
            if completed:
                self.matched = completed[0]
                self._held = ""
                return text[: end + 1 - (0 if self._include else len(completed[0]))]
        held = max((stop.length for stop in self._stops), default=0)
        shown = len(text) - held
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The sequence ended otherwise: what was held back is ordinary text."""
        text, self._held = self._held, ""
        return text
