"""Both kinds of attention on a device. Softmax scales are part of the queries' weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from ep_kernels.triton.attention import CacheRows, attend
from ep_kernels.triton.rows import latent_rows, rotate
from torch.nn.functional import linear

from moe_model.architecture import GqaSpec, MlaSpec, RopeSpec
from moe_model.attention.absorb import read_matrices
from moe_model.attention.gqa import paired_projections
from moe_model.device.plan import DevicePlan

Place = Callable[[torch.Tensor], torch.Tensor]
"""Puts a tensor of the checkpoint on the device, in the type that weights have there."""


class DeviceLatentAttention:
    """One layer of multi-head latent attention, always on latents (see ``attention.absorb``).
    ``weights`` maps the roles of ``moe_model.tensors`` to tensors.
    """

    def __init__(
        self, spec: MlaSpec, rope: RopeSpec, weights: dict[str, torch.Tensor], place: Place
    ) -> None:
        self._spec = spec
        matrices = read_matrices(spec, rope, weights)
        q = matrices.q.flatten(0, 1).float() * spec.softmax_scale
        self._q_b = None if spec.q_lora_rank is None else place(q)
        first = q if spec.q_lora_rank is None else weights["q_a"].float()
        self._a = place(torch.cat([first, matrices.kv_a.float()]))
        bias = matrices.kv_a_bias
        if bias is not None:
            front = weights.get("q_a_bias", bias.new_zeros(first.shape[0]))
            bias = place(torch.cat([front, bias]))
        self._a_bias = bias
        place_fp32 = self._a.device
        norms = (weights.get("q_a_norm"), weights["kv_a_norm"])
        self._query_norm, latent_norm = (
            None if norm is None else norm.float().contiguous().to(place_fp32) for norm in norms
        )
        assert latent_norm is not None
        self._latent_norm = latent_norm
        self._key_up = place(matrices.key_up)  # [heads, nope, latent]
        self._value_up = place(matrices.value_up.transpose(1, 2))  # [heads, latent, value]
        self._o = place(weights["o"])
        self._o_bias = place(weights["o_bias"]) if "o_bias" in weights else None

    def rows(self, block_size: int) -> CacheRows:
        """How a cache of these blocks is laid out."""
        return CacheRows(1, self._spec.cache_width, self._spec.kv_lora_rank, 0, block_size)

    def __call__(self, x: torch.Tensor, plan: DevicePlan, cache: torch.Tensor) -> torch.Tensor:
        """``x [n, hidden]`` (normed) -> ``[n, hidden]``; writes the step's rows to ``cache``, one
        layer's ``[rows, width]``.
        """
        spec = self._spec
        query = latent_rows(
            linear(x, self._a, self._a_bias),
            self._query_norm,
            self._latent_norm,
            spec.latent_norm_eps,
            plan.turn,
            plan.cache_rows,
            cache,
        )
        q = query if self._q_b is None else linear(query, self._q_b)
        q = q.view(plan.num_tokens, spec.num_heads, spec.qk_head_dim)
        turned = q[..., spec.qk_nope_head_dim :].contiguous()  # [n, heads, rotary]
        rotate(turned, plan.turn)
        latents = torch.bmm(q[..., : spec.qk_nope_head_dim].transpose(0, 1), self._key_up)
        absorbed = torch.cat((latents.transpose(0, 1), turned), 2)  # [n, heads, latent + rotary]
        rows = self.rows(plan.block_size)
        seen = attend(absorbed, cache, plan.queries, rows).to(x.dtype)  # [n, heads, latent]
        values = torch.bmm(seen.transpose(0, 1), self._value_up)  # [heads, n, value]
        return linear(values.transpose(0, 1).flatten(1), self._o, self._o_bias)


class DeviceGroupedAttention:
    """One layer of grouped-query attention. ``weights`` maps the roles q, k, v, o."""

    def __init__(
        self, spec: GqaSpec, rope: RopeSpec, weights: dict[str, torch.Tensor], place: Place
    ) -> None:
        self._spec = spec
        q, k = paired_projections(spec, rope, weights)
        scaled = q.float() * spec.softmax_scale
        self._qkv = place(torch.cat([scaled, k.float(), weights["v"].float()]))
        self._o = place(weights["o"])

    def rows(self, block_size: int) -> CacheRows:
        """As ``DeviceLatentAttention``."""
        heads, dim = self._spec.num_kv_heads, self._spec.head_dim
        window = self._spec.sliding_window or 0
        return CacheRows(heads, dim, dim, heads * dim, block_size, window)

    def __call__(self, x: torch.Tensor, plan: DevicePlan, cache: torch.Tensor) -> torch.Tensor:
        """As ``DeviceLatentAttention``."""
        spec, dim = self._spec, self._spec.head_dim
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        q, k, v = torch.split_with_sizes(
            linear(x, self._qkv), [heads * dim, kv_heads * dim, kv_heads * dim], 1
        )
        q = q.reshape(-1, heads, dim).contiguous()
        k = k.reshape(-1, kv_heads, dim).contiguous()
        rotate(q, plan.turn)
        rotate(k, plan.turn)
        cache.index_copy_(0, plan.cache_rows, torch.cat((k.flatten(1), v), 1))
        rows = self.rows(plan.block_size)
        seen = attend(q, cache, plan.queries, rows).to(x.dtype)  # [n, heads, head_dim]
        return linear(seen.flatten(1), self._o)
