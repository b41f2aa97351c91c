"""Which rank and slot each (token, expert) pair of one MoE layer goes to, and the messages that
carry them, as one call into C.

An expert may have several *places*: a slot on each of some ranks. How many of its pairs go to each
is decided for the whole batch:

* ``water-fill``: so that the fullest rank gets as few pairs as any split could give it. Each
  replicated expert's pairs are poured over its ranks like water, in turn and again until no rank
  can be lowered; whole pairs are made of that, and of equal ranks the one that was sent less
  lately gets the odd one.
* ``even``: equally, the odd ones to the emptiest ranks.
* ``least-loaded``: all to the one rank that was sent least lately.

Ties go by the order of ranks, so the same history gives the same choice. Within these numbers a
token's pairs go to ranks that it is sent to anyway. A token is in a rank's messages once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ep_kernels.native_library import load
from ep_kernels.plane import IntArray, PairBlock

Choice = Literal["water-fill", "even", "least-loaded"]
_CHOICES: Final[tuple[Choice, ...]] = ("water-fill", "even", "least-loaded")

_MESSAGE_INTS: Final = 5
_BLOCK_INTS: Final = 6  # a pair, at most
_BAD_EXPERT: Final = -1


class Places(NamedTuple):
    """Where the experts of one layer are: places ``first[e]`` to ``first[e + 1]`` are expert
    ``e``'s, in order of rank and at most one a rank.
    """

    first: IntArray
    """``[experts + 1]``"""
    rank: IntArray
    """``[places]``"""
    slot: IntArray
    """``[places]`` local slot at that rank."""


def used_ranks(layers: Sequence[Places], ranks: Sequence[str]) -> tuple[str | None, ...]:
    """``ranks`` with None for each that no expert of any layer is at."""
    used = np.zeros(len(ranks), dtype=bool)
    for places in layers:
        used[places.rank] = True
    return tuple(rank if at else None for rank, at in zip(ranks, used.tolist(), strict=True))


class Counts:
    """Tokens routed to each expert ``[layers, experts]`` since start, each pair once: ``tokens``
    in all, and ``decodes`` those of decode steps.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.tokens = np.zeros((num_layers, num_experts), dtype=np.int64)
        self.decodes = np.zeros((num_layers, num_experts), dtype=np.int64)


@dataclass(slots=True, eq=False)
class Message:
    """What one rank gets of a micro-batch: each token once, ascending, with its pairs in order."""

    rank: int
    block: PairBlock

    @property
    def pairs(self) -> IntArray:
        """Which of the micro-batch's pairs these are, ascending."""
        return self.block.data[self.block.num_tokens + 4 * self.block.num_pairs :]


