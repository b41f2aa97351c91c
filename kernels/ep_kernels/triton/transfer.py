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
    return _views(there, begins, tensors)


def download(device: Device, stream: Stream, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Contiguous tensors of the device on the host, once ``stream``, the calling thread's, has made
    them: the host waits. Raises ``DeviceHung``.
    """
    begins, total = _layout(tensors)
    views = _views(device.pinned(total), begins, tensors)
    for into, tensor in zip(views, tensors, strict=True):
        into.copy_(tensor, non_blocking=True)
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
