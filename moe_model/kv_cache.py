"""The paged KV cache: blocks of token rows, one tensor a layer.

A token's row holds all that later tokens need of it in one layer: keys and values, or for latent
attention the latent and the rotary key. Block ``b`` is rows ``b * block_size`` and following, so a
sequence whose blocks have consecutive numbers is read in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_model.kv_size import row_stride


class KVCache:
    """``num_blocks`` blocks of ``block_size`` tokens for each of ``num_layers`` layers.

    ``layers[i]`` is ``[num_blocks * block_size, width]`` fp32 with rows ``stride`` values apart, so
    that every row starts on a cache line. Who writes which
    block is the scheduler's business. Rows not yet written may be read behind a mask, where a NaN
    would survive: they are zeros at first, and ``clear`` is for blocks that had another owner.
    Raises ``ValueError`` for counts that are not positive.
    """

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, width: int) -> None:
        if min(num_layers, num_blocks, block_size, width) < 1:
            raise ValueError(
                f"a KV cache needs positive sizes, got {num_layers} layers of {num_blocks} "
                f"blocks of {block_size} tokens of {width} values"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.width = width
        self.stride = row_stride(width)
        self._blocks = [
            torch.zeros(num_blocks, block_size * self.stride) for _ in range(num_layers)
        ]
        self.layers = [blocks.view(-1, self.stride)[:, :width] for blocks in self._blocks]

    @property
    def nbytes(self) -> int:
        return sum(blocks.nbytes for blocks in self._blocks)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero ``blocks`` in all layers."""
        index = torch.tensor(blocks)
        for layer in self._blocks:
            layer.index_fill_(0, index, 0.0)

    def gather(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Copy blocks ``[b]`` int64 -> rows ``[b * block_size, width]``."""
        rows = self._blocks[layer].index_select(0, blocks).view(-1, self.stride)
        return rows if self.width == self.stride else rows[:, : self.width]
