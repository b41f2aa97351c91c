"""Batches of rows on their way through a device's experts: up, through the FFN, and down again.

A *flight* has pinned memory and device memory of its own. Rows, pairs and the slots' addresses go
up in one copy, the kernels follow it on another stream, the sums come down on a third; the host
only asks whether they have come. So one batch is copied while another is computed. Rows that lie on
the device already are gathered there instead, and their sums stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import numpy as np
import torch

from ep_kernels.plane import FloatArray, IntArray
from ep_kernels.triton.bank import DTYPE, DeviceBank
from ep_kernels.triton.device import TIMEOUT_S, Device, DeviceHung, Mark, wait_for
from ep_kernels.triton.grouped_gemm import PREFILL_ROWS, expert_ffn

DEPTH = 2
"""Flights at a time: one is computed while the host fills or empties the other."""
_ALIGN = 256
_LEAST_BYTES = 1 << 16


class _Memory:
    """Pinned bytes, and bytes on the device; both grow by powers of two."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.host = torch.empty(0, dtype=torch.uint8)
        self.device = torch.empty(0, dtype=torch.uint8)

    def fit(self, on_host: int, on_device: int) -> None:
        if self.host.numel() < on_host:
            self.host = self._device.pinned(_rounded(on_host))
        if self.device.numel() < on_device:
            size, place = _rounded(on_device), self._device.place
            self.device = torch.empty(size, dtype=torch.uint8, device=place)


class Flight:
    """One batch under way. Begun by ``Flights.begin``; give it back by ``Flights.end``."""

    def __init__(self, device: Device) -> None:
        self.up = _Memory(device)
        self.down = _Memory(device)
        self._name = device.name
        self._began = 0.0
        self._landed: Mark | None = None
        self._held: tuple[object, ...] = ()
        """What the device reads and writes until it is done."""
        self._shape = (0, 0)

    @property
    def done(self) -> bool:
        """Whether ``rows`` are there. Raises ``DeviceHung`` when they do not come."""
        assert self._landed is not None, "not begun"
        if self._landed.done:
            return True
        if monotonic() - self._began > TIMEOUT_S:
            raise DeviceHung(self._name, TIMEOUT_S)
        return False

    @property
    def rows(self) -> torch.Tensor:
        """Each token's weighted sum, ``[tokens, hidden]`` fp32 on the host, until ``end``. A flight
        begun with ``outs`` has none.
        """
        tokens, hidden = self._shape
        return self.down.host[: 4 * tokens * hidden].view(torch.float32).view(tokens, hidden)

    def takes_off(self, tokens: int, hidden: int) -> None:
        """``tokens``: those whose sums come down."""
        self._began = monotonic()
        self._shape = (tokens, hidden)
        self.down.fit(4 * tokens * hidden, 0)

    def lands_at(self, mark: Mark, held: tuple[object, ...]) -> None:
        self._landed = mark
        self._held = held

    def let_go(self) -> None:
        self._landed = None
        self._held = ()


