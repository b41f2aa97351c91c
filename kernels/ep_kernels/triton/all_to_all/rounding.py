"""Rounding to the wire's formats in integer arithmetic, the same on every target.

Neither the interpreter (it truncates) nor every architecture (e4m3 exists from sm_89) rounds as a
GPU's conversion does, which is to the nearest, ties to even.
"""

from __future__ import annotations

import triton.language as tl

from ep_kernels.triton.parts import part_of_kernel


@part_of_kernel
def bf16_bits(values: tl.tensor) -> tl.tensor:
    """fp32 -> the bits of bf16, uint16. NaN stays NaN."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values == values, rounded, 0x7FC0).to(tl.uint16)


@part_of_kernel
def e4m3_bits(values: tl.tensor) -> tl.tensor:
    """fp32 -> the bits of e4m3 (the finite kind), uint8; saturates at 448, NaN becomes 0x7F."""
    bits = values.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(values), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the spacing is 2^-9: adding 2^23 rounds to a multiple of it.
    small = (magnitude * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    magnitude_bits = tl.where(magnitude < 0.015625, small, normal)
    return tl.where(values == values, sign | magnitude_bits, 0x7F).to(tl.uint8)


@part_of_kernel
def e4m3_values(bits: tl.tensor) -> tl.tensor:
    """The bits of e4m3 -> fp32."""
    code = bits.to(tl.int32)
    exponent = (code >> 3) & 0xF
    mantissa = code & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    magnitude = tl.where((code & 0x7F) == 0x7F, float("nan"), magnitude)
    return tl.where((code & 0x80) != 0, -magnitude, magnitude)
