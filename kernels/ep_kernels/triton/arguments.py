"""What launchers check before a kernel runs: a kernel given a wrong tensor reads foreign memory."""

from __future__ import annotations

import torch


class KernelArgumentError(ValueError):
    """A launcher was given what its kernel cannot run; nothing was launched.

    ``argument`` names it, as the launcher's signature does.
    """

    def __init__(self, argument: str, found: str, expected: str) -> None:
        super().__init__(f"{argument} is {found}, expected {expected}")
        self.argument = argument


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    *dtypes: torch.dtype,
    like: torch.Tensor | None = None,
) -> None:
    """Raise ``KernelArgumentError`` unless ``tensor`` is contiguous, of ``shape`` (None: any size),
    of one of ``dtypes`` and on the device of ``like``.
    """
    sizes = tuple(tensor.shape)
    fits = len(sizes) == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(sizes, shape, strict=False)
    )
    if not fits:
        wanted_shape = ", ".join("any" if size is None else str(size) for size in shape)
        raise KernelArgumentError(name, f"of shape {list(sizes)}", f"[{wanted_shape}]")
    if tensor.dtype not in dtypes:
        accepted = " or ".join(str(dtype) for dtype in dtypes)
        raise KernelArgumentError(name, str(tensor.dtype), accepted)
    if not tensor.is_contiguous():
        raise KernelArgumentError(name, f"of strides {list(tensor.stride())}", "contiguous rows")
    if like is not None and tensor.device != like.device:
        raise KernelArgumentError(name, f"on {tensor.device}", f"{like.device} as the others are")


def check_positive(name: str, value: int) -> None:
    """Raise ``KernelArgumentError`` unless ``value`` is at least 1."""
    if value < 1:
        raise KernelArgumentError(name, str(value), "at least 1")
