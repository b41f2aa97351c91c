from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ep_kernels.weight_memory import WeightMemory

MIB = 1 << 20


def test_pieces_are_zeros_that_begin_at_cache_lines_and_do_not_overlap() -> None:
    memory = WeightMemory(MIB)
    pieces = [memory.zeros(count, 37, torch.float16) for count in range(1, 400)]
    for number, piece in enumerate(pieces):
        assert piece.shape == (number + 1, 37)
        assert piece.data_ptr() % 64 == 0
        assert not piece.any()
        piece.fill_(number)
    for number, piece in enumerate(pieces):
        assert (piece == number).all()


def test_a_piece_is_given_out_again_once_nobody_refers_to_it_and_not_before() -> None:
    memory = WeightMemory(MIB)
    kept = memory.zeros(1, 1000, torch.float32)  # its block stays
    first = memory.zeros(1, 1000, torch.float32)
    first.fill_(1.0)
    at, view = first.data_ptr(), first[0, 5:]
    del first
    assert memory.zeros(1, 1000, torch.float32).data_ptr() != at
    assert (view == 1.0).all()
    del view
    again = memory.zeros(1, 1000, torch.float32)
    assert again.data_ptr() == at
    assert not again.any()
    assert not kept.any()


def test_more_than_a_block_and_nothing_at_all() -> None:
    memory = WeightMemory(MIB)
    large = memory.zeros(3, MIB, torch.float32)
    large.fill_(2.0)
    assert large.sum().item() == 6 * MIB
    assert memory.zeros(0, 8, torch.float16).shape == (0, 8)
    assert memory.zeros(2, 0, torch.bfloat16).shape == (2, 0)


def test_blocks_without_a_piece_in_use_go_back_to_the_system() -> None:
    memory = WeightMemory(MIB)
    pieces = [memory.zeros(1, MIB // 4, torch.uint8) for _ in range(40)]
    blocks = [weakref.ref(block) for block in _blocks()]
    assert len(blocks) >= 10
    pieces.clear()
    memory.zeros(1, 1, torch.uint8)
    gc.collect()
    assert sum(block() is not None for block in blocks) <= 1


def test_threads_may_take_and_drop_at_once() -> None:
    memory = WeightMemory(MIB)

    def work(number: int) -> bool:
        for turn in range(200):
            piece = memory.zeros(1 + turn % 3, 500, torch.float32)
            if piece.any():
                return False
            piece.fill_(number)
            if not (piece == number).all():
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(1, 9)))


def test_too_much_is_refused() -> None:
    with pytest.raises(MemoryError, match="for weights"):
        WeightMemory().zeros(1, 1 << 60, torch.uint8)


def _blocks() -> list[object]:
    return [found for found in gc.get_objects() if type(found).__name__ == "_Block"]
