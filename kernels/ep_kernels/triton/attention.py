"""Attention over the paged cache: latent (MLA) or grouped-query, decode and chunked prefill alike.

A cache row holds all that a token leaves behind in one layer. Key head ``h`` is values
``h * key_dim`` and following of it; its value lies ``value_offset + h * value_dim`` from the row's
start. Latent attention (DeepSeek-V2, arXiv 2405.04434, with absorbed projections) is one key head
whose value is the front of the key, so that a tile is read once for both.

A program takes the query rows of one key head (heads that share it, and tokens) over one share of
the keys: split-KV (Flash-Decoding) keeps a card busy when there are few queries and long contexts.
``_reduce`` joins the shares. Softmax is online, in base 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ep_kernels.triton.arguments import KernelArgumentError, check_positive, check_tensor
from ep_kernels.triton.registry import Variant
from ep_kernels.triton.tuning import INTERPRETED, Tile, architecture_of, tile

_LOG2_E = tl.constexpr(1.4426950408889634)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_SPLITS = 32
_WANTED_PROGRAMS = 264
"""Two for each of Hopper's 132 multiprocessors."""


@dataclass(frozen=True, slots=True)
class CacheRows:
    """How a cache row is laid out; ``window`` limits how many keys a query sees (0: all).

    ``shared`` is true when a head's value is the front of its key (``value_offset`` 0, one head).
    """

    heads: int
    key_dim: int
    value_dim: int
    value_offset: int
    block_size: int
    window: int = 0

    def __post_init__(self) -> None:
        sizes = (self.heads, self.key_dim, self.value_dim, self.block_size)
        if min(sizes) < 1 or self.value_offset < 0 or self.window < 0:
            raise KernelArgumentError("rows", str(self), "positive sizes")
        if self.value_offset == 0 and (self.heads != 1 or self.value_dim > self.key_dim):
            raise KernelArgumentError("rows", str(self), "values behind the keys, or one head")

    @property
    def shared(self) -> bool:
        return self.value_offset == 0


@dataclass(frozen=True, slots=True)
class Queries:
    """Whose the query rows are; all int32 on the device.

    ``begins [sequences + 1]``: rows of ``q``; ``contexts [sequences]``: keys in the cache, those of
    the queries included; ``blocks [sequences, most blocks]``. ``most_queries`` of a sequence and
    ``most_context`` bound what a launch must cover, known to the host without asking the device.
    """

    begins: torch.Tensor
    contexts: torch.Tensor
    blocks: torch.Tensor
    most_queries: int
    most_context: int


