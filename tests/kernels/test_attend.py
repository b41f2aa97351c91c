from __future__ import annotations

import pytest
import torch
from ep_kernels.attend import VisibleKeys, attend

LANES = (1, 8, 16)


def visible(blocks: list[list[int]], skip: list[int], keys: list[int]) -> VisibleKeys:
    offset = [sum(map(len, blocks[:i])) for i in range(len(blocks))]
    flat = [block for row in blocks for block in row]
    return VisibleKeys(*(torch.tensor(given) for given in (flat, offset, skip, keys)))


def naive(q, cache, block_size, blocks, skip, keys, value_dim, value_offset):
    """One row and head at a time, in double precision."""
    _, heads, shared, key_dim = q.shape
    out = torch.empty(*q.shape[:3], value_dim, dtype=torch.float64)
    for i, row in enumerate(q.double()):
        lines = [b * block_size + j for b in blocks[i] for j in range(block_size)]
        seen = cache[lines[skip[i] : skip[i] + keys[i]]].double()
        for head in range(heads):
            key = seen[:, head * key_dim : (head + 1) * key_dim]
            value = seen[:, value_offset + head * value_dim :][:, :value_dim]
            for query in range(shared):
                out[i, head, query] = torch.softmax(key @ row[head, query], 0) @ value
    return out


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(
    ("heads", "shared", "key_dim", "value_dim", "latent"),
    [
        (1, 8, 96, 64, True),
        (1, 13, 40, 24, True),
        (2, 4, 64, 64, False),
        (3, 1, 5, 5, False),
        (1, 300, 16, 16, True),
    ],
)
@pytest.mark.parametrize("block_size", [16, 5, 64])
def test_equals_softmax_attention(lanes, heads, shared, key_dim, value_dim, latent, block_size):
    """Latent values are the front of keys, those of grouped-query attention follow them."""
    value_offset = 0 if latent else heads * key_dim
    width = key_dim if latent else heads * (key_dim + value_dim)
    cache = torch.randn(12 * block_size, width + 3)[:, :width]  # rows lie apart
    blocks = [[3], [7, 2, 5], [0, 1], [11, 4, 6, 8, 9]]
    skip = [0, block_size - 1, 2, 0]
    keys = [1, block_size + 2, block_size, 5 * block_size]
    q = torch.randn(4, heads + 1, shared, key_dim)[:, :heads]  # so do queries
    got = attend(
        q, cache, block_size, visible(blocks, skip, keys),
        value_dim=value_dim, value_offset=value_offset, most_lanes=lanes,
    )  # fmt: skip
    want = naive(q, cache, block_size, blocks, skip, keys, value_dim, value_offset)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("lanes", LANES)
def test_scores_of_any_size_and_order_are_weighed_right(lanes: int) -> None:
    """The largest score may come first, last or in between, far beyond what e^x can hold."""
    cache = torch.zeros(64, 8)
    cache[:, 0] = torch.linspace(-500, 500, 64)
    cache[:, 1:] = torch.randn(64, 7)
    for order in (torch.arange(64), torch.arange(63, -1, -1), torch.randperm(64)):
        rows = cache[order].contiguous()
        q = torch.tensor([[[[1.0, *[0.0] * 7], [-3.0, *[0.0] * 7]]]])
        got = attend(
            q, rows, 16, visible([[0, 1, 2, 3]], [0], [64]),
            value_dim=8, value_offset=0, most_lanes=lanes,
        )  # fmt: skip
        want = naive(q, rows, 16, [[0, 1, 2, 3]], [0], [64], 8, 0)
        torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=1e-4)


def test_what_a_row_does_not_see_may_be_anything() -> None:
    cache = torch.full((48, 8), float("nan"))
    cache[18:21] = torch.randn(3, 8)
    q = torch.randn(1, 1, 4, 8)
    got = attend(q, cache, 16, visible([[1, 2]], [2], [3]), value_dim=8, value_offset=0)
    want = naive(q, cache, 16, [[1, 2]], [2], [3], 8, 0)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-4)


def test_a_row_depends_on_itself_alone() -> None:
    cache, q = torch.randn(160, 40), torch.randn(6, 1, 8, 40)
    blocks = [[9, 1], [2], [3, 4, 5], [6], [7, 8], [0]]
    skip, keys = [3, 0, 0, 5, 1, 0], [20, 16, 41, 2, 30, 1]
    together = attend(q, cache, 16, visible(blocks, skip, keys), value_dim=32, value_offset=0)
    for i in range(6):
        seen = visible(blocks[i : i + 1], skip[i : i + 1], keys[i : i + 1])
        alone = attend(q[i : i + 1].clone(), cache, 16, seen, value_dim=32, value_offset=0)
        assert torch.equal(alone[0], together[i])
