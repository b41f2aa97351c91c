from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_model.plan import (
    CacheShape,
    Chunk,
    ExpandRule,
    Group,
    Span,
    StepPlan,
    plan_step,
)

SHAPE = CacheShape(block_size=16, window=None, exact=False)


def plan(chunks: list[Chunk], shape: CacheShape = SHAPE, max_context: int = 4096) -> StepPlan:
    return plan_step(chunks, shape, max_context, lambda p: (p, p))


def test_tokens_positions_and_cache_rows_follow_the_chunks() -> None:
    got = plan([Chunk([7, 8, 9], 15, [3, 5]), Chunk([4], 2, [9])])
    assert got.token_ids.tolist() == [7, 8, 9, 4]
    assert got.positions.tolist() == [15, 16, 17, 2]
    assert got.cache_rows.tolist() == [3 * 16 + 15, 5 * 16, 5 * 16 + 1, 9 * 16 + 2]


def test_consecutive_blocks_are_read_in_place() -> None:
    (span,) = plan([Chunk([1, 1], 39, [7, 8, 9])]).parts
    assert isinstance(span, Span)
    assert (span.run, span.keys, span.blocks) == (7 * 16, 41, None)
    (span,) = plan([Chunk([1, 1], 39, [7, 9, 8])]).parts
    assert isinstance(span, Span)
    assert span.run == -1
    assert span.blocks is not None
    assert span.blocks.tolist() == [7, 9, 8]


def test_unused_end_of_a_block_table_is_ignored() -> None:
    (span,) = plan([Chunk([1, 1], 15, [7, 8, 2, 5])]).parts
    assert isinstance(span, Span)
    assert span.run == 7 * 16


def test_single_tokens_of_several_sequences_form_a_group() -> None:
    got = plan([Chunk([1], 20, [4, 2, 8]), Chunk([7, 7], 3, [5]), Chunk([2], 3, [6])])
    group, span = got.parts
    assert isinstance(group, Group)
    assert isinstance(span, Span)
    assert group.rows is not None
    assert group.rows.tolist() == [0, 3]
    seen = group.visible
    assert seen.blocks.tolist() == [4, 2, 6]
    assert (seen.offset.tolist(), seen.skip.tolist(), seen.keys.tolist()) == (
        [0, 2],
        [0, 0],
        [21, 4],
    )
    for chunks in ([Chunk([1], 20, [4, 2]), Chunk([2], 3, [6])], [Chunk([1], 20, [4, 2])]):
        (group,) = plan(chunks).parts
        assert isinstance(group, Group)
        assert group.rows is None


def test_window_bounds_what_is_read() -> None:
    shape = CacheShape(block_size=16, window=10, exact=False)
    (span,) = plan([Chunk([1], 50, list(range(4)))], replace(shape, exact=True)).parts
    assert isinstance(span, Span)
    assert (span.begin, span.keys, span.skip) == (41, 10, 9)
    (span,) = plan([Chunk([1] * 4, 50, [0, 1, 3, 2])], shape).parts
    assert isinstance(span, Span)
    assert (span.begin, span.context, span.skip) == (41, 54, 9)
    assert span.mask is not None
    for i in range(4):
        visible = (span.mask[i] == 0).nonzero().flatten() + span.begin
        assert visible.tolist() == list(range(41 + i, 51 + i))
    (group,) = plan([Chunk([1], 50, list(range(4))), Chunk([1], 5, [9])], shape).parts
    assert isinstance(group, Group)
    seen = group.visible
    assert seen.blocks.tolist() == [2, 3, 9]
    assert (seen.offset.tolist(), seen.skip.tolist(), seen.keys.tolist()) == (
        [0, 2],
        [9, 0],
        [10, 6],
    )


def test_long_spans_over_few_keys_expand() -> None:
    rule = ExpandRule(min_queries=10, max_keys=100)
    shape = CacheShape(block_size=16, window=None, exact=False, expand=rule)
    table = list(range(20))
    got = plan(
        [
            Chunk([1] * 9, 0, table),
            Chunk([2] * 10, 90, table),
            Chunk([3] * 10, 91, table),
            Chunk([4], 5, table),
        ],
        shape,
    )
    expanding = [part.first for part in got.parts if isinstance(part, Span) and part.expands]
    assert expanding == [9]
    assert got.kept_rows is not None
    assert got.kept_rows.tolist() == [*range(9), *range(19, 30)]
    assert plan([Chunk([1], 5, table)], shape).kept_rows is None


def test_exact_steps_have_no_groups_and_no_masks() -> None:
    shape = CacheShape(block_size=16, window=None, exact=True)
    got = plan([Chunk([1], 3, [0]), Chunk([2], 3, [1]), Chunk([3, 4], 0, [2])], shape)
    assert all(isinstance(part, Span) and part.mask is None and part.run < 0 for part in got.parts)


@pytest.mark.parametrize(
    ("chunks", "complaint"),
    [
        ([], "at least one chunk"),
        ([Chunk([], 0, [0])], "at least one token"),
        ([Chunk([1], 32, [0, 1])], "block table of 2 blocks"),
        ([Chunk([1, 2], 4095, list(range(400)))], "context is 4096"),
    ],
)
def test_impossible_chunks_are_refused(chunks: list[Chunk], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        plan(chunks)


def test_every_row_belongs_to_one_part() -> None:
    generator = torch.Generator().manual_seed(0)
    chunks, block = [], 0
    for i in range(40):
        count = 1 if i % 3 else int(torch.randint(1, 40, (1,), generator=generator))
        start = int(torch.randint(0, 900, (1,), generator=generator))
        need = (start + count - 1) // 16 + 1
        chunks.append(Chunk([5] * count, start, list(range(block, block + need))))
        block += need
    got = plan(chunks)
    rows: list[int] = []
    for part in got.parts:
        if isinstance(part, Span):
            rows += range(part.first, part.first + part.count)
        else:
            rows += part.rows.tolist()
    assert sorted(rows) == list(range(got.num_tokens))
