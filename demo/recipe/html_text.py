"""Running text of an HTML page."""

from __future__ import annotations

import re
from html.parser import HTMLParser

BLOCKS = (
    "p", "li", "tr", "h1", "h2", "h3", "h4", "h5", "div", "dt", "dd", "blockquote", "table", "ul",
    "ol", "center", "pre",
)  # fmt: skip
HIDDEN = ("script", "style", "svg", "head")


class _TextParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden = 0  # depth of elements whose text is not shown
        self._preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        if tag in HIDDEN:
            self._hidden += 1
        if tag == "pre":
            self._preformatted += 1
        if tag == "li":
            self.parts.append("\n\n* ")
        elif tag in BLOCKS:
            self.parts.append("\n\n")
        elif tag == "br":
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in HIDDEN:
            self._hidden = max(0, self._hidden - 1)
        if tag == "pre":
            self._preformatted = max(0, self._preformatted - 1)
        if tag in BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data if self._preformatted else re.sub(r"\s+", " ", data))


def html_to_text(page: str) -> str:
    """Text of ``page``: an empty line between blocks, "* " before list items, <pre> kept as is."""
    parser = _TextParser()
    parser.feed(page)
    return "".join(parser.parts)
