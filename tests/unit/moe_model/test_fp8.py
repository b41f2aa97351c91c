"""Checkpoints in DeepSeek-V3's FP8: read dequantised or as they are, and refused on CPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ep_kernels.fp8 import BlockScaled, dequantise, quantise_weight
from safetensors.torch import save_file

from compose.model import check_experts, served_model
from compose.options import UsageError
from mesh.config import load
from moe_model.checkpoint import Checkpoint
from moe_model.errors import BadConfig, MissingTensor, NotFinite, WrongDtype, WrongShape
from moe_model.experts import LocalExperts
from moe_model.model import load_router_model
from moe_model.shard import Cut
from moe_model.spec import load_spec
from moe_model.tensors import TensorRef, TensorTable
from tests.support.checkpoints import TINY_DEEPSEEK
from tests.support.fp8 import QUANTIZATION, quantised, write_fp8

ROWS, COLUMNS = 300, 200
MATRIX = TensorRef("m", (ROWS, COLUMNS), TensorRef("m_scale_inv", (3, 2)))


def spread(matrix: BlockScaled) -> torch.Tensor:
    """Each value times the scale that is written for its block."""
    rows, columns = (torch.arange(size) // 128 for size in matrix.shape)
    return matrix.values.float() * matrix.scales[rows][:, columns]


@pytest.fixture
def matrix(tmp_path: Path) -> BlockScaled:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    weight[130:, :50] *= 100.0
    made = quantised(weight)
    save_file({"m": made.values, "m_scale_inv": made.scales}, tmp_path / "model.safetensors")
    return made


@pytest.mark.parametrize(
    "cut", [None, Cut(0, 0, 1), Cut(0, 100, 270), Cut(1, 127, 129), Cut(1, 0, 200)]
)
def test_any_part_of_a_matrix_is_read_with_its_scales(
    cut: Cut | None, matrix: BlockScaled, tmp_path: Path
) -> None:
    with Checkpoint(tmp_path) as checkpoint:
        got = checkpoint.read(MATRIX, cut)
    wanted = spread(matrix)
    if cut is not None:
        wanted = wanted.narrow(cut.dim, cut.start, cut.stop - cut.start)
    assert torch.equal(got, wanted)


def test_a_matrix_is_read_as_it_is_stored(matrix: BlockScaled, tmp_path: Path) -> None:
    with Checkpoint(tmp_path) as checkpoint:
        got = checkpoint.read_weight(MATRIX)
        assert isinstance(got, BlockScaled)
        assert torch.equal(got.values.view(torch.uint8), matrix.values.view(torch.uint8))
        assert torch.equal(got.scales, matrix.scales)
        with pytest.raises(WrongDtype, match="F8_E4M3"):  # config.json says nothing of FP8
            checkpoint.read(TensorRef("m", (ROWS, COLUMNS)))


def test_whole_blocks_are_quantised_as_near_as_e4m3_comes() -> None:
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(2))
    whole = BlockScaled(*quantise_weight(weight))
    assert torch.equal(whole.dense(), spread(whole))
    assert torch.equal(whole.dense(), dequantise(whole.values, whole.scales))
    assert float((whole.dense() - weight).abs().max()) <= float(weight.abs().max()) * 2**-4


def test_scales_that_lack_or_are_wrong_are_named(matrix: BlockScaled, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    nan = matrix.values.view(torch.uint8).clone()
    nan[7, 9] = 0xFF
    infinite = matrix.scales.clone()
    infinite[2, 1] = float("inf")
    for tensors, error, text in (
        ({"m": matrix.values}, MissingTensor, "m_scale_inv"),
        ({"m": matrix.values, "m_scale_inv": matrix.scales[:2]}, WrongShape, "m_scale_inv"),
        ({"m": matrix.values, "m_scale_inv": infinite}, NotFinite, "m_scale_inv"),
        ({"m": nan.view(matrix.values.dtype), "m_scale_inv": matrix.scales}, NotFinite, "m holds"),
    ):
        save_file({name: t.contiguous() for name, t in tensors.items()}, file)
        with Checkpoint(tmp_path) as checkpoint, pytest.raises(error, match=text):
            checkpoint.read_weight(MATRIX)


@pytest.fixture(scope="module")
def fp8(checkpoints: Path) -> tuple[Path, Path]:
    return write_fp8(checkpoints / "short-fp8")


def test_cpus_refuse_what_devices_serve(fp8: tuple[Path, Path]) -> None:
    path, twin = fp8
    spec = load_spec(path)
    assert spec.fp8
    assert not load_spec(twin).fp8
    with Checkpoint(path) as checkpoint:
        checkpoint.check([*TensorTable(spec).router(), *TensorTable(spec).experts()])
    with pytest.raises(BadConfig, match=r"none where router.device is cpu"):
        load_router_model(path)
    with pytest.raises(BadConfig, match=r"none where expert.device is cpu"):
        LocalExperts.load(path)
    one = {"model.path": str(path), "router.device": "cuda"}
    with pytest.raises(UsageError, match=r"quantization_config.*none where expert.device is cpu"):
        served_model(load(None, one, {}).settings)
    both = load(None, one | {"expert.device": "cuda"}, {})
    _name, served = served_model(both.settings)
    check_experts(both, served)


@pytest.mark.parametrize(
    "change",
    [
        {"quant_method": "gptq"},
        {"weight_block_size": [64, 128]},
        {"weight_block_size": None},
        {"activation_scheme": "static"},
        {"fmt": "e5m2"},
    ],
)
def test_other_quantisations_are_refused(
    change: dict[str, object], fp8: tuple[Path, Path], tmp_path: Path
) -> None:
    config = json.loads((fp8[0] / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadConfig, match=r"DeepSeek-V3's FP8: quant_method 'fp8'") as refused:
        load_spec(tmp_path)
    assert refused.value.key == "quantization_config"


def test_experts_of_odd_sizes_cannot_be_fp8(tiny_deepseek: Path) -> None:
    device = {"model.path": str(tiny_deepseek), "router.device": "cuda", "expert.device": "cuda"}
    spec = load_spec(tiny_deepseek)
    check_experts(load(None, device, {}), spec)
    sizes = "hidden {hidden_size} and intermediate {moe_intermediate_size}".format(**TINY_DEEPSEEK)
    with pytest.raises(UsageError, match=rf"expert\.weights = 'fp8' .*{sizes}.*multiple of 128"):
        check_experts(load(None, device | {"expert.weights": "fp8"}, {}), spec)
