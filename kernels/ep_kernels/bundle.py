"""A bundle: one expert as one opaque string of bytes, to travel from memory to memory.

    header (64 bytes)  |  gate_up, padded to 64  |  down, padded to 64

where a matrix with scales is followed by them, padded to 64 as well.
The header says which expert it is, its layout and each matrix's storage and shape; then come the
values exactly as they are kept (see ``ep_kernels.packed``), so that whoever packs them again
computes the same bits. The same expert kept the same way is the same bytes everywhere: its
checksum can be computed where it was first loaded and compared wherever it arrives.
"""

from __future__ import annotations

import hashlib
import struct

import torch

from ep_kernels.bank import KeptExpert
from ep_kernels.packed import Matrix, Storage

CHECKSUM_BYTES = 16

_MAGIC = b"MoEb"
_VERSION = 1
_HEADER = struct.Struct("<4sBB2xII" + 2 * "B3xII" + "24x")
"""Magic, version, whether small, layer, expert; per matrix its storage, rows and columns."""
_ALIGN = 64
"""Of each part: the values can be used where they lie."""


class BundleError(Exception):
    """The bytes are not the bundle that they should be; nothing was made of them.

    Whoever fetched them gets the expert elsewhere; the same bytes will not become right.
    """


def pack_bundle(kept: KeptExpert, layer: int, expert: int) -> torch.Tensor:
    """One expert's bundle, ``[bytes]`` uint8: a copy."""
    header = _header(kept, layer, expert)
    parts = _parts(kept)
    size = len(header) + sum(_padded(part.nbytes) for part in parts)
    bundle = torch.empty(size, dtype=torch.uint8)
    bundle[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    begin = len(header)
    for part in parts:
        end = begin + part.nbytes
        bundle[begin:end].view(part.dtype).copy_(part.view(-1))
        begin += _padded(part.nbytes)
        bundle[end:begin] = 0
    return bundle


def open_bundle(bundle: torch.Tensor, layer: int, expert: int) -> KeptExpert:
    """What ``pack_bundle`` was given, of ``bundle`` ``[bytes]`` uint8, contiguous and aligned as a
    new tensor is. Values that are packed once more share its memory.

    Raises ``BundleError``. Every bit that does not belong to a value is checked; whether values are
    right only a checksum can tell.
    """
    head = bytes(bundle[: _HEADER.size].numpy())
    if len(head) < _HEADER.size:
        raise BundleError(f"{len(head)} bytes, a bundle begins with {_HEADER.size}")
    magic, version, small, *numbers = _HEADER.unpack(head)
    if magic != _MAGIC or version != _VERSION:
        raise BundleError(f"format {magic!r} {version}, expected {_MAGIC!r} {_VERSION}")
    found_layer, found_expert, *described = numbers
    if (found_layer, found_expert) != (layer, expert):
        raise BundleError(
            f"expert {found_expert} of layer {found_layer}, expected {expert} of {layer}"
        )
    matrices = []
    rest = bundle[_HEADER.size :]
    for number, rows, columns in (described[:3], described[3:]):
        if number not in Storage._value2member_map_:
            raise BundleError(f"storage {number} is unknown")
        storage = Storage(number)
        values, rest = _take(rest, storage.dtype, rows, columns)
        if storage in {Storage.PLAIN, Storage.ROW_BY_ROW}:
            values = values.clone()  # kept as they are: the bundle's memory is to go
        scales = None
        if shape := storage.scales_of(rows, columns):
            scales, rest = _take(rest, torch.float32, *shape)
        matrices.append(Matrix(storage, values, scales))
    kept = KeptExpert(bool(small), *matrices)
    if rest.numel() or _header(kept, layer, expert) != head:
        raise BundleError("bytes that a bundle does not have")
    return kept


def checksum(bundle: torch.Tensor) -> bytes:
    """BLAKE2b of ``bundle`` ``[bytes]`` uint8. Lets go of the GIL."""
    return hashlib.blake2b(bundle.numpy().data, digest_size=CHECKSUM_BYTES).digest()


def checksum_of(kept: KeptExpert, layer: int, expert: int) -> bytes:
    """``checksum(pack_bundle(...))``, without the copy."""
    digest = hashlib.blake2b(_header(kept, layer, expert), digest_size=CHECKSUM_BYTES)
    for part in _parts(kept):
        digest.update(part.view(-1).view(torch.uint8).numpy().data)
        digest.update(bytes(_padded(part.nbytes) - part.nbytes))
    return digest.digest()


def largest_bundle(hidden: int, intermediate: int) -> int:
    """Bytes that no bundle of an expert of this size exceeds."""
    size = Storage.PLAIN.dtype.itemsize * hidden * intermediate
    return _HEADER.size + _padded(2 * size) + _padded(size)


def _parts(kept: KeptExpert) -> list[torch.Tensor]:
    found = (part for m in (kept.gate_up, kept.down) for part in (m.values, m.scales))
    return [part for part in found if part is not None]


def _take(
    rest: torch.Tensor, dtype: torch.dtype, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first tensor of ``rest`` and what follows it. Raises ``BundleError``."""
    end = rows * columns * dtype.itemsize
    after = _padded(end)
    if after > rest.numel():
        raise BundleError(f"ends {after - rest.numel()} bytes early: its header needs more")
    if torch.any(rest[end:after]):
        raise BundleError("the padding of a matrix is not zero")
    return rest[:end].view(dtype).view(rows, columns), rest[after:]


def _header(kept: KeptExpert, layer: int, expert: int) -> bytes:
    matrices = ((matrix.storage, *matrix.values.shape) for matrix in (kept.gate_up, kept.down))
    described = [number for matrix in matrices for number in matrix]
    return _HEADER.pack(_MAGIC, _VERSION, kept.small, layer, expert, *described)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
