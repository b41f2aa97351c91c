"""What one step does, worked out once and used by every layer.

A step is a list of chunks: consecutive tokens of one sequence whose earlier tokens are already in
the cache. The plan turns them into index tensors, and divides attention into *parts*: single tokens
of several sequences run together as a ``Group``, everything else as a ``Span`` of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from ep_kernels.attend import VisibleKeys


@dataclass(frozen=True, slots=True)
class Chunk:
    """``token_ids`` at positions ``start, start + 1, ...`` of one sequence.

    ``block_table`` names its KV blocks in order and reaches at least to the chunk's last token;
    blocks of tokens before ``start`` are filled. One sequence has at most one chunk in a step.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True)
class ExpandRule:
    """Which spans of latent attention expand their keys: enough queries for it to be less work,
    few enough keys for it to fit.
    """

    min_queries: int
    max_keys: int

    def applies(self, queries: int, keys: int) -> bool:
        return queries >= self.min_queries and keys <= self.max_keys


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the plan has to know of the cache and the attention that reads it."""

    block_size: int
    window: int | None
    """Tokens that a token sees, itself included; None for all before it."""
    exact: bool
    """No groups: each token attends by itself."""
    expand: ExpandRule | None = None
    """None: no span expands."""


@dataclass(frozen=True, slots=True)
class Span:
    """Rows ``first .. first + count - 1`` of the step: consecutive tokens of one sequence.

    They read the keys of positions ``begin .. context - 1``. If ``run >= 0`` these lie in cache
    rows ``run`` and following; else ``blocks`` are gathered and the first ``skip`` rows dropped.
    ``mask`` ``[count, m]`` is added to the scores of the last ``m`` keys; None when every row sees
    every key. ``expands``: see ``ExpandRule``.
    """

    first: int
    count: int
    begin: int
    context: int
    run: int
    blocks: torch.Tensor | None
    skip: int
    mask: torch.Tensor | None
    expands: bool

    @property
    def keys(self) -> int:
        return self.context - self.begin


@dataclass(frozen=True, slots=True)
class Group:
    """Single tokens of several sequences.

    ``rows`` ``[n]`` are their rows in the step, None when they are all of it in order; ``visible``
    the cache's rows that each sees.
    """

    rows: torch.Tensor | None
    visible: VisibleKeys


Part: TypeAlias = Span | Group


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step of ``num_tokens`` rows, chunk after chunk.

    ``token_ids``, ``positions`` and ``cache_rows`` (where each token's row of the cache is) are
    ``[num_tokens]`` int64. ``query_turn`` and ``key_turn`` are the attention's rotations, broadcast
    over heads; the first carries the softmax scale too. ``kept_rows`` are the rows of parts that do
    not expand, None when these are all.
    """

    num_tokens: int
    block_size: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    cache_rows: torch.Tensor
    parts: tuple[Part, ...]
    kept_rows: torch.Tensor | None
    query_turn: torch.Tensor
    key_turn: torch.Tensor

    @property
    def decodes(self) -> Group | None:
        """The only part, if it is single tokens of sequences."""
        part = self.parts[0]
        return part if isinstance(part, Group) and part.rows is None else None


Turns: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

_TABLE_BYTES = 16 << 20


def tabled(turns: Turns, max_context: int) -> Turns:
    """``turns`` worked out for all positions beforehand, where that takes little memory."""
    tables = turns(torch.arange(1))
    if max_context * sum(table.nbytes for table in tables) > _TABLE_BYTES:
        return turns
    query, key = turns(torch.arange(max_context))
    return lambda positions: (query.index_select(0, positions), key.index_select(0, positions))


