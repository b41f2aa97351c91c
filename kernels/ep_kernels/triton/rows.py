"""What is done to rows between matrix products: RMS norm, rotary embedding, the new cache rows.

Each row is read and written once, and depends on itself alone. Rotations are complex numbers of
each position, as ``moe_model.rope`` tabulates them: a pair ``(a, b)`` is ``(a + ib) * turn``, and a
turn may carry the softmax scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_kernels.triton.arguments import KernelArgumentError, check_tensor
from ep_kernels.triton.parts import part_of_kernel
from ep_kernels.triton.registry import Variant
from ep_kernels.triton.tuning import architecture_of, tile

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _rms_norm(
    x: tl.tensor,  # [rows, WIDTH]
    residual: tl.tensor,  # [rows, WIDTH]; with RESIDUAL x is added to it
    weight: tl.tensor,  # [WIDTH] fp32
    out: tl.tensor,  # [rows, WIDTH]
    epsilon: tl.tensor,
    WIDTH: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WIDTH_P2: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_P2)
    inside = column < WIDTH
    value = tl.load(x + row * WIDTH + column, inside, 0.0).to(tl.float32)
    if RESIDUAL:
        value += tl.load(residual + row * WIDTH + column, inside, 0.0).to(tl.float32)
        tl.store(residual + row * WIDTH + column, rounded(value, residual), inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + epsilon)
    value = value * scale * tl.load(weight + column, inside, 0.0)
    tl.store(out + row * WIDTH + column, rounded(value, out), inside)


@part_of_kernel
def rounded(value: tl.tensor, like: tl.tensor) -> tl.tensor:
    """fp32 to the type that ``like`` points to, to the nearest.

    The interpreter would cut bf16 off, so there the rounding is done by hand.
    """
    if like.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        nearest = bits.to(tl.float32, bitcast=True)
        return tl.where(value == value, nearest, value).to(tl.bfloat16)
    return value.to(like.dtype.element_ty)


@part_of_kernel
def _turn(
    at: tl.tensor, turn: tl.tensor, pairs: tl.tensor, exists: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Pairs ``(at[2 i], at[2 i + 1])`` times the complex ``turn[i]``: real and imaginary parts."""
    real = tl.load(at + 2 * pairs, exists, 0.0).to(tl.float32)
    imaginary = tl.load(at + 2 * pairs + 1, exists, 0.0).to(tl.float32)
    cosine = tl.load(turn + 2 * pairs, exists, 0.0)
    sine = tl.load(turn + 2 * pairs + 1, exists, 0.0)
    return real * cosine - imaginary * sine, real * sine + imaginary * cosine


