"""Absorbing latent attention's up-projection into its neighbours.

``kv_b`` expands a latent into a key and a value per head. Since ``q . (U c) = (U^T q) . c``, its
key half can act on the query and its value half on the attention's output, and the cache never
leaves latent form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from ep_kernels.half import HalfMatrices
from ep_kernels.packed import (
    Kind,
    PackedLinear,
    Storage,
    is_dispatch_bound,
    keep,
    pack_linear,
)

from moe_model.architecture import MlaSpec, RopeSpec
from moe_model.rope import pair_order

_FEW_TOKENS = 4
"""Up to this many tokens the matrices are the left factor (measured: 1.5 to 2 times as fast)."""


_HALVES = {Storage.FP16, Storage.TILES}


class Absorption(Protocol):
    """Both halves of ``kv_b`` at work."""

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """``[n, heads, query head]`` -> ``[n, heads, latent + rotary]``."""

    def expand(self, latents: torch.Tensor) -> torch.Tensor:
        """``[n, heads, latent]`` -> ``[n, what the output projection reads]``."""


class Folded:
    """The neighbours' matrices already contain ``kv_b`` (see ``fold_query``, ``fold_output``)."""

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        return q

    def expand(self, latents: torch.Tensor) -> torch.Tensor:
        return latents.flatten(1)


class Batched:
    """fp32: one batched product over the heads each way.

    Reading the matrices bounds a few tokens, and only matrix times vector does that at full speed;
    many tokens are the left factor, as a GEMM wants them.
    """

    def __init__(self, matrices: LatentMatrices) -> None:
        self._nope = matrices.key_up.shape[1]
        self._key_up = matrices.key_up.float().transpose(1, 2).contiguous()  # [heads, latent, nope]
        self._value_up = matrices.value_up.float().contiguous()  # [heads, value, latent]

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        latents = _over_heads(self._key_up, q[..., : self._nope])
        return torch.cat((latents, q[..., self._nope :]), 2)

    def expand(self, latents: torch.Tensor) -> torch.Tensor:
        return _over_heads(self._value_up, latents).flatten(1)


class Half:
    """16 bits: all heads' products in one call each way."""

    def __init__(self, key_up: torch.Tensor, value_up: torch.Tensor) -> None:
        """``key_up [heads, latent, nope]``, ``value_up [heads, value, latent]``, of one 16-bit
        type.
        """
        self.key_up, self.value_up = HalfMatrices(key_up), HalfMatrices(value_up)

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        nope, latent = self.key_up.inputs, self.key_up.outputs
        out = q.new_empty(q.shape[0], q.shape[1], latent + q.shape[2] - nope)
        self.key_up.into(q[..., :nope], out[..., :latent])
        out[..., latent:] = q[..., nope:]
        return out

    def expand(self, latents: torch.Tensor) -> torch.Tensor:
        out = latents.new_empty(latents.shape[0], latents.shape[1], self.value_up.outputs)
        self.value_up.into(latents, out)
        return out.flatten(1)


def by_heads(matrices: LatentMatrices, kind: Kind) -> Batched | Half:
    """``kv_b`` as it is best kept, see ``ep_kernels.packed.keep``."""
    key_up = matrices.key_up.transpose(1, 2)  # [heads, latent, nope]
    kept = [keep(each.flatten(0, 1), kind) for each in (key_up, matrices.value_up)]
    if kept[0].storage is not kept[1].storage or kept[0].storage not in _HALVES:
        return Batched(matrices)
    return Half(kept[0].values.view(key_up.shape), kept[1].values.view(matrices.value_up.shape))


