"""Small tensors up to a device, and results down from it, through pinned memory."""

from __future__ import annotations

import torch

from ep_kernels.triton.device import Device, Stream, wait_for

_ALIGN = 256


def upload(device: Device, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies of contiguous host tensors, in one transfer that the calling thread's stream makes
    without the host. The tensors may change as soon as this returns.
    """
    begins, total = _layout(tensors)
    host = device.pinned(total)
    for into, tensor in zip(_views(host, begins, tensors), tensors, strict=True):
        into.copy_(tensor)
    there = torch.empty(total, dtype=torch.uint8, device=device.place)
    there.copy_(host, non_blocking=True)
    device.copied.up += total
    return _views(there, begins, tensors)


class Fixed:
    """Tensors that stay where they are on the device (``views``), written together."""

    def __init__(self, device: Device, *like: torch.Tensor) -> None:
        """``like``: host tensors of their shapes and types."""
        begins, total = _layout(like)
        self._device = device
        self._begins = begins
        self._memory = torch.zeros(total, dtype=torch.uint8, device=device.place)
        self.views = _views(self._memory, begins, like)

    def send(self, *tensors: torch.Tensor) -> None:
        """Write all of them, in one transfer behind what the calling thread's stream has to do."""
        host = self._device.pinned(self._memory.numel())
        for into, tensor in zip(_views(host, self._begins, tensors), tensors, strict=True):
            into.copy_(tensor)
        self._memory.copy_(host, non_blocking=True)
        self._device.copied.up += host.numel()


def download(device: Device, stream: Stream, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Contiguous tensors of the device on the host, once ``stream``, the calling thread's, has made
    them: the host waits. Raises ``DeviceHung``.
    """
    begins, total = _layout(tensors)
    views = _views(device.pinned(total), begins, tensors)
    for into, tensor in zip(views, tensors, strict=True):
        into.copy_(tensor, non_blocking=True)
        device.copied.down += tensor.nbytes
    wait_for(device, stream.mark())
    return views


def _layout(tensors: tuple[torch.Tensor, ...]) -> tuple[list[int], int]:
    begins, total = [], 0
    for tensor in tensors:
        begins.append(total)
        total += -(-tensor.nbytes // _ALIGN) * _ALIGN
    return begins, total


def _views(
    memory: torch.Tensor, begins: list[int], tensors: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    return tuple(
        memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for begin, tensor in zip(begins, tensors, strict=True)
    )
