"""The shadow token: one token that an expert computes before it may serve.

The token depends on the expert's name alone and is the same on every machine, so that two holders
of an expert can compare what it makes of it. It finds what no checksum of weights can: a slot that
computes something else than the slot it is to stand in for.
"""

from __future__ import annotations

import numpy as np
import torch

from ep_kernels.bank import LoadedExpert
from ep_kernels.grouped_ffn import reference_rows

_KERNEL_TOLERANCE = 1e-4
"""Two kernels that add the same fp32 products in another order differ by a hundredth of this."""
_ROUNDING_TOLERANCE = 2e-2
"""fp16 rounding of a true fp32 checkpoint's weights changes an answer by a tenth of this, bf16
rounding of weights and activations by up to a half."""


def shadow_token(layer: int, expert: int, hidden: int) -> torch.Tensor:
    """``[1, hidden]`` fp32 of about unit variance: multiples of 1/64, exact in any float type."""
    raw = np.random.PCG64([layer, expert]).random_raw(hidden)
    # The top 7 bits: 0 to 127 -> -1.98 to 1.98.
    steps = 2 * (raw >> np.uint64(57)).astype(np.int64) - 127
    return torch.from_numpy((steps / 64).astype(np.float32)).unsqueeze(0)


def shadow_row(weights: LoadedExpert, layer: int, expert: int, hidden: int) -> torch.Tensor:
    """What the expert makes of its token, ``[hidden]`` fp32."""
    with torch.no_grad():
        return weights.ffn(shadow_token(layer, expert, hidden)).squeeze(0)


def checkpoint_row(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], layer: int, expert: int
) -> torch.Tensor:
    """The same from ``gate``, ``up`` and ``down`` in plain fp32, ``[hidden]``."""
    token = shadow_token(layer, expert, tensors[0].shape[1])
    first = np.zeros(1, dtype=np.int32)
    with torch.no_grad():
        return reference_rows(token, first, [tensors], first).squeeze(0)


def shadow_fault(
    found: torch.Tensor, expected: torch.Tensor, *, rounded: bool = False, exact: bool = False
) -> str:
    """What is wrong with ``found`` ``[hidden]``, in words; empty when it will do.

    ``rounded``: the weights were, between the two. ``exact``: every bit must be the same.
    """
    if not all(bool(torch.isfinite(row).all()) for row in (found, expected)):
        return "a shadow token's answer is not finite"
    if found.shape != expected.shape:
        return f"a shadow token's answer of {expected.numel()} values, ours has {found.numel()}"
    if torch.equal(found, expected):
        return ""
    difference = (found - expected).abs().max().item()
    largest = expected.abs().max().item()
    tolerance = _ROUNDING_TOLERANCE if rounded else _KERNEL_TOLERANCE
    if not exact and difference <= tolerance * largest:
        return ""
    allowed = "none" if exact else f"{tolerance:g}"
    return (
        f"the shadow token's answer differs by {difference / max(largest, 1e-30):.2g} of its "
        f"largest value, allowed is {allowed}"
    )