def _over_heads(matrices: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``matrices [heads, out, in]``, ``x [n, heads, in]`` -> ``[n, heads, out]``."""
    if x.shape[0] <= _FEW_TOKENS:
        return torch.bmm(matrices, x.permute(1, 2, 0)).permute(2, 0, 1)
    return torch.bmm(x.transpose(0, 1), matrices.transpose(1, 2)).transpose(0, 1)


class PerHead:
    """One exact packed matrix a head each way: rows do not depend on their company."""

    def __init__(self, matrices: LatentMatrices, kind: Kind) -> None:
        self._nope = matrices.key_up.shape[1]
        self._absorb = [pack_linear(head.t(), kind, exact=True) for head in matrices.key_up]
        self._expand = [pack_linear(head, kind, exact=True) for head in matrices.value_up]

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        latents = _each_head(self._absorb, q[..., : self._nope])
        return torch.cat((torch.stack(latents, 1), q[..., self._nope :]), 2)

    def expand(self, latents: torch.Tensor) -> torch.Tensor:
        return torch.cat(_each_head(self._expand, latents), 1)


def _each_head(linears: list[PackedLinear], x: torch.Tensor) -> list[torch.Tensor]:
    return [linear(head.contiguous()) for linear, head in zip(linears, x.unbind(1), strict=True)]


@dataclass(frozen=True, slots=True)
class LatentMatrices:
    """A layer's matrices by head, rotary rows in the order that ``moe_model.rope`` turns.

    ``q`` ``[heads, nope + rotary, source]`` (``source``: the query latent, or the hidden state),
    ``kv_a`` ``[latent + rotary, hidden]``, ``key_up`` ``[heads, nope, latent]``, ``value_up``
    ``[heads, value, latent]``, ``o`` ``[hidden, heads, value]``.
    """

    q: torch.Tensor
    kv_a: torch.Tensor
    kv_a_bias: torch.Tensor | None
    key_up: torch.Tensor
    value_up: torch.Tensor
    o: torch.Tensor


def read_matrices(
    spec: MlaSpec, rope: RopeSpec, weights: dict[str, torch.Tensor]
) -> LatentMatrices:
    """Arrange checkpoint tensors, given by the roles of ``moe_model.tensors``."""
    heads, nope, latent = spec.num_heads, spec.qk_nope_head_dim, spec.kv_lora_rank
    q = weights["q" if spec.q_lora_rank is None else "q_b"]
    q = q.view(heads, spec.qk_head_dim, -1)
    kv_a, bias = weights["kv_a"], weights.get("kv_a_bias")
    if not rope.interleaved:
        order = pair_order(spec.qk_rope_head_dim)
        q = torch.cat([q[:, :nope], q[:, nope:][:, order]], 1)
        kv_a = torch.cat([kv_a[:latent], kv_a[latent:][order]])
        bias = None if bias is None else torch.cat([bias[:latent], bias[latent:][order]])
    key_up, value_up = torch.split_with_sizes(
        weights["kv_b"].view(heads, -1, latent), [nope, spec.v_head_dim], 1
    )
    o = weights["o"].view(-1, heads, spec.v_head_dim)
    return LatentMatrices(q, kv_a, bias, key_up, value_up, o)


def folds(spec: MlaSpec, hidden: int) -> bool:
    """Whether the matrices with ``kv_b`` folded in are so small that the calls they save are worth
    more than the work they add.
    """
    source = hidden if spec.q_lora_rank is None else spec.q_lora_rank
    return is_dispatch_bound(spec.num_heads * spec.cache_width, source) and is_dispatch_bound(
        hidden, spec.num_heads * spec.kv_lora_rank
    )


def fold_query(matrices: LatentMatrices) -> torch.Tensor:
    """Query projection that absorbs: ``[heads * (latent + rotary), source]`` fp32."""
    q = matrices.q.double()
    nope = matrices.key_up.shape[1]
    absorbed = matrices.key_up.double().transpose(1, 2) @ q[:, :nope]  # [heads, latent, source]
    return torch.cat([absorbed, q[:, nope:]], 1).flatten(0, 1).float()


def fold_output(matrices: LatentMatrices) -> torch.Tensor:
    """Output projection that expands: ``[hidden, heads * latent]`` fp32."""
    o = matrices.o.double().transpose(0, 1)  # [heads, hidden, value]
    return (o @ matrices.value_up.double()).transpose(0, 1).flatten(1).float()
