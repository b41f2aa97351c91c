"""Softmax attention over the paged cache, for both kinds of rows it can hold.

Queries arrive scaled and rotated. Grouped-query and latent attention differ only in where keys
and values lie in a row: latent attention is one key head whose values are the front of the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from ep_kernels.attend import attend

from moe_model.kv_cache import KVCache
from moe_model.plan import Group, Part, Span

_SCORE_VALUES = 4 * 1024 * 1024
"""Most scores held at a time (16 MiB); longer spans are cut by query rows."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Key head ``h`` is values ``h * key_dim`` and following of a cache row; its value is
    ``value_dim`` long from ``value_offset + h * value_dim``.
    """

    heads: int
    key_dim: int
    value_dim: int
    value_offset: int

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``[T, width]`` -> keys ``[heads, T, key_dim]``, values ``[heads, T, value_dim]``,
        both views.
        """
        keys = rows.narrow(1, 0, self.heads * self.key_dim)
        values = rows.narrow(1, self.value_offset, self.heads * self.value_dim)
        if self.heads == 1:
            return keys.unsqueeze(0), values.unsqueeze(0)
        return (
            keys.view(-1, self.heads, self.key_dim).transpose(0, 1),
            values.view(-1, self.heads, self.value_dim).transpose(0, 1),
        )


def over_parts(
    q: torch.Tensor,
    parts: tuple[Part, ...],
    out_shape: tuple[int, ...],
    run: Callable[[torch.Tensor, Part], torch.Tensor],
) -> torch.Tensor:
    """Apply ``run`` to each part's queries and put the results where they belong.

    ``q`` ``[n, ...]``; ``run`` returns ``[part rows, *out_shape]``; the result is
    ``[n, *out_shape]``, with rows that no part covers left uninitialised.
    """
    if len(parts) == 1 and _rows_of(parts[0]) == q.shape[0]:
        return run(q, parts[0])
    out = q.new_empty(q.shape[0], *out_shape)
    for part in parts:
        if isinstance(part, Span):
            rows = slice(part.first, part.first + part.count)
            out[rows] = run(q[rows], part)
        else:
            assert part.rows is not None  # a group without has all rows of the step
            out.index_copy_(0, part.rows, run(q.index_select(0, part.rows), part))
    return out


def _rows_of(part: Part) -> int:
    return part.count if isinstance(part, Span) else part.visible.keys.shape[0]


def span_rows(cache: KVCache, layer: int, span: Span) -> torch.Tensor:
    """The cache rows a span reads, ``[keys, width]``: a view where they lie together."""
    if span.blocks is None:
        return cache.layers[layer].narrow(0, span.run, span.keys)
    return cache.gather(layer, span.blocks).narrow(0, span.skip, span.keys)


def attend_group(
    q: torch.Tensor, cache: KVCache, layer: int, group: Group, layout: RowLayout
) -> torch.Tensor:
    """One token of each sequence: ``q [n, heads, shared, key_dim]`` (``shared`` query heads a key
    head) -> ``[n, heads, shared, value_dim]``.
    """
    return attend(
        q,
        cache.layers[layer],
        cache.block_size,
        group.visible,
        value_dim=layout.value_dim,
        value_offset=layout.value_offset,
    )


def attend_one(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One token that sees all of ``keys [heads, T, key_dim]``: ``q [heads, shared, key_dim]`` ->
    ``[heads, shared, value_dim]``.
    """
    return torch.bmm(torch.softmax(torch.bmm(q, keys.transpose(1, 2)), -1), values)


def attend_span(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Tokens of one sequence: ``q [m, heads, shared, key_dim]``, ``keys [heads, T, key_dim]``,
    ``values [heads, T, value_dim]``, ``mask`` as in ``Span`` -> ``[m, heads, shared, value_dim]``.
    """
    count, heads, shared, _ = q.shape
    if count == 1:
        return attend_one(q[0], keys, values).unsqueeze(0)
    length = keys.shape[1]
    step = max(1, _SCORE_VALUES // (heads * shared * length))
    out = q.new_empty(count, heads, shared, values.shape[2])
    for begin in range(0, count, step):
        rows = slice(begin, min(begin + step, count))
        piece = q[rows]
        stacked = piece.transpose(0, 1).reshape(heads, -1, piece.shape[-1])  # [heads, m*shared, d]
        scores = torch.bmm(stacked, keys.transpose(1, 2))
        if mask is not None:
            tail = scores.view(heads, -1, shared, length)[..., length - mask.shape[1] :]
            tail.add_(mask[rows].unsqueeze(1))
        piece_out = torch.bmm(torch.softmax(scores, -1), values)
        out[rows] = piece_out.view(heads, -1, shared, values.shape[2]).transpose(0, 1)
    return out


def attend_rows_alone(
    q: torch.Tensor, rows: torch.Tensor, span: Span, window: int | None, layout: RowLayout
) -> torch.Tensor:
    """``attend_span`` with every token by itself over exactly the keys it sees, so that its result
    depends on nothing but its position and those keys.
    """
    outs = []
    for i in range(span.count):
        position = span.context - span.count + i
        low = 0 if window is None else max(0, position - window + 1)
        keys, values = layout.split(rows[low - span.begin : position + 1 - span.begin])
        outs.append(attend_span(q[i : i + 1], keys, values, None))
    return torch.cat(outs)
