"""The SwiGLU experts of one MoE layer on one rank, as two grouped products over ragged slots:

    act = silu(x gate^T) * (x up^T)      y = act down^T

Rows come in the order of a ``permute.Plan``: a tile's rows belong to one slot, and each program
takes one tile of rows and one block of columns. bf16 and fp16 weights accumulate in fp32. FP8
weights are e4m3 with a scale for each block of 128 x 128 and meet activations with a scale for each
128 values: products over 128 values are made by the matrix unit, scaled, and added in fp32
(DeepSeek-V3, arXiv 2412.19437, section 3.3); ``act`` is quantised where it is made.

``expert_ffn`` is the whole way of a batch: plan, permute, both products, unpermute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch.nn.functional import silu

from ep_kernels.fp8 import E4M3, GROUP, dequantise, rounded_rows
from ep_kernels.triton.arguments import KernelArgumentError, check_tensor
from ep_kernels.triton.permute import Plan, permute, plan, unpermute
from ep_kernels.triton.quantise import quantise, scaled
from ep_kernels.triton.registry import Variant
from ep_kernels.triton.tuning import (
    FP8_ARCHITECTURES,
    Tile,
    architecture_of,
    fp8_architecture_of,
    tile,
)

Regime = Literal["decode", "prefill"]

PREFILL_ROWS = 32
"""From this many rows a slot on, tiles as high as the matrix unit likes them are mostly full."""


@dataclass(frozen=True, slots=True)
class SlotWeights:
    """The experts of all slots. ``gate_up`` has gate's rows first: ``[slots, 2 intermediate,
    hidden]``, and ``down`` is ``[slots, hidden, intermediate]``: bf16, fp16, or e4m3 with scales
    ``[slots, rows / 128, columns / 128]`` fp32.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ``KernelArgumentError`` for shapes and types that do not belong together."""
        floats = (torch.bfloat16, torch.float16, E4M3)
        check_tensor("gate_up", self.gate_up, (None, None, None), *floats)
        slots, double, hidden = self.gate_up.shape
        if double % 2:
            raise KernelArgumentError("gate_up", f"of {double} rows", "as many of gate as of up")
        inter = double // 2
        check_tensor(
            "down", self.down, (slots, hidden, inter), self.gate_up.dtype, like=self.gate_up
        )
        scales = (("gate_up", self.gate_up_scale), ("down", self.down_scale))
        if not self.is_fp8:
            for name, scale in scales:
                if scale is not None:
                    raise KernelArgumentError(
                        f"{name}_scale", "given", f"none for {self.down.dtype}"
                    )
            return
        _check_fp8_sizes(hidden, inter)
        rows, columns = inter // GROUP, hidden // GROUP
        for (name, scale), shape in zip(
            scales, ((slots, 2 * rows, columns), (slots, columns, rows)), strict=True
        ):
            if scale is None:
                raise KernelArgumentError(f"{name}_scale", "missing", "scales for FP8 weights")
            check_tensor(f"{name}_scale", scale, shape, torch.float32, like=self.gate_up)

    @property
    def is_fp8(self) -> bool:
        return self.gate_up.dtype is E4M3

    @property
    def dtype(self) -> torch.dtype:
        return self.gate_up.dtype

    @property
    def architecture(self) -> int:
        """Of their device. Raises ``UnsupportedArchitecture``, also for FP8 where there is none."""
        device = self.down.device
        return fp8_architecture_of(device) if self.is_fp8 else architecture_of(device)

    @property
    def num_slots(self) -> int:
        return self.gate_up.shape[0]

    @property
    def hidden(self) -> int:
        return self.gate_up.shape[2]

    @property
    def intermediate(self) -> int:
        return self.down.shape[2]


@dataclass(frozen=True, slots=True)
class ApartWeights:
    """The same where each expert lies by itself: ``gate_up`` and ``down`` are the addresses of the
    slots' matrices, ``[slots]`` int64 on the device, each divisible by 16. bf16, fp16, or e4m3 with
    a matrix's scales right behind its values. A slot without an expert must be in no pair; whoever
    launches keeps the matrices until the work ended.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    hidden: int
    intermediate: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        """Raises ``KernelArgumentError``."""
        check_tensor("gate_up", self.gate_up, (None,), torch.int64)
        check_tensor("down", self.down, (self.num_slots,), torch.int64, like=self.gate_up)
        if self.dtype not in {torch.bfloat16, torch.float16, E4M3}:
            raise KernelArgumentError(
                "dtype", str(self.dtype), "bfloat16, float16 or float8_e4m3fn"
            )
        if self.is_fp8:
            _check_fp8_sizes(self.hidden, self.intermediate)

    gate_up_scale = None
    down_scale = None

    @property
    def is_fp8(self) -> bool:
        return self.dtype is E4M3

    @property
    def architecture(self) -> int:
        """Of their device. Raises ``UnsupportedArchitecture``, also for FP8 where there is none."""
        device = self.down.device
        return fp8_architecture_of(device) if self.is_fp8 else architecture_of(device)

    @property
    def num_slots(self) -> int:
        return self.gate_up.shape[0]