def plan_step(
    chunks: Sequence[Chunk], shape: CacheShape, max_context: int, turns: Turns
) -> StepPlan:
    """Plan a step. ``turns`` maps positions ``[n]`` to the attention's rotations.

    Raises ``ValueError`` for no or empty chunks, a chunk beyond ``max_context``, or a block table
    that does not reach its last token.
    """
    if not chunks:
        raise ValueError("a step needs at least one chunk")
    size = shape.block_size
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    spans: list[tuple[int, Chunk]] = []
    singles: list[tuple[int, Chunk]] = []
    for chunk in chunks:
        start, table = chunk.start, chunk.block_table
        count = len(chunk.token_ids)
        check_chunk(chunk, count, size, max_context)
        (singles if count == 1 else spans).append((len(tokens), chunk))
        tokens += chunk.token_ids
        if count == 1:
            positions.append(start)
            rows.append(table[start // size] * size + start % size)
        else:
            positions += range(start, start + count)
            rows += [table[p // size] * size + p % size for p in range(start, start + count)]
    n = len(tokens)
    # One conversion for all of them: it costs a microsecond or two whatever the length.
    index = torch.from_numpy(np.array(tokens + positions + rows, dtype=np.int64))
    token_ids, position_ids, cache_rows = index.split_with_sizes([n, n, n])
    query_turn, key_turn = turns(position_ids)
    parts = _parts(spans, singles, n, shape)
    return StepPlan(
        num_tokens=n,
        block_size=size,
        token_ids=token_ids,
        positions=position_ids,
        cache_rows=cache_rows,
        parts=parts,
        kept_rows=_kept_rows(parts, n),
        query_turn=query_turn,
        key_turn=key_turn,
    )


def check_chunk(chunk: Chunk, count: int, block_size: int, max_context: int) -> None:
    """Raise ``ValueError`` for a chunk of ``count`` tokens that no step can take."""
    end = chunk.start + count
    if count == 0:
        raise ValueError("a chunk needs at least one token")
    if chunk.start < 0 or end > max_context:
        raise ValueError(
            f"chunk covers positions {chunk.start} to {end - 1}, "
            f"the model's context is {max_context} tokens"
        )
    if len(chunk.block_table) * block_size < end:
        raise ValueError(
            f"block table of {len(chunk.block_table)} blocks of {block_size} tokens does not "
            f"reach position {end - 1}"
        )


def _parts(
    spans: list[tuple[int, Chunk]],
    singles: list[tuple[int, Chunk]],
    num_tokens: int,
    shape: CacheShape,
) -> tuple[Part, ...]:
    if shape.exact:
        return tuple(_span(first, chunk, shape) for first, chunk in (*singles, *spans))
    parts: list[Part] = [_group(singles, num_tokens, shape)] if singles else []
    return (*parts, *(_span(first, chunk, shape) for first, chunk in spans))


def _kept_rows(parts: tuple[Part, ...], num_tokens: int) -> torch.Tensor | None:
    expanding = [part for part in parts if isinstance(part, Span) and part.expands]
    if not expanding:
        return None
    kept = torch.ones(num_tokens, dtype=torch.bool)
    for span in expanding:
        kept[span.first : span.first + span.count] = False
    return kept.nonzero().view(-1)


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _run(table: Sequence[int], low: int, high: int) -> int:
    """First block of ``table[low:high]`` if their numbers are consecutive, else -1."""
    first = int(table[low])
    if int(table[high - 1]) - first != high - 1 - low:
        return -1
    return first if list(table[low:high]) == list(range(first, first + high - low)) else -1


def _span(first: int, chunk: Chunk, shape: CacheShape) -> Span:
    size, window = shape.block_size, shape.window
    count = len(chunk.token_ids)
    context = chunk.start + count
    begin = _first_visible(chunk.start, window)
    low, high = begin // size, (context - 1) // size + 1
    # Exact attention always gathers: a fresh tensor has the same alignment whatever its blocks.
    run = -1 if shape.exact else _run(chunk.block_table, low, high)
    skip = begin - low * size
    return Span(
        first=first,
        count=count,
        begin=begin,
        context=context,
        run=run * size + skip if run >= 0 else -1,
        blocks=None if run >= 0 else torch.tensor(chunk.block_table[low:high]),
        skip=skip,
        mask=None if count == 1 or shape.exact else _span_mask(chunk.start, count, begin, window),
        expands=shape.expand is not None and shape.expand.applies(count, context - begin),
    )


def _span_mask(start: int, count: int, begin: int, window: int | None) -> torch.Tensor:
    """Minus infinity where a row does not see a key: the last ``count`` keys, or with a window all
    of them.
    """
    blocked = float("-inf")
    if window is None:
        return torch.full((count, count), blocked).triu_(1)
    query = torch.arange(start, start + count).unsqueeze(1)
    key = torch.arange(begin, start + count).unsqueeze(0)
    hidden = (key > query) | (key <= query - window)
    return torch.zeros(hidden.shape).masked_fill_(hidden, blocked)


def _group(members: list[tuple[int, Chunk]], num_tokens: int, shape: CacheShape) -> Group:
    size = shape.block_size
    blocks: list[int] = []
    places: list[tuple[int, int, int]] = []  # offset, skip, keys
    for _, chunk in members:
        begin = _first_visible(chunk.start, shape.window)
        low = begin // size
        places.append((len(blocks), begin - low * size, chunk.start + 1 - begin))
        blocks += chunk.block_table[low : chunk.start // size + 1]
    offset, skip, keys = torch.from_numpy(np.array(places, dtype=np.int64).T.copy())
    return Group(
        rows=None if len(members) == num_tokens else torch.tensor([first for first, _ in members]),
        visible=VisibleKeys(torch.from_numpy(np.array(blocks, dtype=np.int64)), offset, skip, keys),
    )
