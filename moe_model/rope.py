"""Rotary position embedding as multiplication by unit complex numbers.

A rotation of the pair (a, b) by an angle is ``(a + ib) * e^(i angle)``, one complex product per
pair on the tensor's own memory. Checkpoints that pair value ``i`` with ``i + dim/2`` get the rows
of their projections reordered at load (``pair_order``), which leaves every dot product as it was.
"""

from __future__ import annotations

import math

import torch

from moe_model.architecture import RopeSpec, YarnSpec


class Rope:
    """The rotations of positions ``0 .. max_context - 1``, tabulated."""

    def __init__(self, spec: RopeSpec, max_context: int) -> None:
        factor = 1.0 if spec.yarn is None else spec.yarn.attention_factor
        angles = torch.outer(torch.arange(max_context).float(), inverse_frequencies(spec))
        self._table = torch.complex(angles.cos().mul_(factor), angles.sin().mul_(factor))

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """``[n]`` int64 positions -> ``[n, dim / 2]`` complex64 rotations."""
        return self._table.index_select(0, positions)


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """Radians a position of each pair, ``[dim / 2]`` fp32."""
    exponents = torch.arange(0, spec.dim, 2).float() / spec.dim
    wavelengths = spec.theta**exponents
    if spec.yarn is None:
        return 1.0 / wavelengths
    return _yarn_frequencies(spec, spec.yarn, wavelengths)


def pair_order(dim: int) -> torch.Tensor:
    """Permutation that brings the half-split pairs ``(i, i + dim/2)`` side by side, ``[dim]``."""
    return torch.arange(dim).view(2, dim // 2).t().reshape(-1)


def _yarn_frequencies(spec: RopeSpec, yarn: YarnSpec, wavelengths: torch.Tensor) -> torch.Tensor:
    """YaRN's blend (arXiv 2309.00071, section 3.2): pairs that turn often within the original
    context keep their frequency, slow ones are stretched by ``factor``, a ramp lies between.
    """

    def pair_turning(rotations: float) -> float:
        ratio = yarn.original_context / (rotations * 2 * math.pi)
        return spec.dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = high - low if high != low else 0.001  # a step, where the ramp has no width
    ramp = ((torch.arange(spec.dim // 2).float() - low) / width).clamp(0, 1)
    return (1.0 / (yarn.factor * wavelengths)) * ramp + (1.0 / wavelengths) * (1 - ramp)