class Flights:
    """All batches that one thread has under way on a device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._up, self._compute, self._down = (device.stream() for _ in range(3))
        self._free = [Flight(device) for _ in range(DEPTH)]

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def begin(
        self,
        bank: DeviceBank,
        xs: Sequence[torch.Tensor],
        pair_token: IntArray,
        pair_slot: IntArray,
        pair_weight: FloatArray,
        outs: Sequence[torch.Tensor] | None = None,
    ) -> Flight:
        """Queue a batch and return at once. ``xs`` are ``[n, hidden]`` of any float type, one after
        the other the batch's tokens; the pairs ``[pairs]`` count tokens over all of them and name
        slots in range. All is copied, and the bank may change as soon as this returns.

        With ``outs``, fp32 of the shapes of ``xs``, both lie on the device: the sums are there once
        the flight is done, and until then neither may change.

        Only while there ``has_room``. Raises ``SlotEmptyError``.
        """
        bank.check_filled(pair_slot)
        hidden, slots = bank.hidden, bank.num_slots
        tokens = sum(x.shape[0] for x in xs)
        chosen, weights = _by_token(tokens, bank.top_k, pair_token, pair_slot, pair_weight)
        width = chosen.shape[1]
        ends = np.cumsum(
            [_padded(size) for size in (16 * slots, 4 * tokens * width, 4 * tokens * width)]
        ).tolist()
        flight = self._free.pop()
        try:
            total = ends[2] + 2 * tokens * hidden
            # The rows come last: without them less goes up.
            sent = total if outs is None else ends[2]
            flight.up.fit(sent, total)
            flight.takes_off(tokens if outs is None else 0, hidden)

            def part(
                memory: torch.Tensor, begin: int, dtype: torch.dtype, *shape: int
            ) -> torch.Tensor:
                size = dtype.itemsize * shape[0] * shape[1]
                return memory[begin : begin + size].view(dtype).view(shape)

            def tables(memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return (
                    part(memory, 0, torch.int64, 2, slots),
                    part(memory, ends[0], torch.int32, tokens, width),
                    part(memory, ends[1], torch.float32, tokens, width),
                )

            tabled = (bank.addresses, chosen, weights)
            for into, values in zip(tables(flight.up.host), tabled, strict=True):
                into.numpy()[...] = values
            if outs is None:
                _gather(part(flight.up.host, ends[2], DTYPE, tokens, hidden), xs)
            x = part(flight.up.device, ends[2], DTYPE, tokens, hidden)
            with self._up:
                flight.up.device[:sent].copy_(flight.up.host[:sent], non_blocking=True)
                if outs is not None:
                    _gather(x, xs)
                arrived = self._up.mark()
            self._device.copied.up += sent
            addresses, on_slots, on_weights = tables(flight.up.device)
            table = bank.table(addresses[0], addresses[1])
            with self._compute:
                self._compute.follow(arrived)
                sums = expert_ffn(x, on_slots, on_weights, table)  # [tokens, hidden]
                computed = self._compute.mark()
            with self._down:
                self._down.follow(computed)
                if outs is None:
                    flight.rows.copy_(sums, non_blocking=True)
                    self._device.copied.down += sums.nbytes
                else:
                    _scatter(sums, outs)
                landed = self._down.mark()
        except BaseException:
            # What has been queued may go on with this one's memory.
            self._free.append(Flight(self._device))
            raise
        flight.lands_at(landed, (sums, xs, outs, *bank.experts))
        return flight

    def regimes(self, bank: DeviceBank) -> tuple[int, ...]:
        """Tokens that between them make use of every kernel that the bank's batches need."""
        return tuple(-(-pairs // bank.top_k) for pairs in (1, PREFILL_ROWS * bank.num_slots))

    def wait(self, flight: Flight) -> None:
        """Block until the flight is done. Raises ``DeviceHung``."""
        wait_for(self._device, flight)

    def end(self, flight: Flight) -> None:
        """Use the memory of a flight that is ``done`` for another one."""
        flight.let_go()
        self._free.append(flight)


def _gather(x: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    first = 0
    for piece in pieces:
        x[first : first + piece.shape[0]].copy_(piece)
        first += piece.shape[0]


def _scatter(sums: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
    sizes = [out.shape[0] for out in outs]
    for out, rows in zip(outs, torch.split_with_sizes(sums, sizes), strict=True):
        out.copy_(rows)


def _by_token(
    tokens: int,
    top_k: int,
    pair_token: IntArray,
    pair_slot: IntArray,
    pair_weight: FloatArray,
) -> tuple[IntArray, FloatArray]:
    """Pairs ``[pairs]`` as ``[tokens, k]`` slots and weights, each token's in their order; -1 where
    a token has fewer. ``k`` is ``top_k``, or more if a token has more.
    """
    counts = np.bincount(pair_token, minlength=tokens)
    width = max(top_k, int(counts.max(initial=0)))
    order = np.argsort(pair_token, kind="stable")
    token = pair_token[order]
    column = np.arange(token.size) - (np.cumsum(counts) - counts)[token]
    slots = np.full((tokens, width), -1, dtype=np.int32)
    weights = np.zeros((tokens, width), dtype=np.float32)
    slots[token, column] = pair_slot[order]
    weights[token, column] = pair_weight[order]
    return slots, weights


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _rounded(size: int) -> int:
    return max(_LEAST_BYTES, 1 << (size - 1).bit_length())