@triton.jit
def _latent_rows(
    x: tl.tensor,  # [rows, QUERY + LATENT + ROTARY]
    query_weight: tl.tensor,  # [QUERY] fp32
    latent_weight: tl.tensor,  # [LATENT] fp32
    turn: tl.tensor,  # [rows, ROTARY / 2] complex
    cache_rows: tl.tensor,  # [rows] int64
    cache: tl.tensor,  # [slots, stride]
    stride: tl.tensor,
    query: tl.tensor,  # [rows, QUERY]
    epsilon: tl.tensor,
    QUERY: tl.constexpr,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    NORMED: tl.constexpr,
    QUERY_P2: tl.constexpr,
    LATENT_P2: tl.constexpr,
    PAIRS_P2: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = x + row * (QUERY + LATENT + ROTARY)
    column = tl.arange(0, QUERY_P2)
    value = tl.load(at + column, column < QUERY, 0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(value * value, 0) / QUERY + epsilon)
        value = value * scale * tl.load(query_weight + column, column < QUERY, 0.0)
    tl.store(query + row * QUERY + column, rounded(value, query), column < QUERY)

    slot = cache + tl.load(cache_rows + row) * stride
    column = tl.arange(0, LATENT_P2)
    inside = column < LATENT
    latent = tl.load(at + QUERY + column, inside, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + epsilon)
    latent = latent * scale * tl.load(latent_weight + column, inside, 0.0)
    tl.store(slot + column, rounded(latent, cache), inside)

    pairs = tl.arange(0, PAIRS_P2)
    exists = pairs < ROTARY // 2
    real, imaginary = _turn(at + QUERY + LATENT, turn + row * ROTARY, pairs, exists)
    tl.store(slot + LATENT + 2 * pairs, rounded(real, cache), exists)
    tl.store(slot + LATENT + 2 * pairs + 1, rounded(imaginary, cache), exists)


@triton.jit
def _rotate(
    x: tl.tensor,  # [rows, heads, WIDTH], in place
    turn: tl.tensor,  # [rows, WIDTH / 2] complex
    heads: tl.tensor,
    WIDTH: tl.constexpr,
    HEADS_P2: tl.constexpr,
    PAIRS_P2: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_P2 + tl.arange(0, HEADS_P2)
    pairs = tl.arange(0, PAIRS_P2)[None, :]
    exists = (head < heads)[:, None] & (pairs < WIDTH // 2)
    at = x + (row * heads + head[:, None]) * WIDTH
    real, imaginary = _turn(at, turn + row * WIDTH, pairs, exists)
    tl.store(at + 2 * pairs, rounded(real, x), exists)
    tl.store(at + 2 * pairs + 1, rounded(imaginary, x), exists)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x [rows, width]`` over its root mean square times ``weight [width]`` fp32 (arXiv
    1910.07467) -> the same shape and dtype.

    With ``residual`` the norm is of ``residual + x``, which is also written to ``residual``. Raises
    ``KernelArgumentError``.
    """
    check_tensor("x", x, (None, None), *_DTYPES)
    rows, width = x.shape
    check_tensor("weight", weight, (width,), torch.float32, like=x)
    if residual is not None:
        check_tensor("residual", residual, (rows, width), *_DTYPES, like=x)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        shape = tile("rms_norm", architecture_of(x.device))
        _rms_norm[(rows,)](
            x,
            x if residual is None else residual,
            weight,
            out,
            epsilon,
            WIDTH=width,
            RESIDUAL=residual is not None,
            WIDTH_P2=triton.next_power_of_2(width),
            num_warps=shape.num_warps,
        )
    return out


def latent_rows(
    x: torch.Tensor,
    query_norm: torch.Tensor | None,
    latent_norm: torch.Tensor,
    epsilon: float,
    turn: torch.Tensor,
    cache_rows: torch.Tensor,
    cache: torch.Tensor,
) -> torch.Tensor:
    """From the first product of multi-head latent attention to queries and cache rows.

    ``x [rows, query + latent + rotary]``; its front, the query or its latent, is returned (normed
    by ``query_norm [query]`` fp32 if there is one). The latent, normed by ``latent_norm [latent]``,
    and the rotary key, turned by ``turn [rows, rotary / 2]`` complex64, go to ``cache [slots, at
    least latent + rotary]`` at ``cache_rows [rows]`` int64. Raises ``KernelArgumentError``.
    """
    check_tensor("x", x, (None, None), *_DTYPES)
    rows, width = x.shape
    check_tensor("turn", turn, (rows, None), torch.complex64, like=x)
    check_tensor("latent_norm", latent_norm, (None,), torch.float32, like=x)
    check_tensor("cache_rows", cache_rows, (rows,), torch.int64, like=x)
    latent, rotary = latent_norm.shape[0], 2 * turn.shape[1]
    query = width - latent - rotary
    if query < 1:
        raise KernelArgumentError("x", f"{width} wide", f"more than {latent} + {rotary}")
    if query_norm is not None:
        check_tensor("query_norm", query_norm, (query,), torch.float32, like=x)
    if cache.dim() != 2 or cache.stride(1) != 1 or cache.shape[1] < latent + rotary:
        raise KernelArgumentError(
            "cache", f"of shape {list(cache.shape)}", f"[slots, {latent + rotary}]"
        )
    out = torch.empty((rows, query), dtype=x.dtype, device=x.device)
    if rows:
        shape = tile("latent_rows", architecture_of(x.device))
        _latent_rows[(rows,)](
            x,
            latent_norm if query_norm is None else query_norm,
            latent_norm,
            torch.view_as_real(turn),
            cache_rows,
            cache,
            cache.stride(0),
            out,
            epsilon,
            num_warps=shape.num_warps,
            **_latent_constants(query, latent, rotary, normed=query_norm is not None),
        )
    return out


def rotate(x: torch.Tensor, turn: torch.Tensor) -> None:
    """Turn ``x [rows, heads, width]`` by ``turn [rows, width / 2]`` complex64, in place.

    Raises ``KernelArgumentError``.
    """
    check_tensor("x", x, (None, None, None), *_DTYPES)
    rows, heads, width = x.shape
    if width % 2:
        raise KernelArgumentError("x", f"{width} wide", "pairs of values")
    check_tensor("turn", turn, (rows, width // 2), torch.complex64, like=x)
    if rows and heads:
        shape = tile("rotate", architecture_of(x.device))
        _rotate[(rows, triton.cdiv(heads, shape["HEADS"]))](
            x,
            torch.view_as_real(turn),
            heads,
            WIDTH=width,
            HEADS_P2=shape["HEADS"],
            PAIRS_P2=triton.next_power_of_2(width // 2),
            num_warps=shape.num_warps,
        )


def _latent_constants(
    query: int, latent: int, rotary: int, *, normed: bool
) -> dict[str, int | bool]:
    return {
        "QUERY": query,
        "LATENT": latent,
        "ROTARY": rotary,
        "NORMED": normed,
        "QUERY_P2": triton.next_power_of_2(query),
        "LATENT_P2": triton.next_power_of_2(latent),
        "PAIRS_P2": triton.next_power_of_2(max(1, rotary // 2)),
    }


def reference_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``rms_norm`` in plain torch, fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def reference_rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """``x [..., width]`` times complex ``turn [..., width / 2]``, fp32, in plain torch."""
    pairs = x.float().contiguous().view(torch.complex64)
    return (pairs * turn).view(torch.float32)


def variants(architecture: int) -> tuple[Variant, ...]:
    """DeepSeek-V3's sizes."""
    norm, latent, turning = (
        tile(name, architecture) for name in ("rms_norm", "latent_rows", "rotate")
    )
    return (
        Variant(
            kernel="rows.rms_norm",
            name="7168, residual",
            function=_rms_norm,
            signature={
                "x": "*bf16:16",
                "residual": "*bf16:16",
                "weight": "*fp32:16",
                "out": "*bf16:16",
                "epsilon": "fp32",
            },
            constexprs={"WIDTH": 7168, "RESIDUAL": True, "WIDTH_P2": 8192},
            num_warps=norm.num_warps,
            num_stages=1,
            hot=True,
        ),
        Variant(
            kernel="rows.latent_rows",
            name="1536 + 512 + 64",
            function=_latent_rows,
            signature={
                "x": "*bf16:16",
                "query_weight": "*fp32:16",
                "latent_weight": "*fp32:16",
                "turn": "*fp32:16",
                "cache_rows": "*i64:16",
                "cache": "*bf16:16",
                "stride": "i32:16",
                "query": "*bf16:16",
                "epsilon": "fp32",
            },
            constexprs=_latent_constants(1536, 512, 64, normed=True),
            num_warps=latent.num_warps,
            num_stages=1,
            hot=True,
        ),
        Variant(
            kernel="rows.rotate",
            name="128 heads of 64",
            function=_rotate,
            signature={"x": "*bf16:16", "turn": "*fp32:16", "heads": "i32"},
            constexprs={"WIDTH": 64, "HEADS_P2": turning["HEADS"], "PAIRS_P2": 32},
            num_warps=turning.num_warps,
            num_stages=1,
            hot=True,
        ),
    )
