"""Between a model on a device and experts whose routes are chosen on the host.

Each layer's ids and weights come down once, and this is the only time that the host waits for the
device in a layer. Where lanes lie in host memory the rows come down with them, and the experts'
sums go up without a wait; where lanes lie on the device (``ExpertClient.on_device``) neither moves.
"""

from __future__ import annotations

from time import perf_counter_ns

import torch
from ep_kernels.triton.device import Device, Stream
from ep_kernels.triton.transfer import download, upload

from moe_model.experts import ExpertClient, Ticket
from moe_model.forward import Computed


class DeviceExperts:
    """``ExpertClient`` for tensors of ``device``, over one that takes ids and weights on the host,
    and rows there or on the device. ``computed`` as in ``RouterModel.clients``: the time that the
    host waited.
    """

    on_device = True

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
        experts, began = self._experts, perf_counter_ns()
        wanted = (topk_ids, topk_weights) if experts.on_device else (topk_ids, topk_weights, x)
        ids, weights, *rows = download(self._device, self._stream, *wanted)
        self._computed(layer, began, perf_counter_ns())
        if not rows:
            return experts.dispatch(layer, x, ids, weights)
        return _Upward(experts.dispatch(layer, rows[0], ids, weights), self._device)


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
