"""How much memory a KV cache takes, without torch: for what is checked before weights are read."""

from __future__ import annotations

from moe_model.architecture import ModelSpec
from moe_model.shard import Shard

_ALIGN_VALUES = 16
_VALUE_BYTES = 4


def row_stride(width: int) -> int:
    """Values between the starts of two rows: ``width`` rounded up to a cache line."""
    return -(-width // _ALIGN_VALUES) * _ALIGN_VALUES


def kv_cache_fault(spec: ModelSpec, cache_bytes: int, block_size: int, size: int = 1) -> str:
    """Why a cache of ``cache_bytes`` in each of a router's ``size`` processes is too small, in
    words and numbers; empty where a sequence of the model's full context fits.

    Clients may ask for that much, and a chat that names no ``max_tokens`` does.
    """
    stride = row_stride(Shard(spec, 0, size).attention.cache_width)
    block_bytes = _VALUE_BYTES * spec.num_layers * stride * block_size
    blocks = -(-spec.max_context // block_size)
    if cache_bytes >= blocks * block_bytes:
        return ""
    return (
        f"expected 0 or at least {blocks * block_bytes}, one sequence of the model's context: "
        f"{spec.max_context} tokens = {blocks} blocks of {block_size} tokens x {spec.num_layers} "
        f"layers x {stride} values x {_VALUE_BYTES} bytes"
    )
