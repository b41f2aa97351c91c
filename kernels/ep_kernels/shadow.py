"""The shadow token: one token that an expert computes before it may serve.

The token depends on the expert's name alone and is the same on every machine, so that two holders
of an expert can compare what it makes of it. It finds what no checksum of weights can: a slot that
computes something else than the slot it is to stand in for.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import linear, silu

from ep_kernels.bank import KeptExpert, LoadedExpert
from ep_kernels.fp8 import BlockScaled, Weight, dense, rounded_rows, rounding_fault
from ep_kernels.grouped_ffn import reference_rows
from ep_kernels.packed import Matrix

_KERNEL_TOLERANCE = 1e-4
"""Two kernels that add the same fp32 products in another order differ by a hundredth of this."""
_ROUNDING_TOLERANCE = 2e-2
"""fp16 rounding of a true fp32 checkpoint's weights changes an answer by a tenth of this, bf16
rounding of weights and activations by up to a half."""
_FP8_TOLERANCE = 5e-2
"""Between two that quantise by one rule. Sums in another order may take a value between the
products to its other neighbour in e4m3, up to an eighth away: one of 128 such moves an answer by
up to 3e-2, one of 2048 by 7e-3. On GPUs of one kind nothing differs. The token itself is quantised
alike everywhere: its values are odd multiples of 1/64, which lie far from any tie."""


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


def checkpoint_row(tensors: tuple[Weight, Weight, Weight], layer: int, expert: int) -> torch.Tensor:
    """The same from ``gate``, ``up`` and ``down`` in plain fp32, ``[hidden]``."""
    token = shadow_token(layer, expert, tensors[0].shape[1])
    first = np.zeros(1, dtype=np.int32)
    gate, up, down = tensors
    with torch.no_grad():
        plain = [(dense(gate), dense(up), dense(down))]
        return reference_rows(token, first, plain, first).squeeze(0)


def fp8_row(kept: KeptExpert, layer: int, expert: int) -> torch.Tensor:
    """The same from FP8 matrices in plain torch, with the activations quantised as the kernels do:
    without that an answer is off by several hundredths. ``[hidden]``.
    """
    with torch.no_grad():
        gate_up, down = (_blocks(matrix).dense() for matrix in (kept.gate_up, kept.down))
        token = rounded_rows(shadow_token(layer, expert, gate_up.shape[1]))
        gate, up = linear(token, gate_up).chunk(2, 1)
        return linear(rounded_rows(silu(gate) * up), down).bfloat16().float().squeeze(0)


def fp8_fault(tensors: tuple[Weight, Weight, Weight], kept: KeptExpert) -> str:
    """What is wrong with the FP8 matrices that were made of ``gate``, ``up`` and ``down``, in
    words; empty when each value is as near as it can be.
    """
    gate_up, down = _blocks(kept.gate_up), _blocks(kept.down)
    halves = zip(gate_up.values.chunk(2), gate_up.scales.chunk(2), strict=True)
    with torch.no_grad():
        for weight, blocks in zip(tensors, (*(BlockScaled(*h) for h in halves), down), strict=True):
            if fault := rounding_fault(weight, blocks):
                return fault
    return ""


def _blocks(matrix: Matrix) -> BlockScaled:
    assert matrix.scales is not None, "no FP8 matrix"
    return BlockScaled(matrix.values, matrix.scales)


def shadow_fault(
    found: torch.Tensor,
    expected: torch.Tensor,
    *,
    rounded: bool = False,
    fp8: bool = False,
    exact: bool = False,
) -> str:
    """What is wrong with ``found`` ``[hidden]``, in words; empty when it will do.

    ``rounded``: the weights were, between the two. ``fp8``: both quantise activations to it.
    ``exact``: every bit must be the same.
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
    if fp8:
        tolerance = _FP8_TOLERANCE
    if not exact and difference <= tolerance * largest:
        return ""
    allowed = "none" if exact else f"{tolerance:g}"
    return (
        f"the shadow token's answer differs by {difference / max(largest, 1e-30):.2g} of its "
        f"largest value, allowed is {allowed}"
    )
