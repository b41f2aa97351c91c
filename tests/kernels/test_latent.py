from __future__ import annotations

import pytest
import torch
from ep_kernels.attend import VisibleKeys, attend
from ep_kernels.half import HalfMatrices, HalfMatrix, has_kernel, has_tiles
from ep_kernels.latent import LatentDecode
from ep_kernels.rows import LatentRows, RmsNorm

HIDDEN, HEADS, NOPE, LATENT, ROTARY, VALUE, SOURCE = 40, 3, 20, 36, 8, 12, 28
BLOCK = 4

TYPES = [
    *([torch.float16] if has_kernel() else []),
    *([torch.bfloat16] if has_tiles() else []),
]
pytestmark = pytest.mark.skipif(not TYPES, reason="this CPU has no kernel for 16-bit weights")


class Attention:
    """The same parts, asked one after the other or all at once."""

    def __init__(self, dtype: torch.dtype, *, source: bool) -> None:
        def matrix(*shape: int) -> torch.Tensor:
            return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)

        queries = HEADS * (NOPE + ROTARY)
        front = SOURCE if source else queries
        self.norm = RmsNorm(torch.rand(HIDDEN) + 0.5, 1e-6)
        self.first = HalfMatrix(matrix(front + LATENT + ROTARY, HIDDEN))
        self.rows = LatentRows(
            torch.rand(SOURCE) + 0.5 if source else None,
            torch.rand(LATENT) + 0.5,
            1e-6,
            query=front,
            heads=HEADS,
            rotary=ROTARY,
        )
        self.query = HalfMatrix(matrix(queries, SOURCE)) if source else None
        self.key_up = HalfMatrices(matrix(HEADS, LATENT, NOPE))
        self.value_up = HalfMatrices(matrix(HEADS, VALUE, LATENT))
        self.out = HalfMatrix(matrix(HIDDEN, HEADS * VALUE))
        self.at_once = LatentDecode(
            norm=self.norm,
            first=self.first,
            rows=self.rows,
            query=self.query,
            key_up=self.key_up,
            value_up=self.value_up,
            out=self.out,
        )

    def step_by_step(self, h, query_turn, key_turn, cache, at, visible) -> torch.Tensor:
        n = h.shape[0]
        q = self.rows(self.first(self.norm(h)), query_turn, key_turn, cache, at)
        if self.query is not None:
            q = self.query(q)
            self.rows.turn(q, query_turn)
        q = q.view(n, HEADS, NOPE + ROTARY)
        absorbed = torch.empty(n, HEADS, LATENT + ROTARY)
        self.key_up.into(q[..., :NOPE], absorbed[..., :LATENT])
        absorbed[..., LATENT:] = q[..., NOPE:]
        seen = attend(
            absorbed.unsqueeze(1), cache, BLOCK, visible, value_dim=LATENT, value_offset=0
        ).squeeze(1)
        values = torch.empty(n, HEADS, VALUE)
        self.value_up.into(seen, values)
        return self.out(values.flatten(1))


def step(rows: int) -> tuple[torch.Tensor, ...]:
    """Sequences of 1 to 11 tokens in blocks of their own, whose last token is computed."""
    lengths = torch.arange(rows) % 11 + 1
    blocks = torch.randperm(rows * 3)
    at = blocks.view(rows, 3)[torch.arange(rows), (lengths - 1) // BLOCK] * BLOCK
    at = at + (lengths - 1) % BLOCK
    visible = VisibleKeys(
        blocks, torch.arange(rows) * 3, torch.zeros(rows, dtype=torch.int64), lengths
    )
    cache = torch.randn(rows * 3 * BLOCK, LATENT + ROTARY + 4)[:, : LATENT + ROTARY]
    query_turn = torch.randn(rows, 1, (NOPE + ROTARY) // 2, dtype=torch.complex64)
    key_turn = torch.randn(rows, ROTARY // 2, dtype=torch.complex64)
    return torch.randn(rows, HIDDEN), query_turn, key_turn, cache, at, visible


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("source", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 64, 65, 150])
def test_one_call_gives_the_bits_of_its_steps(dtype: torch.dtype, source: bool, rows: int) -> None:
    attention = Attention(dtype, source=source)
    h, query_turn, key_turn, cache, at, visible = step(rows)
    given, other = h.clone(), torch.clone(cache)
    for add in (False, True):
        got = attention.at_once(
            h, query_turn, key_turn, cache, at, BLOCK, visible, add=add
        )  # fmt: skip
        if rows <= 64:
            want = attention.step_by_step(h, query_turn, key_turn, other, at, visible)
        else:  # tiles take more rows at a time another way: compare with what goes together
            want = torch.cat(
                [
                    attention.step_by_step(
                        h[part], query_turn[part], key_turn[part], other, at[part],
                        VisibleKeys(
                            visible.blocks, visible.offset[part], visible.skip[part],
                            visible.keys[part],
                        ),
                    )
                    for part in (slice(i, i + 64) for i in range(0, rows, 64))
                ]
            )  # fmt: skip
        assert torch.equal(got, want + h if add else want)
        assert torch.equal(cache, other)
        assert torch.equal(h, given)


def test_a_row_beyond_the_cache_is_refused() -> None:
    attention = Attention(TYPES[0], source=True)
    for bad in (-1, 10**9):
        h, query_turn, key_turn, cache, at, visible = step(70)
        at[67] = bad
        with pytest.raises(IndexError, match=f"cache row {bad} is not in 0 to"):
            attention.at_once(h, query_turn, key_turn, cache, at, BLOCK, visible, add=True)
