"""One expert, from a peer's memory or from the checkpoint, proven before it may serve.

What came from a peer must have the checksum that its owner computed when it loaded the expert,
must still have it when it is unpacked again here, and must make of its shadow token what the
owner's did. What came from the checkpoint must agree with plain fp32 arithmetic on the tensors; FP8
matrices with such arithmetic by the rule that their kernels follow, and with the tensors themselves
as far as rounding allows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from ep_kernels.bank import Bank, KeptExpert, LoadedExpert
from ep_kernels.bundle import BundleError, checksum, checksum_of, largest_bundle, open_bundle
from ep_kernels.fp8 import Weight
from ep_kernels.packed import Storage
from ep_kernels.shadow import checkpoint_row, fp8_fault, fp8_row, shadow_fault, shadow_row

from expert_svc.heap import is_out_of_memory
from mesh.messages import Source
from moe_model.errors import CheckpointError

FaultKind = Literal["peer", "checksum", "malformed", "shadow", "unreadable", "memory"]

Tensors: TypeAlias = tuple[Weight, Weight, Weight]
ReadExpert = Callable[[int, int], Tensors]
"""``(layer, logical expert) -> gate [inter, hidden], up [inter, hidden], down [hidden, inter]``."""


class SupersededError(Exception):
    """A newer assignment arrived while this one was being applied; the newer one finishes it."""


class LoadError(Exception):
    """The expert could not be had from where it was sought; nothing was changed.

    ``SlotTable.apply`` seeks it elsewhere or leaves the slot empty. Attribute: ``kind``.
    """

    def __init__(self, kind: FaultKind, reason: str) -> None:
        super().__init__(reason)
        self.kind: FaultKind = kind


class PeerError(LoadError):
    """A peer did not deliver. ``gone``: it will not deliver anything else either, for now."""

    def __init__(self, reason: str, *, gone: bool) -> None:
        super().__init__("peer", reason)
        self.gone = gone


@dataclass(frozen=True, slots=True)
class Held:
    """An expert in memory, right as far as is known; may serve in several slots. Immutable."""

    weights: LoadedExpert
    checksum: bytes
    """Of its bundle, when it was loaded."""
    shadow: torch.Tensor
    """What it made of its shadow token then, ``[hidden]`` fp32."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a peer sent: the bundle ``[bytes]`` uint8, and what its owner says about it."""

    bundle: torch.Tensor
    checksum: bytes
    shadow: torch.Tensor


Fetch = Callable[[Source, int, int, threading.Event], Fetched]
"""``(source, logical expert, most bytes, superseded) -> Fetched``; blocks. Raises ``PeerError``, or
``SupersededError`` soon after ``superseded`` is set."""


def from_checkpoint(bank: Bank, read: ReadExpert, layer: int, expert: int) -> tuple[Held, int]:
    """The expert and how many bytes were read. Raises ``LoadError``."""
    with _as_load_errors():
        tensors = read(layer, expert)
        kept = bank.keep(*tensors)
        digest = checksum_of(kept, layer, expert)
        # An FP8 expert is judged by its own matrices, and these by how near they are.
        fp8 = _is_fp8(kept)
        if fault := fp8_fault(tensors, kept) if fp8 else "":
            raise LoadError("shadow", fault)
        wanted = fp8_row(kept, layer, expert) if fp8 else checkpoint_row(tensors, layer, expert)
        stored = {kept.gate_up.storage, kept.down.storage}
        rounded = bank.narrow or bank.kind == "fp16" or Storage.FP16 in stored
        weights = bank.pack(kept)
        row = shadow_row(weights, layer, expert, bank.hidden)
        if fault := shadow_fault(row, wanted, rounded=rounded, fp8=fp8):
            raise LoadError("shadow", fault)
        return Held(weights, digest, row), sum(tensor.nbytes for tensor in tensors)


def from_peer(
    bank: Bank,
    fetch: Fetch,
    source: Source,
    expert: int,
    superseded: threading.Event,
) -> tuple[Held, int]:
    """The expert and how many bytes came. Raises ``LoadError`` or ``SupersededError``."""
    with _as_load_errors():
        limit = largest_bundle(bank.hidden, bank.intermediate)
        fetched = fetch(source, expert, limit, superseded)
        size = fetched.bundle.nbytes
        if checksum(fetched.bundle) != fetched.checksum:
            raise LoadError("checksum", f"the bundle's {size} bytes do not have its checksum")
        try:
            weights = bank.pack(open_bundle(fetched.bundle, source.layer, expert))
        except ValueError as error:
            raise LoadError("malformed", str(error)) from error
        kept = weights.kept()
        if checksum_of(kept, source.layer, expert) != fetched.checksum:
            raise LoadError("checksum", "what was loaded does not have the bundle's checksum")
        row = shadow_row(weights, source.layer, expert, bank.hidden)
        if fault := shadow_fault(
            row, fetched.shadow, rounded=bank.narrow, fp8=_is_fp8(kept), exact=bank.exact
        ):
            raise LoadError("shadow", fault)
        return Held(weights, fetched.checksum, row), size


def _is_fp8(kept: KeptExpert) -> bool:
    return kept.down.storage is Storage.FP8


@contextmanager
def _as_load_errors() -> Iterator[None]:
    """Whatever says that data are bad or memory is short becomes a ``LoadError``; bugs do not."""
    try:
        yield
    except BundleError as error:
        raise LoadError("malformed", str(error)) from error
    except (CheckpointError, OSError) as error:
        raise LoadError("unreadable", str(error)) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise LoadError("memory", str(error) or "out of memory") from error
