"""Between a model on a device and experts that take rows on the host.

Each layer's rows come down once, and this is the only time that the host waits for the device in a
layer: lanes lie in host memory. The experts' sums go up without a wait.
"""

from __future__ import annotations

from time import perf_counter_ns

import torch
from ep_kernels.triton.device import Device, Stream
from ep_kernels.triton.transfer import download, upload

from moe_model.experts import ExpertClient, Ticket
from moe_model.forward import Computed


class HostExperts:
    """``ExpertClient`` for tensors of ``device``, over one for tensors of the host. ``computed`` as
    in ``RouterModel.clients``: the time that the host waited for the rows.
    """

    def __init__(
        self,
        experts: ExpertClient,
        device: Device,
        stream: Stream,
        computed: Computed,
    ) -> None:
        self._experts = experts
        self._device = device
        self._stream = stream
        self._computed = computed

    def dispatch(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        began = perf_counter_ns()
        rows = download(self._device, self._stream, x, topk_ids, topk_weights)
        self._computed(layer, began, perf_counter_ns())
        return _Upward(self._experts.dispatch(layer, *rows), self._device)


class _Upward:
    """A ticket whose result goes up to the device."""

    __slots__ = ("_device", "_ticket")

    def __init__(self, ticket: Ticket, device: Device) -> None:
        self._ticket = ticket
        self._device = device

    @property
    def done(self) -> bool:
        return self._ticket.done

    def result(self) -> torch.Tensor:
        return upload(self._device, self._ticket.result())[0]

    def abandon(self) -> None:
        self._ticket.abandon()
