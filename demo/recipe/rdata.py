"""Character vectors out of an R package's lazy-load database (.rdb)."""

from __future__ import annotations

import lzma
import struct
import zlib
from collections.abc import Iterator

STRING_VECTOR = 16  # SEXP type of a character vector


def _int32(blob: bytes, at: int) -> int:
    value: int = struct.unpack_from(">i", blob, at)[0]
    return value


def objects(database: bytes) -> Iterator[bytes]:
    """The serialised objects of a database, decompressed.

    Each one follows a 4-byte length. A "Z" marks xz data; without a mark it is zlib.
    """
    position = 0
    while position + 5 < len(database):
        if database[position + 4 : position + 5] == b"Z":
            xz = lzma.LZMADecompressor()
            blob = xz.decompress(database[position + 5 :])
            rest = xz.unused_data
        else:
            deflate = zlib.decompressobj()
            blob = deflate.decompress(database[position + 4 :])
            rest = deflate.unused_data
        yield blob
        position = len(database) - len(rest)


def strings(blob: bytes) -> list[str] | None:
    """The character vector that ``blob`` serialises (XDR format), or None if it is another type."""
    if not blob.startswith(b"X\n"):
        return None
    position = 14  # past the format mark and three version numbers
    if _int32(blob, 2) == 3:
        position += 4 + _int32(blob, 14)  # version 3 names the native encoding
    if blob[position + 3] != STRING_VECTOR:
        return None
    count = _int32(blob, position + 4)
    position += 8
    vector = []
    for _ in range(count):
        length = _int32(blob, position + 4)  # -1 stands for NA
        position += 8
        text = blob[position : position + max(length, 0)]
        vector.append(text.decode("utf-8", "replace"))
        position += len(text)
    return vector
