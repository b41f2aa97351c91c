from __future__ import annotations

import torch

from moe_model.attention import core
from moe_model.attention.core import RowLayout, attend_span
from moe_model.plan import CacheShape, Chunk, Span, plan_step


def naive(q, keys, values, start: int) -> torch.Tensor:
    """``q [m, heads, shared, d]`` at positions ``start ...``, one row and head at a time."""
    out = torch.empty(*q.shape[:3], values.shape[2])
    for i in range(q.shape[0]):
        for head in range(q.shape[1]):
            seen = start + i + 1
            scores = q[i, head] @ keys[head, :seen].T
            out[i, head] = torch.softmax(scores, -1) @ values[head, :seen]
    return out


def test_span_equals_row_by_row_attention_however_it_is_cut(monkeypatch) -> None:
    heads, shared, dim = 2, 3, 8
    q = torch.randn(10, heads, shared, dim)
    keys, values = torch.randn(heads, 25, dim), torch.randn(heads, 25, 5)
    chunk = Chunk([0] * 10, 15, [0, 1])
    plan = plan_step([chunk], CacheShape(16, None, False), 100, lambda p: (p, p))
    (span,) = plan.parts
    assert isinstance(span, Span)
    want = naive(q, keys, values, 15)
    assert torch.allclose(attend_span(q, keys, values, span.mask), want, atol=1e-5)
    monkeypatch.setattr(core, "_SCORE_VALUES", 4 * heads * shared * 25)
    assert torch.allclose(attend_span(q, keys, values, span.mask), want, atol=1e-5)


def test_layout_views_do_not_copy() -> None:
    rows = torch.randn(6, 16)
    for layout in (RowLayout(2, 4, 4, 8), RowLayout(1, 16, 12, 0)):
        keys, values = layout.split(rows)
        assert keys.shape == (layout.heads, 6, layout.key_dim)
        assert values.shape == (layout.heads, 6, layout.value_dim)
        assert torch.equal(
            keys[-1, 3], rows[3, (layout.heads - 1) * layout.key_dim :][: layout.key_dim]
        )
        rows[0, layout.value_offset] = 42.0
        assert values[0, 0, 0] == 42.0
