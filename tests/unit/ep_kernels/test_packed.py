from __future__ import annotations

import pytest
import torch
from ep_kernels.half import has_tiles
from ep_kernels.packed import (
    has_fp16_kernel,
    has_onednn_kernel,
    is_lossless_fp16,
    keep,
    pack,
    pack_linear,
    serial_rows,
)
from torch.nn.functional import linear

SMALL = (96, 192)
LARGE = (384, 512)


def bf16(shape: tuple[int, int], scale: float = 0.05) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return torch.randn(shape, generator=generator).mul_(scale).bfloat16()


def kinds_for_x86() -> bool:
    return has_fp16_kernel() and has_onednn_kernel()


@pytest.mark.parametrize("kind", ["auto", "fp32"])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [SMALL, LARGE, (1, 5), (37, 100), (513, 129)])
@pytest.mark.parametrize("batch", [(0,), (1,), (7,), (64,), (2, 3)])
def test_product_equals_plain_linear(kind, exact, shape, batch):
    weight = bf16(shape)
    x = torch.randn(*batch, shape[1])
    packed = pack_linear(weight, kind, exact=exact)
    got = packed(x)
    assert got.shape == (*batch, shape[0])
    torch.testing.assert_close(got, linear(x, weight.float()), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
@pytest.mark.parametrize("shape", [SMALL, LARGE, (192, 48), (37, 100), (3, 1)])
def test_exact_rows_do_not_depend_on_the_batch(kind, shape):
    packed = pack_linear(torch.randn(shape), kind, exact=True)
    x = torch.randn(200, shape[1])
    alone = torch.cat([packed(x[i : i + 1]) for i in range(200)])
    for rows in (2, 3, 8, 31, 63, 127, 200):
        assert torch.equal(packed(x[:rows]), alone[:rows])
        assert torch.equal(packed(x[200 - rows :]), alone[200 - rows :])


@pytest.mark.skipif(not kinds_for_x86(), reason="this CPU has no packed fp16 kernel")
def test_auto_takes_fp16_only_for_large_lossless_weights():
    assert pack_linear(bf16(LARGE)).kind == ("bf16" if has_tiles() else "fp16")
    assert pack_linear(bf16(LARGE).float()).kind == ("bf16" if has_tiles() else "fp16")
    barely = bf16(LARGE).float().mul_(1 + 2**-9)  # what fp16 holds and bf16 does not
    assert pack_linear(barely.half()).kind == "fp16"
    assert pack_linear(bf16(SMALL)).kind == "fp32"
    assert pack_linear(torch.randn(LARGE)).kind == "fp32"
    assert pack_linear(bf16(LARGE), exact=True).kind == "fp32"


def test_weights_out_of_range_of_fp16_stay_fp32():
    weight = torch.randn(LARGE)
    weight[3, 4] = 1e6
    packed = pack_linear(weight, "fp16")
    assert packed.kind == "fp32"
    x = torch.randn(2, LARGE[1])
    torch.testing.assert_close(packed(x), linear(x, weight), atol=1.0, rtol=1e-4)
    assert pack_linear(weight, "fp16", exact=True).kind == "fp32"


def test_bytes_follow_the_storage():
    values = LARGE[0] * LARGE[1]
    assert pack_linear(torch.randn(LARGE), "fp32").nbytes == 4 * values
    assert (
        pack_linear(torch.randn(LARGE), "fp16").nbytes == (2 if has_fp16_kernel() else 4) * values
    )


def test_lossless_tells_bf16_from_fp32():
    assert is_lossless_fp16(bf16(LARGE).float())
    assert is_lossless_fp16(torch.zeros(0, 3))
    assert not is_lossless_fp16(torch.randn(LARGE))
    assert not is_lossless_fp16(torch.full((2, 2), 1e6))
    assert not is_lossless_fp16(torch.full((2, 2), float("nan")))


def test_packed_weights_do_not_share_the_callers_memory():
    for shape in (SMALL, LARGE):
        for exact in (False, True):
            weight = torch.randn(shape)
            packed = pack_linear(weight, exact=exact)
            x = torch.randn(2, shape[1])
            before = packed(x)
            weight.zero_()
            assert torch.equal(packed(x), before)


@pytest.mark.parametrize("kind", ["auto", "fp32", "fp16"])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [SMALL, LARGE, (37, 100)])
def test_unpacking_gives_back_every_bit_that_was_kept(kind, exact, shape):
    weight = bf16(shape) if kind == "auto" else torch.randn(shape)
    weight[0, :4] = torch.tensor([0.0, -0.0, 2.0**-24, -(2.0**-20)])  # also below fp16's normals
    kept = keep(weight, kind, exact=exact)
    values = kept.values.clone()
    packed = pack(kept)
    back = packed.matrix()
    assert back.storage is kept.storage is packed.storage
    bits = torch.int16 if back.values.itemsize == 2 else torch.int32
    assert torch.equal(back.values.view(bits), values.view(bits))
    x = torch.randn(5, shape[1])
    assert torch.equal(pack(back)(x), packed(x))


def test_wrong_weights_are_refused():
    with pytest.raises(ValueError, match=r"shape \[out, in\], got \[3\]"):
        pack_linear(torch.zeros(3))
    with pytest.raises(ValueError, match="meta"):
        pack_linear(torch.zeros(3, 3, device="meta"))


@pytest.mark.parametrize(("rows", "width"), [(0, 5), (1, 1), (100, 1000), (3, 40_000), (7, 0)])
def test_serial_rows_cover_all_rows_in_blocks_below_the_grain_size(rows: int, width: int):
    blocks = [range(rows)[block] for block in serial_rows(rows, width)]
    assert [row for block in blocks for row in block] == list(range(rows))
    assert all(len(block) * width < 32_768 or len(block) == 1 for block in blocks)