def _check_fp8_sizes(hidden: int, inter: int) -> None:
    if hidden % GROUP or inter % GROUP:
        raise KernelArgumentError(
            "gate_up",
            f"of hidden {hidden}, intermediate {inter}",
            f"both divisible by {GROUP} for FP8",
        )


@triton.jit(do_not_specialize=["tiles"])
def _grouped(
    x: tl.tensor,  # [rows, K]
    x_scale: tl.tensor,  # [rows, K / 128] fp32, FP8 only
    w: tl.tensor,  # [slots, N or 2 N, K]; with APART [slots] int64 addresses of [N or 2 N, K]
    w_scale: tl.tensor,  # [slots, N / 128 or 2 N / 128, K / 128] fp32, FP8 only; not with APART
    out: tl.tensor,  # [rows, N]
    out_scale: tl.tensor,  # [rows, N / 128] fp32, FP8 with SWIGLU only
    tile_slot: tl.tensor,  # [tiles] int32
    tile_rows: tl.tensor,  # [tiles] int32
    tiles: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    SWIGLU: tl.constexpr,
    FP8: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> None:
    # Programs that run at the same time share rows of x or a block of w in the L2 cache: GROUP_M
    # tiles of rows go through all columns before the next ones begin.
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    first = program // (GROUP_M * columns) * GROUP_M
    high = tl.minimum(tiles - first, GROUP_M)
    number = first + program % (GROUP_M * columns) % high
    block = program % (GROUP_M * columns) // high
    slot = tl.load(tile_slot + number).to(tl.int64)
    if slot >= 0:
        m = tl.arange(0, BLOCK_M)
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        is_row = m < tl.load(tile_rows + number)
        row = number.to(tl.int64) * BLOCK_M + m
        # Rows of w beyond N are read as row 0, and what they give is not stored.
        w_row = tl.where(n < N, n, 0).to(tl.int64)
        heights: tl.constexpr = 2 if SWIGLU else 1
        if APART:
            address = tl.load(w + slot)
            w_first = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16)
            w_at = w_first + w_row[None, :] * K + k[:, None]  # [K, N]
        else:
            w_at = w + slot * (heights * N * K) + w_row[None, :] * K + k[:, None]  # [K, N]
        x_at = x + row[:, None] * K + k[None, :]
        # With few rows the weights take the side of the product that the matrix unit wants high.
        if TRANSPOSED:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if FP8:
            tl.static_assert(BLOCK_K == 128, "a product and its scale are over 128 values")
            tl.static_assert(128 % BLOCK_N == 0, "a block of columns has one scale")
            tl.static_assert(BLOCK_N == 128 or not SWIGLU, "a block of columns is one group")
            groups: tl.constexpr = K // BLOCK_K
            if APART:  # right behind the values
                s_first = (address + heights * N * K).to(tl.pointer_type(tl.float32))
            else:
                s_first = w_scale + slot * (heights * (N // 128) * groups)
            s_at = s_first + block * BLOCK_N // 128 * groups
            x_scale_at = x_scale + row * groups
        for step in range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                a = tl.load(x_at + step, mask=is_row[:, None], other=0.0)
                b = tl.load(w_at + step)
                if SWIGLU:
                    c = tl.load(w_at + N * K + step)
            else:
                is_k = k < K - step
                a = tl.load(x_at + step, mask=is_row[:, None] & is_k[None, :], other=0.0)
                b = tl.load(w_at + step, mask=is_k[:, None], other=0.0)
                if SWIGLU:
                    c = tl.load(w_at + N * K + step, mask=is_k[:, None], other=0.0)
            if FP8:
                group = step // BLOCK_K
                a_scale = tl.load(x_scale_at + group, mask=is_row, other=0.0)
                b_scale = a_scale * tl.load(s_at + group)
                if TRANSPOSED:
                    acc += tl.dot(tl.trans(b), tl.trans(a)) * b_scale[None, :]
                else:
                    acc += tl.dot(a, b) * b_scale[:, None]
                if SWIGLU:
                    c_scale = a_scale * tl.load(s_at + N // 128 * groups + group)
                    if TRANSPOSED:
                        up += tl.dot(tl.trans(c), tl.trans(a)) * c_scale[None, :]
                    else:
                        up += tl.dot(a, c) * c_scale[:, None]
            elif TRANSPOSED:
                acc = tl.dot(tl.trans(b), tl.trans(a), acc)
                if SWIGLU:
                    up = tl.dot(tl.trans(c), tl.trans(a), up)
            else:
                acc = tl.dot(a, b, acc)
                if SWIGLU:
                    up = tl.dot(a, c, up)
        if SWIGLU:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        if TRANSPOSED:
            acc = tl.trans(acc)
        mask = is_row[:, None] & (n < N)[None, :]
        if FP8 and SWIGLU:
            acc, scale = scaled(acc)
            tl.store(out_scale + row * (N // 128) + block, scale, mask=is_row)
        out_at = out + row[:, None] * N + n[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=mask)


def regime_of(pairs: int, num_slots: int) -> Regime:
    """Which tiles fit ``pairs`` pairs over ``num_slots`` slots."""
    return "prefill" if pairs >= PREFILL_ROWS * num_slots else "decode"


def _tiles(architecture: int, *, fp8: bool, regime: Regime) -> tuple[Tile, Tile]:
    """Of both products. They share the plan, so their rows are as high."""
    kind = "fp8" if fp8 else "bf16"
    up, down = (
        tile(f"grouped_gemm.{name}.{kind}.{regime}", architecture) for name in ("gate_up", "down")
    )
    assert up["BLOCK_M"] == down["BLOCK_M"], "one plan serves both"
    return up, down


def block_m_of(weights: SlotWeights | ApartWeights, regime: Regime) -> int:
    """Rows of a tile: what ``permute.plan`` is to be asked for. Raises
    ``UnsupportedArchitecture``.
    """
    return _tiles(weights.architecture, fp8=weights.is_fp8, regime=regime)[0]["BLOCK_M"]


def grouped_ffn(
    x: torch.Tensor,
    plan: Plan,
    weights: SlotWeights | ApartWeights,
    regime: Regime,
    x_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x [plan.rows, hidden]`` of the weights' type -> ``[plan.rows, hidden]`` bf16 (fp16 for fp16
    weights), padding left as it is. ``x_scale [plan.rows, hidden / 128]`` fp32 for FP8. Two
    launches. Raises ``KernelArgumentError`` and ``UnsupportedArchitecture``.
    """
    hidden, inter = weights.hidden, weights.intermediate
    check_tensor("x", x, (plan.rows, hidden), weights.dtype, like=weights.down)
    check_tensor("plan.tile_slot", plan.tile_slot, (None,), torch.int32, like=x)
    fp8 = weights.is_fp8
    if fp8 != (x_scale is not None):
        raise KernelArgumentError(
            "x_scale", "given" if x_scale is not None else "missing", str(fp8)
        )
    if x_scale is not None:
        check_tensor("x_scale", x_scale, (plan.rows, hidden // GROUP), torch.float32, like=x)
    up_tile, down_tile = _tiles(weights.architecture, fp8=fp8, regime=regime)
    if plan.block_m != up_tile["BLOCK_M"]:
        raise KernelArgumentError(
            "plan", f"made for tiles of {plan.block_m} rows", f"{up_tile['BLOCK_M']} for {regime}"
        )
    narrow = torch.float16 if x.dtype is torch.float16 else torch.bfloat16
    act = torch.empty((plan.rows, inter), dtype=x.dtype, device=x.device)
    act_scale = None
    if fp8:
        act_scale = torch.empty((plan.rows, inter // GROUP), dtype=torch.float32, device=x.device)
    y = torch.empty((plan.rows, hidden), dtype=narrow, device=x.device)
    kind = {"fp8": fp8, "apart": isinstance(weights, ApartWeights)}
    up = _constants(inter, hidden, swiglu=True, **kind)
    down = _constants(hidden, inter, swiglu=False, **kind)
    _launch(x, x_scale, weights.gate_up, weights.gate_up_scale, act, act_scale, plan, up_tile, up)
    _launch(act, act_scale, weights.down, weights.down_scale, y, None, plan, down_tile, down)
    return y


def _launch(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    plan: Plan,
    shape: Tile,
    constants: dict[str, Any],
) -> None:
    grid = plan.tiles * triton.cdiv(out.shape[1], shape["BLOCK_N"])
    if not grid:
        return
    _grouped[(grid,)](
        x,
        x if x_scale is None else x_scale,
        w,
        w if w_scale is None else w_scale,
        out,
        out if out_scale is None else out_scale,
        plan.tile_slot,
        plan.tile_rows,
        plan.tiles,
        **constants,
        **shape.blocks,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def _constants(columns: int, depth: int, *, swiglu: bool, fp8: bool, apart: bool) -> dict[str, Any]:
    return {"N": columns, "K": depth, "SWIGLU": swiglu, "FP8": fp8, "APART": apart}


def expert_ffn(
    x: torch.Tensor,
    slots: torch.Tensor,
    pair_weights: torch.Tensor,
    weights: SlotWeights | ApartWeights,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``x [tokens, hidden]`` bf16 (fp16 for fp16 weights), ``slots [tokens, k]`` int32 (another
    number than a slot's: not here) and ``pair_weights [tokens, k]`` fp32 -> each token's weighted
    sum, ``[tokens, hidden]`` of ``dtype``.

    Raises ``KernelArgumentError`` and ``UnsupportedArchitecture``.
    """
    narrow = torch.float16 if weights.dtype is torch.float16 else torch.bfloat16
    check_tensor("slots", slots, (None, None), torch.int32, like=weights.down)
    check_tensor("x", x, (slots.shape[0], weights.hidden), narrow, like=slots)
    regime = regime_of(slots.numel(), weights.num_slots)
    made = plan(slots, weights.num_slots, block_m_of(weights, regime))
    if weights.is_fp8:
        values, scales = quantise(x)  # before the rows are multiplied: k times fewer
        y = grouped_ffn(permute(values, made), made, weights, regime, permute(scales, made))
    else:
        y = grouped_ffn(permute(x, made), made, weights, regime)
    return unpermute(y, pair_weights, made, dtype)


def reference_ffn(
    x: torch.Tensor, slots: torch.Tensor, pair_weights: torch.Tensor, weights: SlotWeights
) -> torch.Tensor:
    """What ``expert_ffn`` computes, in plain torch, fp32 but for the roundings that it makes."""
    out = torch.zeros(x.shape[0], weights.hidden, dtype=torch.float32, device=x.device)
    for slot in range(weights.num_slots):
        gate_up, down, rows = weights.gate_up[slot], weights.down[slot], x.float()
        if weights.gate_up_scale is not None and weights.down_scale is not None:
            gate_up = dequantise(gate_up, weights.gate_up_scale[slot])
            down = dequantise(down, weights.down_scale[slot])
            rows = rounded_rows(x)
        for token, choice in torch.nonzero(slots == slot).tolist():
            gate, up = (rows[token] @ gate_up.float().T).chunk(2)
            act = silu(gate) * up
            act = rounded_rows(act[None])[0] if weights.is_fp8 else act.to(x.dtype).float()
            row = (act @ down.float().T).to(x.dtype).float()
            out[token] += pair_weights[token, choice] * row
    return out


def variants(architecture: int) -> tuple[Variant, ...]:
    """DeepSeek-V3's experts: hidden 7168, intermediate 2048."""
    hidden, inter = 7168, 2048
    found = []
    kinds = [(False, False), (False, True)]  # FP8, apart
    if architecture in FP8_ARCHITECTURES:
        kinds += [(True, False), (True, True)]
    for fp8, apart in kinds:
        regimes: tuple[Regime, ...] = ("decode", "prefill")
        for regime in regimes:
            shapes = _tiles(architecture, fp8=fp8, regime=regime)
            for swiglu, shape in zip((True, False), shapes, strict=True):
                kind = "fp8e4nv" if fp8 else "bf16"
                name = f"{'FP8' if fp8 else 'bf16'} {regime}{', apart' if apart else ''}"
                found.append(
                    Variant(
                        kernel="grouped_gemm." + ("gate_up" if swiglu else "down"),
                        name=name,
                        function=_grouped,
                        signature={
                            "x": f"*{kind}:16",
                            "x_scale": "*fp32:16",
                            "w": "*i64:16" if apart else f"*{kind}:16",
                            "w_scale": "*fp32:16",
                            "out": f"*{kind if swiglu else 'bf16'}:16",
                            "out_scale": "*fp32:16",
                            "tile_slot": "*i32:16",
                            "tile_rows": "*i32:16",
                            "tiles": "i32",
                        },
                        constexprs={
                            **_constants(
                                inter if swiglu else hidden,
                                hidden if swiglu else inter,
                                swiglu=swiglu,
                                fp8=fp8,
                                apart=apart,
                            ),
                            **shape.blocks,
                        },
                        num_warps=shape.num_warps,
                        num_stages=shape.num_stages,
                        hot=True,
                        expects=_matrix_instruction(architecture, fp8=fp8),
                    )
                )
    return tuple(found)


def _matrix_instruction(architecture: int, *, fp8: bool) -> str:
    """The SASS instruction that multiplies the tiles: Ampere's of a warp, Hopper's of four warps,
    Blackwell's of a thread. Their names tell FP8 from 16 bits.
    """
    if architecture == 80:
        return r"HMMA\.\S*\.BF16"
    if architecture == 90:
        return r"QGMMA\.\S*\.E4M3" if fp8 else r"HGMMA\.\S*\.BF16"
    return r"UTCQMMA\S*" if fp8 else r"UTCHMMA\S*"
