"""``RouterModel`` on a device: the same steps, on tensors that lie there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from ep_kernels.gating import GateRule
from ep_kernels.triton.ahead import StepExchange
from ep_kernels.triton.attention import MOST_SPLITS, attend
from ep_kernels.triton.device import Device, Stream
from ep_kernels.triton.gate import gate
from ep_kernels.triton.rows import rms_norm
from ep_kernels.triton.transfer import upload
from torch.nn.functional import embedding, linear, silu

from moe_model.architecture import GqaSpec, ModelSpec
from moe_model.checkpoint import Checkpoint
from moe_model.device.attention import DeviceGroupedAttention, DeviceLatentAttention, Place
from moe_model.device.decode import Frame, Frames, Work, fits
from moe_model.device.experts import DeviceExperts
from moe_model.device.plan import DevicePlan, index_step, plan_on_device
from moe_model.device.sampler import DeviceSampler
from moe_model.experts import ExpertClient
from moe_model.forward import Computed, MakeClient
from moe_model.gate import gate_rule
from moe_model.kv_size import row_stride
from moe_model.model import FFN_PARTS, Reader
from moe_model.plan import Chunk
from moe_model.rope import Rope
from moe_model.shard import Shard
from moe_model.spec import load_spec
from moe_model.tensors import TensorTable

DeviceWeights = Literal["auto", "fp32"]
"""auto: bf16."""


_LOADED = 0.9
"""Progress at which weights are there; compiling what reads the cache is the rest."""


class DeviceCache:
    """See ``KVCache``; ``layers[i]`` is ``[rows, width]`` on the device."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        width: int,
        *,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._device = device
        self.spare_row = num_blocks * block_size
        """Of a block more, which nobody reads."""
        stride = row_stride(width)
        self._blocks = [
            torch.zeros(num_blocks + 1, block_size * stride, dtype=dtype, device=device.place)
            for _ in range(num_layers)
        ]
        self.layers = [blocks.view(-1, stride)[:, :width] for blocks in self._blocks]

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero ``blocks`` in all layers."""
        (index,) = upload(self._device, torch.tensor(blocks))
        for layer in self._blocks:
            layer.index_fill_(0, index, 0.0)


class _SwiGlu:
    """``down(silu(gate x) * up x)``: ``[n, hidden]`` fp32 -> the same."""

    def __init__(
        self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, place: Place
    ) -> None:
        self._gate_up = place(torch.cat([gate, up]))
        self._down = place(down)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self._down.dtype
        gate, up = linear(x.to(dtype), self._gate_up).float().chunk(2, 1)
        return linear(silu(gate).mul_(up).to(dtype), self._down).float()


@dataclass(frozen=True, slots=True)
class _Gate:
    rule: GateRule
    weight: torch.Tensor
    """``[experts, hidden]`` fp32."""
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gate(linear(x, self.weight), self.rule, self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    attention: DeviceLatentAttention | DeviceGroupedAttention
    ffn_norm: torch.Tensor
    dense: _SwiGlu | None
    gate: _Gate | None
    shared: _SwiGlu | None


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """What one process holds of a model on its device: all but the routed experts, or a ``Shard``
    of that.
    """

    spec: ModelSpec
    shard: Shard
    layers: tuple[_Layer, ...]
    table: torch.Tensor
    final_norm: torch.Tensor
    head: torch.Tensor
    rope: Rope
    device: Device
    stream: Stream
    """The loading thread's, which computes as well."""
    progress: Callable[[float], None]


