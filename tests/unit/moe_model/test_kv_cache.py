from __future__ import annotations

import pytest
import torch

from moe_model.kv_cache import KVCache, row_stride


@pytest.mark.parametrize("width", [16, 20, 80])
def test_gathered_blocks_are_the_rows_written(width: int) -> None:
    kv = KVCache(num_layers=2, num_blocks=5, block_size=4, width=width)
    rows = torch.randn(6, width)
    kv.layers[1].index_copy_(0, torch.tensor([8, 9, 10, 11, 0, 1]), rows)
    got = kv.gather(1, torch.tensor([2, 0]))
    assert got.shape == (8, width)
    assert torch.equal(got[:6], rows)
    assert not kv.layers[0].any()
    assert kv.nbytes == 2 * 5 * 4 * row_stride(width) * 4


def test_cleared_blocks_are_zeros_in_every_layer_and_no_others_are() -> None:
    kv = KVCache(num_layers=2, num_blocks=4, block_size=2, width=16)
    for layer in kv.layers:
        layer.fill_(float("nan"))
    kv.clear([2, 0])
    for layer in kv.layers:
        assert layer.isnan().all(1).tolist() == [False, False, True, True] * 2


def test_rows_start_on_cache_lines() -> None:
    assert [row_stride(width) for width in (1, 16, 17, 576)] == [16, 16, 32, 576]


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        KVCache(1, 0, 16, 80)