@triton.jit(do_not_specialize=["most_blocks", "tokens"])
def _attend(
    q: tl.tensor,  # [tokens, HEADS * SHARED, KEY], scaled and rotated
    cache: tl.tensor,  # [blocks * BLOCK, stride]
    stride: tl.tensor,
    begins: tl.tensor,
    contexts: tl.tensor,
    blocks: tl.tensor,
    most_blocks: tl.tensor,
    tokens: tl.tensor,
    out: tl.tensor,  # [splits, tokens, HEADS * SHARED, VALUE] fp32
    lse: tl.tensor,  # [splits, tokens, HEADS * SHARED] fp32, base 2
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    OFFSET: tl.constexpr,
    LATENT: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    FRONT: tl.constexpr,
    TAIL: tl.constexpr,
    VALUE_P2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Grid: row blocks * SPLITS, HEADS, sequences."""
    split = tl.program_id(0) % SPLITS
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(begins + sequence)
    count = tl.load(begins + sequence + 1) - first
    context = tl.load(contexts + sequence)
    m = tl.program_id(0) // SPLITS * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < count * SHARED
    low_m = tl.program_id(0) // SPLITS * BLOCK_M
    if low_m < count * SHARED:
        token = m // SHARED
        position = context - count + token  # [BLOCK_M], of the query among the keys
        high_token = tl.minimum((low_m + BLOCK_M - 1) // SHARED, count - 1)
        end = context - count + high_token + 1
        begin = 0
        if WINDOW:
            begin = tl.maximum(context - count + low_m // SHARED + 1 - WINDOW, 0)
            begin = begin // BLOCK_N * BLOCK_N
        # Shares are whole tiles, as even as can be.
        tiles = (end - begin + BLOCK_N - 1) // BLOCK_N
        share = (tiles + SPLITS - 1) // SPLITS
        low = begin + split * share * BLOCK_N
        high = tl.minimum(low + share * BLOCK_N, end)

        column = tl.arange(0, FRONT)
        row = ((first + token) * HEADS + head).to(tl.int64) * SHARED + m % SHARED
        inside = live[:, None] & (column < KEY)[None, :]
        query = tl.load(q + row[:, None] * KEY + column[None, :], inside, 0.0).to(DOT)
        if TAIL:
            tail = FRONT + tl.arange(0, TAIL)
            has_tail = live[:, None] & (tail < KEY)[None, :]
            query_tail = tl.load(q + row[:, None] * KEY + tail[None, :], has_tail, 0.0).to(DOT)
        value_column = tl.arange(0, VALUE_P2)
        acc = tl.full((BLOCK_M, VALUE_P2), 0.0, tl.float32)
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.full((BLOCK_M,), 0.0, tl.float32)
        for at in range(low, high, BLOCK_N):
            n = at + tl.arange(0, BLOCK_N)
            there = n < high
            block = tl.load(blocks + sequence * most_blocks + n // BLOCK, there, 0)
            key_row = cache + (block.to(tl.int64) * BLOCK + n % BLOCK) * stride  # [BLOCK_N]
            keys = key_row + head * KEY
            fits = there[:, None] & (column < KEY)[None, :]
            key = tl.load(keys[:, None] + column[None, :], fits, 0.0).to(DOT)
            score = tl.dot(query, tl.trans(key), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
            if TAIL:
                fits_tail = there[:, None] & (tail < KEY)[None, :]
                key_tail = tl.load(keys[:, None] + tail[None, :], fits_tail, 0.0).to(DOT)
                score = tl.dot(query_tail, tl.trans(key_tail), score, input_precision="ieee")
            seen = there[None, :] & (n[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (n[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score * _LOG2_E, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(score, 1))
            # A row that has seen no key yet has no peak to subtract.
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            power = tl.exp2(score - base[:, None])
            shrink = tl.exp2(peak - base)
            total = total * shrink + tl.sum(power, 1)
            if LATENT:
                value = key
            else:
                values = key_row + OFFSET + head * VALUE
                fits_value = there[:, None] & (value_column < VALUE)[None, :]
                value = tl.load(values[:, None] + value_column[None, :], fits_value, 0.0).to(DOT)
            acc = acc * shrink[:, None]
            acc = tl.dot(power.to(DOT), value, acc, input_precision="ieee")
            peak = new_peak
        to = split.to(tl.int64) * tokens * HEADS * SHARED + row
        valued = live[:, None] & (value_column < VALUE)[None, :]
        some = tl.where(total > 0.0, total, 1.0)
        result = acc / some[:, None]
        tl.store(out + to[:, None] * VALUE + value_column[None, :], result, valued)
        level = tl.where(total > 0.0, peak + tl.log2(some), float("-inf"))
        tl.store(lse + to, level, live)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["last"])
def _reduce(
    parts: tl.tensor,  # [SPLITS, rows, VALUE] fp32
    lse: tl.tensor,  # [SPLITS, rows] fp32
    out: tl.tensor,  # [rows, VALUE]
    rows: tl.tensor,
    last: tl.tensor,  # begins + sequences: rows beyond its value have no query
    heads: tl.tensor,
    VALUE: tl.constexpr,
    VALUE_P2: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Grid: rows. Joins the shares of the keys by the weight that each holds."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(last).to(tl.int64) * heads:
        column = tl.arange(0, VALUE_P2)
        peak = tl.load(lse + row)
        for split in range(1, SPLITS):
            peak = tl.maximum(peak, tl.load(lse + split * rows.to(tl.int64) + row))
        total = tl.full((), 0.0, tl.float32)
        acc = tl.full((VALUE_P2,), 0.0, tl.float32)
        for split in range(SPLITS):
            at = split * rows.to(tl.int64) + row
            weight = tl.exp2(tl.load(lse + at) - peak)
            acc += weight * tl.load(parts + at * VALUE + column, column < VALUE, 0.0)
            total += weight
        tl.store(out + row * VALUE + column, acc / total, column < VALUE)


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    queries: Queries,
    rows: CacheRows,
    *,
    splits: int | None = None,
) -> torch.Tensor:
    """``q [tokens, heads, key_dim]``, scaled and rotated, over ``cache [slots, stride]`` of the
    same dtype (fp32, bf16 or fp16) -> ``[tokens, heads, value_dim]`` fp32.

    A query sees the keys of its sequence up to its own position. Sequences may have no query.
    ``splits`` of the keys (None: as many as keep a card busy). Raises ``KernelArgumentError``.
    """
    check_tensor("q", q, (None, None, rows.key_dim), *_DTYPES)
    tokens, heads, _ = q.shape
    if heads < 1 or heads % rows.heads:
        raise KernelArgumentError("q", f"{heads} heads", f"a multiple of {rows.heads}")
    width = max(rows.heads * rows.key_dim, rows.value_offset + rows.heads * rows.value_dim)
    if cache.dim() != 2 or cache.stride(1) != 1 or cache.shape[1] < width:
        raise KernelArgumentError("cache", f"of shape {list(cache.shape)}", f"[slots, {width}]")
    if cache.dtype != q.dtype or cache.device != q.device:
        raise KernelArgumentError("cache", f"{cache.dtype} on {cache.device}", "as q is")
    _check_queries(queries, q)
    sequences = queries.contexts.shape[0]
    architecture = architecture_of(q.device)
    shared = heads // rows.heads
    name = "attention.latent" if rows.shared else "attention.grouped"
    shape = tile(name, architecture)
    m_blocks = triton.cdiv(queries.most_queries * shared, shape["BLOCK_M"])
    if splits is None:
        programs = m_blocks * rows.heads * sequences
        splits = splits_for(programs, queries.most_context, shape["BLOCK_N"])
    check_positive("splits", splits)
    # One share needs no joining: it is the result.
    parts = torch.empty((splits, tokens, heads, rows.value_dim), device=q.device)
    lse = torch.empty((splits, tokens, heads), device=q.device)
    if tokens == 0 or sequences == 0:
        return parts[0]
    _attend[(m_blocks * splits, rows.heads, sequences)](
        q,
        cache,
        cache.stride(0),
        queries.begins,
        queries.contexts,
        queries.blocks,
        queries.blocks.shape[1],
        tokens,
        parts,
        lse,
        **_constants(rows, shared, splits, shape, _dot(q.dtype, architecture)),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if splits == 1:
        return parts[0]
    out = torch.empty((tokens, heads, rows.value_dim), device=q.device)
    reducing = tile("attention.reduce", architecture)
    _reduce[(tokens * heads,)](
        parts,
        lse,
        out,
        tokens * heads,
        queries.begins[-1:],
        heads,
        VALUE=rows.value_dim,
        VALUE_P2=triton.next_power_of_2(rows.value_dim),
        SPLITS=splits,
        num_warps=reducing.num_warps,
    )
    return out


def splits_for(programs: int, most_context: int, block_n: int) -> int:
    """How many shares of the keys: enough programs for a card, and no share under four tiles. A
    power of two, since each number is a kernel of its own.
    """
    wanted = _WANTED_PROGRAMS // max(1, programs)
    most = max(1, min(wanted, most_context // (4 * block_n), MOST_SPLITS))
    return 1 << (most.bit_length() - 1)


def _check_queries(queries: Queries, q: torch.Tensor) -> None:
    check_tensor("contexts", queries.contexts, (None,), torch.int32, like=q)
    sequences = queries.contexts.shape[0]
    check_tensor("begins", queries.begins, (sequences + 1,), torch.int32, like=q)
    check_tensor("blocks", queries.blocks, (sequences, None), torch.int32, like=q)
    check_positive("most_queries", queries.most_queries)
    check_positive("most_context", queries.most_context)


def _dot(dtype: torch.dtype, architecture: int) -> Any:
    """What products take: the interpreter knows bf16 as bits alone."""
    if architecture == INTERPRETED:
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[
        dtype
    ]


def _constants(rows: CacheRows, shared: int, splits: int, shape: Tile, dot: Any) -> dict[str, Any]:
    # Of a latent row the front is the value; the rest of the key, the rotary part, is apart.
    front = rows.value_dim if rows.shared else rows.key_dim
    front_p2 = max(16, triton.next_power_of_2(front))
    tail = rows.key_dim - front if rows.shared and front == front_p2 else 0
    if rows.shared and front != front_p2:
        front_p2 = max(16, triton.next_power_of_2(rows.key_dim))
    return {
        "HEADS": rows.heads,
        "SHARED": shared,
        "KEY": rows.key_dim,
        "VALUE": rows.value_dim,
        "OFFSET": rows.value_offset,
        "LATENT": rows.shared,
        "WINDOW": rows.window,
        "BLOCK": rows.block_size,
        "SPLITS": splits,
        "FRONT": front_p2,
        "TAIL": max(16, triton.next_power_of_2(tail)) if tail else 0,
        "VALUE_P2": front_p2 if rows.shared else max(16, triton.next_power_of_2(rows.value_dim)),
        "BLOCK_M": shape["BLOCK_M"],
        "BLOCK_N": shape["BLOCK_N"],
        "DOT": dot,
    }


def reference_attend(
    q: torch.Tensor, cache: torch.Tensor, queries: Queries, rows: CacheRows
) -> torch.Tensor:
    """``attend`` in plain torch, in fp64. Rows of no sequence are NaN."""
    tokens, heads, _ = q.shape
    out = torch.full((tokens, heads, rows.value_dim), float("nan"), dtype=torch.float64)
    shared = heads // rows.heads
    begins = queries.begins.tolist()
    for sequence, context in enumerate(queries.contexts.tolist()):
        first, count = begins[sequence], begins[sequence + 1] - begins[sequence]
        positions = torch.arange(context)
        block = queries.blocks[sequence].cpu()[positions // rows.block_size].long()
        keys = cache[block * rows.block_size + positions % rows.block_size].cpu().double()
        for i in range(count):
            high = context - count + i + 1
            low = max(0, high - rows.window) if rows.window else 0
            for head in range(heads):
                kv = head // shared
                key = keys[low:high, kv * rows.key_dim : (kv + 1) * rows.key_dim]
                at = rows.value_offset + kv * rows.value_dim
                weights = torch.softmax(key @ q[first + i, head].cpu().double(), 0)
                out[first + i, head] = weights @ keys[low:high, at : at + rows.value_dim]
    return out.float()


def variants(architecture: int) -> tuple[Variant, ...]:
    """Latent attention at DeepSeek-V3's sizes, grouped-query at Qwen3's, decode and prefill."""
    cases = {
        "latent": (CacheRows(1, 576, 512, 0, 64), 128, 8),
        "grouped": (CacheRows(4, 128, 128, 512, 64), 8, 8),
    }
    instruction = {80: r"HMMA\.\S+", 90: r"HGMMA\.\S+", 100: ""}[architecture]
    found = []
    for name, (rows, shared, splits) in cases.items():
        shape = tile(f"attention.{name}", architecture)
        found.append(
            Variant(
                kernel="attention.attend",
                name=f"{name}, bf16",
                function=_attend,
                signature={
                    "q": "*bf16:16",
                    "cache": "*bf16:16",
                    "stride": "i32:16",
                    "begins": "*i32:16",
                    "contexts": "*i32:16",
                    "blocks": "*i32:16",
                    "most_blocks": "i32",
                    "tokens": "i32",
                    "out": "*fp32:16",
                    "lse": "*fp32:16",
                },
                constexprs=_constants(rows, shared, splits, shape, tl.bfloat16),
                num_warps=shape.num_warps,
                num_stages=shape.num_stages,
                hot=True,
                expects=instruction,
            )
        )
        reducing = tile("attention.reduce", architecture)
        found.append(
            Variant(
                kernel="attention.reduce",
                name=name,
                function=_reduce,
                signature={
                    "parts": "*fp32:16",
                    "lse": "*fp32:16",
                    "out": "*fp32:16",
                    "rows": "i32",
                    "last": "*i32",
                    "heads": "i32",
                },
                constexprs={
                    "VALUE": rows.value_dim,
                    "VALUE_P2": rows.value_dim,
                    "SPLITS": splits,
                },
                num_warps=reducing.num_warps,
                num_stages=1,
                hot=True,
            )
        )
    return tuple(found)