class DeviceModel:
    """See ``RouterModel``: the same methods, whose ``h``, ``x`` and results lie on the device. Made
    by ``load_device_model``, whose thread alone may call it.
    """

    def __init__(self, parts: DeviceParts) -> None:
        self.spec = parts.spec
        self._parts = parts
        self._layers = parts.layers
        self._device = parts.device
        self.stream = parts.stream
        """The calling thread's."""
        self._progress = parts.progress
        self._attention = parts.shard.attention
        self._dtype = parts.head.dtype
        self._kv: DeviceCache | None = None
        self._frames: Frames | None = None
        self._frame: Frame | None = None
        """Of the micro-batch whose layer is being computed; None if it has none."""

    @property
    def waited_ns(self) -> int:
        """See ``RouterModel``."""
        return 0

    def clients(self, make: MakeClient, computed: Computed) -> MakeClient:
        """Clients that take and give rows on the device, over those that ``make`` makes."""

        def clients(decodes: bytes) -> ExpertClient:
            return DeviceExperts(make(decodes), self._device, self.stream, computed)

        return clients

    def kv_bytes_per_block(self, block_size: int) -> int:
        stride = row_stride(self._attention.cache_width)
        return self._dtype.itemsize * self.spec.num_layers * block_size * stride

    def new_kv_cache(self, num_blocks: int, block_size: int) -> DeviceCache:
        """An empty cache, with the attention kernels compiled that it is read by. The only one that
        plans are made for from now on.
        """
        spec, cache = self.spec, self._empty_cache(num_blocks, block_size)
        self._kv = self._frames = None
        if self._device.compiles:
            with torch.inference_mode():
                self._warm_up(cache)
        self._progress(1.0)
        most_blocks = -(-spec.max_context // block_size)
        turn = spec.rope.dim // 2
        self._kv = cache
        self._frames = Frames(lambda size: Frame(self._device, size, most_blocks, block_size, turn))
        return cache

    def _empty_cache(self, num_blocks: int, block_size: int) -> DeviceCache:
        return DeviceCache(
            self.spec.num_layers,
            num_blocks,
            block_size,
            self._attention.cache_width,
            dtype=self._dtype,
            device=self._device,
        )

    def plan(self, chunks: Sequence[Chunk], block_size: int = 16) -> DevicePlan:
        index = index_step(chunks, block_size, self.spec.max_context, self._parts.rope)
        kv, frames = self._kv, self._frames
        if kv is None or frames is None or kv.block_size != block_size or not fits(index.counts):
            return plan_on_device(index, block_size, self._device)
        loan = frames.borrow(len(chunks))
        loan.frame.fill(index, kv.spare_row)
        return replace(loan.frame.plan, num_tokens=len(chunks), loan=loan)

    def embed(self, plan: DevicePlan) -> torch.Tensor:
        return embedding(plan.token_ids[: plan.num_tokens], self._parts.table).float()

    def through(
        self, plan: DevicePlan, exchange: StepExchange
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers for a frame's ``plan`` over the newest cache, by ``exchange`` to the experts
        and back: final hidden states ``[size, hidden]`` and logits ``[size, vocab]``. What it
        queues may be captured.
        """
        assert self._kv is not None, "frames belong to a cache"
        h, number = embedding(plan.token_ids, self._parts.table).float(), 0
        for layer, parts in enumerate(self._layers):
            (h,) = self._attend(layer, h, plan, self._kv.layers[layer])
            if parts.gate is None:
                (h,) = self._dense(layer, h)
                continue
            x, ids, weights = self._gate(layer, h)
            exchange.dispatch(number, x, ids, weights)
            if parts.shared is not None:
                h = parts.shared(x).add_(h)  # computed while the routed experts work
            h = h.add_(exchange.combine(number))
            number += 1
        return h, self._logits_of(h)

    def attend(
        self, layer: int, h: torch.Tensor, plan: DevicePlan, kv: DeviceCache
    ) -> torch.Tensor:
        index, kv_rows = self._over(plan, kv), kv.layers[layer]
        return self._run("attend", layer, lambda h: self._attend(layer, h, index, kv_rows), h)[0]

    def _over(self, plan: DevicePlan, kv: DeviceCache) -> DevicePlan:
        """The index tensors that attention goes over: those of the plan's frame, if it has one, for
        all of the layer's calls that follow.
        """
        if plan.block_size != kv.block_size:
            raise ValueError(
                f"the step was planned for blocks of {plan.block_size} tokens, "
                f"the cache has blocks of {kv.block_size}"
            )
        loan = plan.loan
        assert loan is None or kv is self._kv, "the plan is for the newest cache"
        self._frame = None if loan is None else loan.frame
        return plan if loan is None else loan.frame.plan

    def dense(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        return self._run("dense", layer, lambda h: self._dense(layer, h), h)[0]

    def gate(self, layer: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, experts, weights = self._run("gate", layer, lambda h: self._gate(layer, h), h)
        return x, experts, weights

    def shared(self, layer: int, x: torch.Tensor) -> torch.Tensor | None:
        shared = self._layers[layer].shared
        if shared is None:
            return None
        return self._run("shared", layer, lambda x: (shared(x),), x)[0]

    def _run(
        self, name: str, layer: int, work: Work, rows: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """``work``, or its segment in the frame of the micro-batch that attended last: a layer's
        other calls follow its ``attend`` before another micro-batch's.
        """
        if self._frame is None:
            return work(rows)
        return self._frame.segment(name, layer, work)(rows)

    def _attend(
        self, layer: int, h: torch.Tensor, plan: DevicePlan, cache: torch.Tensor
    ) -> tuple[torch.Tensor]:
        return (h + self._attention_of(layer, h, plan, cache),)

    def _attention_of(
        self, layer: int, h: torch.Tensor, plan: DevicePlan, cache: torch.Tensor
    ) -> torch.Tensor:
        parts = self._layers[layer]
        x = rms_norm(h, parts.attention_norm, self.spec.norm_eps).to(self._dtype)
        return parts.attention(x, plan, cache)

    def _gate(self, layer: int, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = self._layers[layer]
        assert parts.gate is not None
        x = rms_norm(h, parts.ffn_norm, self.spec.norm_eps)
        return x, *parts.gate(x)

    def _dense(self, layer: int, h: torch.Tensor) -> tuple[torch.Tensor]:
        return (self._dense_of(layer, h).add_(h),)

    def _dense_of(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        parts = self._layers[layer]
        assert parts.dense is not None
        return parts.dense(rms_norm(h, parts.ffn_norm, self.spec.norm_eps))

    def logits(self, h_rows: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]`` fp32."""
        return self._logits_of(h_rows)

    def sampler(self) -> DeviceSampler:
        """See ``RouterModel``. Whoever draws waits for the device."""
        return DeviceSampler(self.spec.vocab_size, self._device, self.stream)

    def _logits_of(self, h_rows: torch.Tensor) -> torch.Tensor:
        parts = self._parts
        x = rms_norm(h_rows.contiguous(), parts.final_norm, self.spec.norm_eps).to(self._dtype)
        return linear(x, parts.head).float()

    def _warm_up(self, kv: DeviceCache) -> None:
        """Run each kernel once: a token through a layer of each kind, and attention with each
        number of shares of the keys, which are kernels of their own.
        """
        rope = self._parts.rope
        index = index_step([Chunk([0], 0, [0])], kv.block_size, self.spec.max_context, rope)
        plan = plan_on_device(index, kv.block_size, self._device)
        h = torch.zeros(1, self.spec.hidden_size, device=self._device.place)
        layers = {0, *self.spec.moe_layers[:1]}
        steps = len(layers) + MOST_SPLITS.bit_length()
        for done, layer in enumerate(layers):
            self._progress(_LOADED + (1 - _LOADED) * done / steps)
            self._attend(layer, h, plan, kv.layers[layer])
            if self._layers[layer].dense is not None:
                self._dense(layer, h)
            elif self._layers[layer].gate is not None:
                self._gate(layer, h)
        rows = self._layers[0].attention.rows(kv.block_size)
        heads = self._attention.num_heads
        q = torch.zeros(1, heads, rows.key_dim, dtype=self._dtype, device=self._device.place)
        for doubled in range(MOST_SPLITS.bit_length()):
            self._progress(_LOADED + (1 - _LOADED) * (len(layers) + doubled) / steps)
            attend(q, kv.layers[0], plan.queries, rows, splits=1 << doubled)
        self.sampler().warm_up()
        kv.clear([0])


def load_device_model(
    path: Path,
    device: Device,
    *,
    weights: DeviceWeights = "auto",
    progress: Callable[[float], None] | None = None,
) -> DeviceModel:
    """Read everything but the routed experts from the checkpoint at ``path`` onto ``device``, for
    the calling thread. Raises ``CheckpointError`` before any tensor is converted if one is missing
    or wrong, and ``torch.OutOfMemoryError``. ``progress`` is told 1 by ``new_kv_cache``.
    """
    return DeviceModel(load_device_parts(path, device, weights=weights, progress=progress))


def load_device_parts(
    path: Path,
    device: Device,
    rank: int = 0,
    size: int = 1,
    *,
    weights: DeviceWeights = "auto",
    progress: Callable[[float], None] | None = None,
) -> DeviceParts:
    """Read the part of rank ``rank`` in a group of ``size``, for which ``shard_fault`` must be
    empty; see ``load_device_model``.
    """
    spec = load_spec(path)
    table, shard = TensorTable(spec), Shard(spec, rank, size)
    report = progress or (lambda _share: None)
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    stream = device.settle()

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype).contiguous().to(device.place, copy=True)

    def place_fp32(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float().contiguous().to(device.place, copy=True)

    with Checkpoint(path) as checkpoint, torch.inference_mode():
        checkpoint.check(table.router())
        reader = Reader(checkpoint, table, shard)
        embeddings = place(reader.tensor("embedding"))
        layers = []
        for layer in range(spec.num_layers):
            report(_LOADED * layer / spec.num_layers)
            layers.append(_load_layer(spec, reader, layer, place, place_fp32))
        return DeviceParts(
            spec=spec,
            shard=shard,
            layers=tuple(layers),
            table=embeddings,
            final_norm=place_fp32(reader.tensor("final_norm")),
            head=embeddings if spec.tie_word_embeddings else place(reader.tensor("head")),
            rope=Rope(spec.rope, spec.max_context),
            device=device,
            stream=stream,
            progress=report,
        )


def _load_layer(
    spec: ModelSpec, reader: Reader, layer: int, place: Place, place_fp32: Place
) -> _Layer:
    roles = [role for role in reader.table.layer_roles(layer) if reader.shard.holds(role)]

    def ffn(prefix: str) -> _SwiGlu | None:
        if f"{prefix}_gate" not in roles:
            return None
        gate, up, down = (reader.tensor(f"{prefix}_{part}", layer) for part in FFN_PARTS)
        return _SwiGlu(gate, up, down, place)

    chosen = None
    if "router" in roles:
        weight = place_fp32(reader.tensor("router", layer))
        rule = gate_rule(spec.gate, weight.shape[0], spec.experts_per_token)
        bias = place_fp32(reader.tensor("router_bias", layer)) if "router_bias" in roles else None
        chosen = _Gate(rule, weight, bias)
    matrices = reader.role_map(reader.table.attention_roles, layer)
    attention: DeviceLatentAttention | DeviceGroupedAttention
    own = reader.shard.attention
    if isinstance(own, GqaSpec):
        attention = DeviceGroupedAttention(own, spec.rope, matrices, place)
    else:
        attention = DeviceLatentAttention(own, spec.rope, matrices, place)
    return _Layer(
        attention_norm=place_fp32(reader.tensor("attention_norm", layer)),
        attention=attention,
        ffn_norm=place_fp32(reader.tensor("ffn_norm", layer)),
        dense=ffn("dense"),
        gate=chosen,
        shared=ffn("shared"),
    )
