"""FP8 as DeepSeek-V3 publishes and computes it (arXiv 2412.19437, section 3.3.2), in plain torch.

Values are e4m3, whose largest is 448, and ``value = quantised * scale``. A weight has an fp32 scale
for each block of 128 x 128, an activation one for each 128 values of its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

GROUP: Final = 128
"""Values that share a scale."""
LARGEST: Final = 448.0
"""The largest finite e4m3."""
SMALLEST: Final = 2.0**-100
"""A group whose values are all smaller is scaled as if one were this large: its scale, and one over
it, are normal numbers."""
E4M3: Final = torch.float8_e4m3fn

_HALF_STEP, _LEAST_HALF_STEP = 2.0**-4, 2.0**-10
"""How far rounding takes a value at most: a share of it, or of its scale where it is tiny."""
_SLACK = 1 + 2.0**-16
"""Dividing by the scale rounds as well."""


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """A matrix of an FP8 checkpoint: ``values [rows, columns]`` e4m3 and ``scales [rows / 128,
    columns / 128]`` fp32, rounded up: blocks at the lower and right edge may be smaller.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def narrow(self, dim: int, start: int, stop: int) -> torch.Tensor:
        """Rows (``dim`` 0) or columns (1) ``start .. stop - 1``, fp32. They need not begin or end
        with a block.
        """
        values = self.values.narrow(dim, start, stop - start).float()
        blocks = torch.arange(start, stop) // GROUP
        spread = self.scales.index_select(dim, blocks)
        # The other dimension block by block: the scales spread over both would take as much memory
        # as the values.
        other = 1 - dim
        for block, part in enumerate(torch.split(values, GROUP, other)):
            part.mul_(spread.narrow(other, block, 1))
        return values

    def dense(self) -> torch.Tensor:
        """All of it, fp32."""
        return self.narrow(0, 0, self.values.shape[0])


Weight: TypeAlias = torch.Tensor | BlockScaled
"""A matrix as a checkpoint has it."""


def dense(weight: Weight) -> torch.Tensor:
    """As a tensor of its own type, or fp32."""
    return weight.dense() if isinstance(weight, BlockScaled) else weight


def block_scaled(weight: Weight) -> BlockScaled:
    """``weight`` as it is, or quantised. Raises ``ValueError`` as ``quantise_weight``."""
    return weight if isinstance(weight, BlockScaled) else BlockScaled(*quantise_weight(weight))


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight [..., rows, width]``, both divisible by 128 -> e4m3 and the scales of its blocks of
    128 x 128, ``[..., rows / 128, width / 128]`` fp32: DeepSeek-V3's checkpoint format. Done once,
    when weights are loaded. Raises ``ValueError``.
    """
    rows, width = weight.shape[-2:]
    if rows % GROUP or width % GROUP:
        raise ValueError(
            f"weight is of shape {list(weight.shape)}, expected rows and width divisible by {GROUP}"
        )
    blocks = weight.float().reshape(*weight.shape[:-2], rows // GROUP, GROUP, width // GROUP, GROUP)
    scales = blocks.abs().amax((-3, -1)).clamp(min=SMALLEST) / LARGEST
    small = blocks / scales[..., :, None, :, None]  # [..., rows / 128, 128, width / 128, 128]
    return small.flatten(-2).flatten(-3, -2).to(E4M3), scales


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [rows, width]``, width divisible by 128 -> e4m3 of the same shape, and scales ``[rows,
    width / 128]`` fp32.
    """
    grouped = x.float().reshape(x.shape[0], x.shape[1] // GROUP, GROUP)  # [rows, width / 128, 128]
    scales = grouped.abs().amax(-1).clamp(min=SMALLEST) / LARGEST
    return (grouped / scales[..., None]).flatten(1).to(E4M3), scales


def dequantise(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 of ``values [..., rows, width]``, where one scale holds for 128 values of the last
    dimension (``scales [..., rows, width / 128]``) or for a block of 128 x 128 (``[..., rows / 128,
    width / 128]``).
    """
    spread = scales.repeat_interleave(GROUP, -1)
    if scales.shape[-2] != values.shape[-2]:
        spread = spread.repeat_interleave(GROUP, -2)
    return values.float() * spread


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """``x [rows, width]`` as it is after ``quantise_rows``, fp32."""
    return dequantise(*quantise_rows(x))


def rounding_fault(weight: Weight, kept: BlockScaled) -> str:
    """What is wrong with ``kept``, which was made of ``weight``, in words; empty when no value is
    further away than rounding takes it.
    """
    if isinstance(weight, BlockScaled):
        same = torch.equal(weight.values.view(torch.uint8), kept.values.view(torch.uint8))
        return "" if same and torch.equal(weight.scales, kept.scales) else "an FP8 matrix differs"
    error = (kept.dense() - weight.float()).abs_()
    for row, scales in zip(torch.split(error, GROUP), kept.scales, strict=True):
        row.sub_(scales.repeat_interleave(GROUP)[: row.shape[1]] * (_LEAST_HALF_STEP * _SLACK))
    error.sub_(weight.float().abs(), alpha=_HALF_STEP * _SLACK)
    most = error.amax().item()
    return "" if most <= 0.0 else f"a weight is {most:.2g} further away than rounding to FP8 takes"
