from __future__ import annotations

import pytest

from router_svc.blocks import BlockManager, chain_key


def keys(*blocks: list[int]) -> list[bytes]:
    chain: list[bytes] = []
    for tokens in blocks:
        chain.append(chain_key(chain[-1] if chain else b"", tokens))
    return chain


def test_a_key_names_a_block_together_with_all_before_it() -> None:
    assert keys([1, 2], [3, 4])[1] == keys([1, 2], [3, 4])[1]
    assert keys([1, 2], [3, 4])[1] != keys([9, 2], [3, 4])[1]
    assert keys([3, 4])[0] != keys([1, 2], [3, 4])[1]
    assert keys([1, 23])[0] != keys([12, 3])[0]


def test_low_ids_are_handed_out_first_and_again_after_release() -> None:
    manager = BlockManager(8, 4)
    assert manager.allocate(3) == [0, 1, 2]
    manager.release([1])
    assert manager.allocate(2) == [1, 3]


def test_allocation_is_all_or_nothing() -> None:
    manager = BlockManager(3, 4)
    assert manager.allocate(4) is None
    assert manager.num_free == 3
    assert manager.allocate(3) == [0, 1, 2]
    assert manager.allocate(1) is None


def test_a_released_prefix_is_found_and_revived() -> None:
    manager = BlockManager(4, 2)
    chain = keys([1, 2], [3, 4])
    table = manager.allocate(2)
    assert table is not None
    for block, key in zip(table, chain, strict=True):
        manager.publish(block, key)
    manager.release(table)
    assert manager.num_free == 4
    assert manager.match([*chain, b"other"]) == table
    assert manager.num_free_besides(table) == 2
    manager.share(table)
    assert manager.num_free == 2
    manager.check([table])


def test_a_shared_block_is_free_only_when_every_holder_let_go() -> None:
    manager = BlockManager(2, 2)
    table = manager.allocate(1)
    assert table is not None
    manager.publish(table[0], keys([1, 2])[0])
    manager.share(table)
    manager.release(table)
    assert manager.num_free == 1
    manager.check([table])
    manager.release(table)
    assert manager.num_free == 2


def test_the_least_recently_freed_prefix_is_evicted_first_and_its_tail_before_its_head() -> None:
    manager = BlockManager(4, 2)
    old, new = keys([1, 1], [2, 2]), keys([3, 3], [4, 4])
    tables = []
    for chain in (old, new):
        table = manager.allocate(2)
        assert table is not None
        for block, key in zip(table, chain, strict=True):
            manager.publish(block, key)
        tables.append(table)
    for table in tables:
        manager.release(table)
    manager.allocate(1)
    assert len(manager.match(old)) == 1
    assert len(manager.match(new)) == 2
    manager.allocate(1)
    assert manager.match(old) == []
    assert len(manager.match(new)) == 2


def test_a_second_block_with_the_same_content_stays_private() -> None:
    manager = BlockManager(4, 2)
    key = keys([1, 2])[0]
    first, second = manager.allocate(1), manager.allocate(1)
    assert first is not None
    assert second is not None
    manager.publish(first[0], key)
    manager.publish(second[0], key)
    assert manager.match([key]) == first
    manager.release(second)
    manager.check([first])


def test_a_forgotten_block_is_blank_once_released() -> None:
    manager = BlockManager(4, 2)
    chain = keys([1, 2], [3, 4])
    table = manager.allocate(2)
    assert table is not None
    for block, key in zip(table, chain, strict=True):
        manager.publish(block, key)
    manager.forget([table[0]])
    manager.check([table])
    assert manager.match(chain) == []
    manager.release(table)
    manager.check([])
    assert manager.allocate(1) == [table[0]]


def test_without_prefix_cache_nothing_is_found() -> None:
    manager = BlockManager(4, 2, prefix_cache=False)
    table = manager.allocate(1)
    assert table is not None
    manager.publish(table[0], keys([1, 2])[0])
    assert manager.match(keys([1, 2])) == []


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (4, 0)])
def test_an_empty_cache_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"{blocks} of {size}"):
        BlockManager(blocks, size)
