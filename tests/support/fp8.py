"""FP8 checkpoints as DeepSeek-V3 is published, and the reference that computes by the same rule."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from ep_kernels.fp8 import GROUP, LARGEST, BlockScaled, rounded_rows
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu

from tests.support.checkpoints import TINY_DEEPSEEK, write
from tests.support.oracle import Oracle

QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [GROUP, GROUP],
}  # fmt: skip
SMALL: dict[str, Any] = TINY_DEEPSEEK | {
    "hidden_size": 128, "intermediate_size": 160, "moe_intermediate_size": 128,
    "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "max_position_embeddings": 96,
}  # fmt: skip
"""One dense layer and one of experts. Of the router's matrices none is whole blocks."""
_NOT_FP8 = ("embed_tokens", "lm_head", "mlp.gate.")


def quantised(weight: torch.Tensor) -> BlockScaled:
    """Block by block; those at the edges are smaller."""
    rows, columns = weight.shape
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // GROUP), -(-columns // GROUP))
    for i, band in enumerate(torch.split(weight, GROUP, 0)):
        for j, block in enumerate(torch.split(band, GROUP, 1)):
            scales[i, j] = block.abs().max() / LARGEST
            there = values[i * GROUP :, j * GROUP :][: block.shape[0], : block.shape[1]]
            there.copy_(block / scales[i, j])
    return BlockScaled(values, scales)


def write_fp8(path: Path, config: dict[str, Any] = SMALL) -> tuple[Path, Path]:
    """An FP8 checkpoint, and one of its dequantised values in fp32. Finished ones are left."""
    twin = write(path.with_name(path.name + "-dequantised"), "deepseek_v3", config)
    if path.exists():
        return path, twin
    tensors = load_file(twin / "model.safetensors")
    small: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or any(part in name for part in _NOT_FP8):
            small[name] = tensor.bfloat16() if tensor.dim() == 2 else tensor
            tensors[name] = small[name].float()
            continue
        matrix = quantised(tensor)
        small[name], small[f"{name}_scale_inv"] = matrix.values, matrix.scales
        tensors[name] = matrix.dense()
    save_file(tensors, twin / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(twin, path)
    save_file(small, path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((path / "config.json").read_text())
    text |= {"torch_dtype": "bfloat16", "quantization_config": QUANTIZATION}
    (path / "config.json").write_text(json.dumps(text))
    return path, twin


class Fp8Oracle(Oracle):
    """transformers on the dequantised weights, with the routed experts' activations rounded to e4m3
    before each product, one scale for 128 values. Their rows come and go as bf16.
    """

    def __init__(self, twin: Path) -> None:
        super().__init__(twin)
        for layer in self.model.model.layers:
            if hasattr(layer.mlp, "experts"):
                layer.mlp.experts.forward = _by_rule(layer.mlp.experts)


def _by_rule(experts: Any) -> Any:
    def forward(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        rows = rounded_rows(x.bfloat16())
        for token, choice in torch.cartesian_prod(*map(torch.arange, chosen.shape)).tolist():
            expert = chosen[token, choice]
            gate, up = linear(rows[token : token + 1], experts.gate_up_proj[expert]).chunk(2, 1)
            row = linear(rounded_rows(silu(gate) * up), experts.down_proj[expert])[0]
            out[token] += weights[token, choice] * row.bfloat16().float()
        return out

    return forward
