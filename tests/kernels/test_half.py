from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ep_kernels.crew import Crew
from ep_kernels.half import HalfMatrices, HalfMatrix, has_kernel, has_tiles, panel_width
from torch.nn.functional import linear

pytestmark = pytest.mark.skipif(not has_kernel(), reason="this CPU has no fp16 kernel")

WIDTHS = [width for width in (16, 32) if has_kernel() and panel_width(width) == width]
SHAPES = [(1, 1), (3, 5), (16, 32), (31, 7), (33, 100), (96, 64), (513, 129), (70, 9000)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 11, 12, 13, 25, 64, 130])
def test_product_equals_torchs(width: int, shape: tuple[int, int], rows: int) -> None:
    values, x = torch.randn(shape).half(), torch.randn(rows, shape[1])
    exact = linear(x.double(), values.double())
    got = HalfMatrix(values, width)(x)
    assert got.shape == exact.shape
    torch.testing.assert_close(got.double(), exact, atol=1e-5 * shape[1] ** 0.5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rows_bits_do_not_depend_on_company_vectors_or_place(shape: tuple[int, int]) -> None:
    values, x = torch.randn(shape).half(), torch.randn(150, shape[1])
    alone = torch.cat([HalfMatrix(values, WIDTHS[0])(row) for row in x.split(1)])
    for width in WIDTHS:
        matrix = HalfMatrix(values, width)
        for rows in (2, 6, 12, 13, 40, 150):
            assert torch.equal(matrix(x[150 - rows :]), alone[150 - rows :])


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_may_lie_apart_and_nothing_else_is_written(width: int) -> None:
    values = torch.randn(3, 37, 20).half()
    x, out = torch.randn(9, 3, 64), torch.full((9, 3, 100), float("nan"))
    HalfMatrices(values, width).into(x[..., 30:50], out[..., 7:44])
    for i in range(3):
        alone = HalfMatrix(values[i], width)(x[:, i, 30:50].contiguous())
        assert torch.equal(out[:, i, 7:44], alone)
    assert out[..., :7].isnan().all()
    assert out[..., 44:].isnan().all()


@pytest.mark.parametrize("width", WIDTHS)
def test_values_come_back_bit_by_bit(width: int) -> None:
    values = torch.randint(-(2**15), 2**15, (45, 77), dtype=torch.int16).view(torch.float16)
    back = HalfMatrix(values, width).values()
    assert torch.equal(back.view(torch.int16), values.view(torch.int16))


def test_weights_of_all_sizes_are_taken_as_they_are() -> None:
    """Below fp16's normal range, the largest, both zeros."""
    values = torch.tensor([[2.0**-24, 65504.0, -0.0, -(2.0**-14)]]).half()
    x = torch.eye(4)
    assert torch.equal(HalfMatrix(values)(x).T, values.float())


def test_a_crew_changes_no_bit() -> None:
    crew = Crew(2)
    matrix, heads = HalfMatrix(torch.randn(700, 900).half()), torch.randn(5, 200, 300).half()
    several = HalfMatrices(heads)
    for rows in (1, 3, 40):
        x, y = torch.randn(rows, 900), torch.randn(rows, 5, 300)
        alone, alone_several = matrix(x), torch.empty(rows, 5, 200)
        several.into(y, alone_several)
        for _ in range(50):
            crew.share()
            shared = torch.empty(rows, 5, 200)
            several.into(y, shared)
            assert torch.equal(matrix(x), alone)
            assert torch.equal(shared, alone_several)
            crew.keep()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="helpers need a second core")
def test_helpers_keep_off_the_core_of_the_one_they_help() -> None:
    crew, allowed = Crew(1), os.sched_getaffinity(0)
    matrix, x = HalfMatrix(torch.randn(512, 512).half()), torch.randn(4, 512)
    core, tasks = ctypes.CDLL(None).sched_getcpu, Path("/proc/self/task")
    try:
        for wanted in sorted(allowed)[:2]:
            for _attempt in range(100):
                os.sched_setaffinity(0, {wanted})
                os.sched_setaffinity(0, allowed)
                crew.share()
                matrix(x)
                crew.keep()
                if core() == wanted:  # else it was moved meanwhile
                    break
            masks = [os.sched_getaffinity(int(task.name)) for task in tasks.iterdir()]
            assert allowed - {wanted} in masks
    finally:
        os.sched_setaffinity(0, allowed)


def test_several_threads_may_multiply_while_a_crew_helps_one_of_them() -> None:
    crew = Crew(1)
    matrix, x = HalfMatrix(torch.randn(2048, 1024).half()), torch.randn(40, 1024)
    alone = matrix(x)
    crew.share()
    try:
        with ThreadPoolExecutor(3) as pool:
            got = [pool.submit(matrix, x) for _ in range(60)]
            assert all(torch.equal(future.result(30), alone) for future in got)
    finally:
        crew.keep()


@pytest.mark.skipif(not has_tiles(), reason="this CPU has no matrix unit for bf16")
class TestTiles:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("rows", [0, 1, 3, 8, 9, 16, 17, 33, 130, 300])
    def test_product_is_as_near_as_fp32s(self, shape: tuple[int, int], rows: int) -> None:
        values, x = torch.randn(shape).bfloat16(), torch.randn(rows, shape[1])
        exact = linear(x.double(), values.double())
        got = HalfMatrix(values)(x)
        assert got.shape == exact.shape
        torch.testing.assert_close(got.double(), exact, atol=1e-5 * shape[1] ** 0.5, rtol=1e-5)

    def test_no_bit_of_a_row_is_dropped(self) -> None:
        """Each value is told from its neighbour, whatever its size."""
        x = torch.tensor([1.0, 3e4, 1e-6, -0.3]).view(4, 1).repeat(5, 1) * torch.ones(1, 32)
        x = torch.cat([x, torch.nextafter(x, torch.tensor(1e9))])
        unit = torch.eye(32).bfloat16()
        assert torch.equal(HalfMatrix(unit)(x), x)
        assert torch.equal(HalfMatrix(unit)(x[:8]), x[:8])

    def test_several_matrices_rows_apart_and_a_crew(self) -> None:
        values, x = torch.randn(5, 200, 100).bfloat16(), torch.randn(40, 5, 164)
        matrices, crew = HalfMatrices(values), Crew(2)
        for rows in (3, 40):
            out = torch.full((rows, 5, 260), float("nan"))
            crew.share()
            matrices.into(x[:rows, :, 64:], out[..., 30:230])
            crew.keep()
            want = torch.einsum("nki,koi->nko", x[:rows, :, 64:], values.float())
            torch.testing.assert_close(out[..., 30:230], want, atol=1e-4, rtol=1e-4)
            assert out[..., :30].isnan().all()
            assert out[..., 230:].isnan().all()

    def test_values_come_back_bit_by_bit(self) -> None:
        values = torch.randint(-(2**15), 2**15, (45, 77), dtype=torch.int16).view(torch.bfloat16)
        back = HalfMatrix(values).values()
        assert torch.equal(back.view(torch.int16), values.view(torch.int16))