class _Table(ctypes.Structure):
    _fields_ = (
        ("num_ranks", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("capacity_tokens", ctypes.c_int32),
        ("choice", ctypes.c_int32),
        ("since_forgetting", ctypes.c_int64),
        ("recent", ctypes.c_void_p),
        ("load", ctypes.c_void_p),
        ("share", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("stamp", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("pairs", ctypes.c_void_p),
        ("first_message", ctypes.c_void_p),
        ("pair_token", ctypes.c_void_p),
        ("pair_place", ctypes.c_void_p),
        ("pair_row", ctypes.c_void_p),
        ("later", ctypes.c_void_p),
        ("message", ctypes.c_void_p),
        ("block", ctypes.c_void_p),
        ("nowhere", ctypes.c_void_p),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("first", ctypes.c_void_p),
        ("rank", ctypes.c_void_p),
        ("slot", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("decodes", ctypes.c_void_p),
    )


class RouteCalls(NamedTuple):
    """Addresses of what ``native/route.c`` is called with, and of where it writes."""

    table: int
    layers: tuple[int, ...]
    message: int
    block: int


class PairRouter:
    """Routes the pairs of all layers by one set of places. One thread calls it."""

    def __init__(
        self,
        layers: Sequence[Places],
        *,
        num_ranks: int,
        capacity_tokens: int,
        choice: Choice,
        counts: Counts,
    ) -> None:
        """Messages have at most ``capacity_tokens`` rows. ``counts`` is written to."""
        experts = counts.tokens.shape[1]
        most_places = max((places.rank.size for places in layers), default=0)
        self.recent = np.zeros(num_ranks)
        """Pairs lately sent to each rank, older ones counting less."""
        self._layers = [
            _Layer(
                _address(places.first, np.int32),
                _address(places.rank, np.int32),
                _address(places.slot, np.int32),
                _address(counts.tokens[index], np.int64),
                _address(counts.decodes[index], np.int64),
            )
            for index, places in enumerate(layers)
        ]
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._held = (layers, counts)
        self._layer_addresses = [ctypes.addressof(layer) for layer in self._layers]
        self._table = _Table(num_ranks, experts, capacity_tokens, _CHOICES.index(choice))
        self._table.recent = _address(self.recent, np.float64)
        self._give(np.float64, load=num_ranks, share=most_places)
        self._give(np.int32, left=most_places, count=experts, order=experts)
        self._give(
            np.int32, stamp=num_ranks, rows=num_ranks, pairs=num_ranks, first_message=num_ranks
        )
        self._num_nowhere = ctypes.c_int32()
        self._nowhere_address = ctypes.addressof(self._num_nowhere)
        self._table_address = ctypes.addressof(self._table)
        self._call = load("route").moemesh_route
        pointer, number = ctypes.c_void_p, ctypes.c_int32
        self._call.restype = number
        self._call.argtypes = (
            *(pointer,) * 5,
            number,
            number,
            ctypes.c_char_p,
            pointer,
        )
        self._room = 0
        self._make_room(1)

    def route(
        self,
        layer: int,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        pairs: IntArray | None = None,
        decodes: bytes | None = None,
    ) -> tuple[list[Message], IntArray | None]:
        """Messages for a micro-batch's pairs at the ``layer``-th of the layers, and those pairs
        whose expert has no place, if any.

        ``ids`` int32 and ``weights`` fp32 are ``[tokens, k]``; pair ``token * k + choice``. Of
        these all are routed, or those numbered ``pairs``, ascending. ``decodes``: for each token a
        byte that is 1 if it belongs to a decode; given, the pairs are counted (the first time that
        they are routed). Raises ``ValueError`` for an expert that does not exist.
        """
        assert ids.dtype is torch.int32, "C reads them as they lie"
        assert ids.is_contiguous(), "C reads them as they lie"
        assert weights.is_contiguous(), "C reads them as they lie"
        assert decodes is None or len(decodes) == ids.shape[0], "one byte a token"
        count = ids.numel() if pairs is None else pairs.size
        if count > self._room:
            self._make_room(count)
        blocks = np.empty(_BLOCK_INTS * count, dtype=np.int32)  # the messages' own from now on
        address = self._table.block = blocks.ctypes.data
        messages = self._call(
            self._table_address,
            self._layer_addresses[layer],
            ids.data_ptr(),
            weights.data_ptr(),
            None if pairs is None else _address(pairs, np.int32),
            count,
            ids.shape[1],
            decodes,
            self._nowhere_address,
        )
        if messages == _BAD_EXPERT:
            raise ValueError(
                f"experts {int(ids.min())} to {int(ids.max())} were chosen, "
                f"there are 0 to {self._table.num_experts - 1}"
            )
        out = []
        heads = self._message[: _MESSAGE_INTS * messages].tolist()
        for at in range(0, len(heads), _MESSAGE_INTS):
            rank, begin, rows, number, _ = heads[at : at + _MESSAGE_INTS]
            data = blocks[begin : begin + rows + 5 * number]
            out.append(Message(rank, PairBlock(data, rows, number, address + 4 * begin)))
        lost = self._num_nowhere.value
        return out, self._nowhere[:lost].copy() if lost else None

    def lend(self, pairs: int) -> RouteCalls:
        """For C, which routes up to so many pairs at a time by itself; valid until ``route``."""
        if pairs > self._room:
            self._make_room(pairs)
        (block,) = self._give(np.int32, block=_BLOCK_INTS * self._room)
        return RouteCalls(
            self._table_address,
            tuple(self._layer_addresses),
            _address(self._message, np.int32),
            _address(block, np.int32),
        )

    def _make_room(self, pairs: int) -> None:
        self._room = 1 << (pairs - 1).bit_length()
        room = self._room
        self._give(np.int32, pair_token=room, pair_place=room, pair_row=room, later=room)
        self._message, self._nowhere = self._give(
            np.int32, message=_MESSAGE_INTS * room, nowhere=room
        )

    def _give(self, dtype: type[np.generic], **sizes: int) -> list[npt.NDArray[Any]]:
        """Arrays for the table's fields of these names."""
        for name, size in sizes.items():
            array = self._arrays[name] = np.zeros(size, dtype=dtype)
            setattr(self._table, name, _address(array, dtype))
        return [self._arrays[name] for name in sizes]


def _address(array: npt.NDArray[Any], dtype: type[np.generic]) -> int:
    assert array.dtype == dtype, "C knows it as this type"
    assert array.flags.c_contiguous, "C reads it as it lies"
    return array.ctypes.data
