"""Rows to FP8 with one scale for each 128 values, as DeepSeek-V3 quantises activations.

The format, and what the kernel computes in plain torch (``quantise_rows``), are in
``ep_kernels.fp8``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_kernels.fp8 import E4M3, GROUP, LARGEST, SMALLEST
from ep_kernels.triton.arguments import KernelArgumentError, check_tensor
from ep_kernels.triton.registry import Variant
from ep_kernels.triton.tuning import FP8_ARCHITECTURES, fp8_architecture_of, tile

_LARGEST = tl.constexpr(LARGEST)
_FLOOR = tl.constexpr(SMALLEST)


@triton.jit
def scaled(value: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """``value [rows, GROUP]`` fp32 -> its scale ``[rows]``, and the values over it."""
    # A NaN does not win a maximum; it stays one when it is scaled.
    largest = tl.max(tl.abs(value), axis=1)
    scale = tl.maximum(largest, _FLOOR) / _LARGEST
    return value / scale[:, None], scale


@triton.jit
def _quantise(
    x: tl.tensor,  # [rows, GROUPS * GROUP]
    out: tl.tensor,  # [rows, GROUPS * GROUP] e4m3
    scales: tl.tensor,  # [rows, GROUPS] fp32
    groups: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = group < groups
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(x + at, mask=exists[:, None], other=0.0).to(tl.float32)
    small, scale = scaled(value)
    tl.store(out + at, small.to(out.dtype.element_ty), mask=exists[:, None])
    tl.store(scales + group, scale, mask=exists)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [rows, width]`` fp32, bf16 or fp16 -> e4m3 of the same shape, and scales ``[rows, width /
    128]`` fp32. A NaN or infinite value is NaN in its group. Raises ``KernelArgumentError`` and
    ``UnsupportedArchitecture``.
    """
    check_tensor("x", x, (None, None), torch.float32, torch.bfloat16, torch.float16)
    rows, width = x.shape
    if width % GROUP:
        raise KernelArgumentError("x", f"{width} wide", f"a width divisible by {GROUP}")
    shape = tile("quantise.fp8", fp8_architecture_of(x.device))
    out = torch.empty((rows, width), dtype=E4M3, device=x.device)
    scales = torch.empty((rows, width // GROUP), dtype=torch.float32, device=x.device)
    groups = scales.numel()
    if groups:
        _quantise[(triton.cdiv(groups, shape["BLOCK"]),)](
            x,
            out,
            scales,
            groups,
            GROUP=GROUP,
            BLOCK=shape["BLOCK"],
            num_warps=shape.num_warps,
        )
    return out, scales


def variants(architecture: int) -> tuple[Variant, ...]:
    """Activations of any width."""
    if architecture not in FP8_ARCHITECTURES:
        return ()
    shape = tile("quantise.fp8", architecture)
    return (
        Variant(
            kernel="quantise",
            name="bf16 to e4m3",
            function=_quantise,
            signature={
                "x": "*bf16:16",
                "out": "*fp8e4nv:16",
                "scales": "*fp32:16",
                "groups": "i32",
            },
            constexprs={"GROUP": GROUP, "BLOCK": shape["BLOCK"]},
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            hot=True,
            expects=r"F2FP\.\S*E4M3\S*",
        ),
    )
