"""Tensor parallelism: which part of a router's tensors each rank of a group holds. Torch-free.

As in Megatron-LM (arXiv 1909.08053): attention is divided by heads, dense layers and shared experts
by their intermediate width, embedding and head by vocabulary. What goes in is cut by rows and what
comes out by columns, so that the ranks' results of a layer are sums to be added up. Norms, latents
and their projections are the same on every rank; the gate and a bias that would count several times
belong to rank 0 alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from moe_model.architecture import AttentionSpec, MlaSpec, ModelSpec

_ONLY_FIRST = frozenset({"router", "router_bias", "o_bias"})
_ROWS, _COLUMNS = 0, 1


@dataclass(frozen=True, slots=True)
class Cut:
    """``start .. stop - 1`` along ``dim`` of a tensor."""

    dim: int
    start: int
    stop: int


class Shard:
    """The part of rank ``rank`` in a group of ``size``, for which ``shard_fault`` must be empty.

    ``attention``: the attention that this rank computes, with its own heads only.
    """

    def __init__(self, spec: ModelSpec, rank: int = 0, size: int = 1) -> None:
        assert 0 <= rank < size
        self.rank = rank
        self.size = size
        self.attention = _attention(spec.attention, size)
        self._cuts = {} if size == 1 else self._cut_all(spec)

    def holds(self, role: str) -> bool:
        """Whether this rank needs the tensor that plays ``role``."""
        return self.rank == 0 or role not in _ONLY_FIRST

    def cut(self, role: str) -> Cut | None:
        """The part of it that this rank needs; None for all."""
        return self._cuts.get(role)

    def _cut_all(self, spec: ModelSpec) -> dict[str, Cut]:
        vocabulary = self._even(_ROWS, spec.vocab_size)
        cuts = {"embedding": vocabulary, "head": vocabulary}
        for kind, width in (
            ("dense", spec.dense_intermediate),
            ("shared", spec.shared_intermediate),
        ):
            cuts[f"{kind}_gate"] = cuts[f"{kind}_up"] = self._even(_ROWS, width)
            cuts[f"{kind}_down"] = self._even(_COLUMNS, width)
        whole = spec.attention
        if isinstance(whole, MlaSpec):
            cuts["q"] = cuts["q_b"] = self._heads(_ROWS, whole.num_heads, whole.qk_head_dim)
            up = whole.qk_nope_head_dim + whole.v_head_dim
            cuts["kv_b"] = self._heads(_ROWS, whole.num_heads, up)
            cuts["o"] = self._heads(_COLUMNS, whole.num_heads, whole.v_head_dim)
        else:
            cuts["q"] = self._heads(_ROWS, whole.num_heads, whole.head_dim)
            cuts["k"] = cuts["v"] = self._heads(_ROWS, whole.num_kv_heads, whole.head_dim)
            cuts["o"] = self._heads(_COLUMNS, whole.num_heads, whole.head_dim)
        return cuts

    def _heads(self, dim: int, heads: int, width: int) -> Cut:
        """The rank's heads; where there are fewer than ranks, the one that it shares."""
        first = self.rank * heads // self.size
        return Cut(dim, first * width, (first + max(1, heads // self.size)) * width)

    def _even(self, dim: int, width: int) -> Cut:
        return Cut(dim, self.rank * width // self.size, (self.rank + 1) * width // self.size)


def shard_fault(spec: ModelSpec, size: int) -> str:
    """Why a group of ``size`` cannot share the model, in words and numbers; empty when it can.

    Heads are whole. Grouped-query key heads may be fewer than ranks, if equally many ranks share
    each. Other widths need not divide evenly.
    """
    attention = spec.attention
    heads = attention.num_heads
    if heads % size:
        return f"{heads} attention heads / {size} = {heads / size:.4g} heads a rank, expected whole"
    if not isinstance(attention, MlaSpec):
        keys = attention.num_kv_heads
        if keys % size and size % keys:
            return (
                f"{keys} key heads / {size} = {keys / size:.4g} heads a rank, and {size} / {keys} "
                f"= {size / keys:.4g} ranks a head: expected one of them whole"
            )
    for what, width in (
        ("the vocabulary", spec.vocab_size),
        ("the dense layers' width", spec.dense_intermediate),
        ("the shared expert's width", spec.shared_intermediate),
    ):
        if 0 < width < size:
            return f"{what} of {width} / {size} is less than 1 a rank"
    return ""


def _attention(whole: AttentionSpec, size: int) -> AttentionSpec:
    if size == 1:
        return whole
    heads = whole.num_heads // size
    if isinstance(whole, MlaSpec):
        return msgspec.structs.replace(whole, num_heads=heads)
    return msgspec.structs.replace(
        whole, num_heads=heads, num_kv_heads=max(1, whole.num_kv_heads // size)
    )
