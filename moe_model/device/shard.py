"""One rank's part of a router's model on its device: what it adds to each sum of its group."""

from __future__ import annotations

import torch

from moe_model.device.model import DeviceCache, DeviceModel, DeviceParts
from moe_model.device.plan import DevicePlan
from moe_model.shard import Cut
from moe_model.shard_model import own_embeddings


class DeviceShard(DeviceModel):
    """See ``RouterShard``: the same methods, whose tensors lie on the device. What a ``_part``
    method returns is fp32, contiguous and valid until the next call, and may be changed.
    """

    def __init__(self, parts: DeviceParts) -> None:
        super().__init__(parts)
        self.shard = parts.shard
        self._vocabulary = parts.shard.cut("embedding") or Cut(0, 0, parts.spec.vocab_size)
        self.vocabulary_size = self._vocabulary.stop - self._vocabulary.start
        """Tokens of the vocabulary that are this rank's."""

    def embed_part(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[n]`` -> ``[n, hidden]``; zeros for tokens of other ranks."""
        return own_embeddings(self._parts.table, self._vocabulary, token_ids)

    def attend_part(
        self, layer: int, h: torch.Tensor, plan: DevicePlan, kv: DeviceCache
    ) -> torch.Tensor:
        """Over the rank's own heads. Writes its rows of ``layer`` to ``kv``."""
        index, kv_rows = self._over(plan, kv), kv.layers[layer]

        def work(h: torch.Tensor) -> tuple[torch.Tensor]:
            return (self._attention_of(layer, h, index, kv_rows).float(),)

        return self._run("attend", layer, work, h)[0]

    def dense_part(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        return self._run("dense", layer, lambda h: (self._dense_of(layer, h),), h)[0]

    def shared_part(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """For ``gate``'s ``x`` of a layer with a shared expert."""
        shared = self._layers[layer].shared
        assert shared is not None
        return self._run("shared", layer, lambda x: (shared(x),), x)[0]

    def logits_part(self, h_rows: torch.Tensor) -> torch.Tensor:
        """``[rows, vocabulary_size]``."""
        return self._logits_of(h_rows)
