"""An FP8 checkpoint with drawn weights for the mesh on the card, and a CPU's reference of it.

The shipped model with sizes that FP8 can have. A twin holds the same values dequantised; the
reference reads that, and rounds the routed experts' activations as the kernels do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ep_kernels.fp8 import GROUP, BlockScaled, quantise_weight, rounded_rows
from safetensors.torch import save_file
from torch.nn.functional import linear, pad, silu

from moe_model.checkpoint import Checkpoint
from moe_model.experts import ExpertClient, Ticket, read_expert
from moe_model.reference import ReferenceModel
from moe_model.spec import ModelSpec, load_spec
from moe_model.tensors import TensorRef, TensorTable

SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "num_hidden_layers": 3, "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [GROUP, GROUP],
    },
}  # fmt: skip


def write_pair(
    model: Path, folder: Path, sizes: Mapping[str, Any], generator: torch.Generator
) -> tuple[Path, Path]:
    """The checkpoint and its twin below ``folder``; texts and other settings are ``model``'s."""
    small, twin = folder / "fp8", folder / "dequantised"
    for path in (small, twin):
        path.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(model / name, path)
    config = json.loads((model / "config.json").read_text()) | sizes
    (small / "config.json").write_text(json.dumps(config))
    del config["quantization_config"]
    (twin / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    table = TensorTable(load_spec(small))
    kept = {table.ref(role).name for role in ("embedding", "head")}
    kept |= {table.ref("router", layer).name for layer in table.spec.moe_layers}
    values: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for ref in (*table.router(), *table.experts()):
        drawn = _drawn(ref, generator)
        if ref.scales is None or ref.name in kept:
            values[ref.name] = drawn.bfloat16()
            plain[ref.name] = values[ref.name].float()
            continue
        rows, columns = ref.shape
        whole = pad(drawn, (0, -columns % GROUP, 0, -rows % GROUP))
        quantised, scales = quantise_weight(whole)
        matrix = BlockScaled(quantised[:rows, :columns].contiguous(), scales)
        values[ref.name], values[ref.scales.name] = matrix.values, matrix.scales
        plain[ref.name] = matrix.dense()
    save_file(values, small / "model.safetensors")
    save_file(plain, twin / "model.safetensors")
    return small, twin


def _drawn(ref: TensorRef, generator: torch.Generator) -> torch.Tensor:
    if len(ref.shape) == 1:
        return 1.0 + 0.05 * torch.randn(ref.shape, generator=generator)
    return torch.randn(ref.shape, generator=generator) * ref.shape[-1] ** -0.5


def reference_of(twin: Path) -> ReferenceModel:
    """As the mesh computes, up to bf16."""
    reference = ReferenceModel(twin, weights="fp32")
    reference.experts = RoundingExperts(twin, load_spec(twin))
    return reference


class _Answered(Ticket):
    done = True

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def result(self) -> torch.Tensor:
        return self._rows

    def abandon(self) -> None:
        pass


class RoundingExperts(ExpertClient):
    """Experts of dequantised FP8 weights, with activations rounded to e4m3 before each product."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        with Checkpoint(path) as checkpoint:
            self._experts = {
                (layer, expert): read_expert(checkpoint, spec, layer, expert)
                for layer in spec.moe_layers
                for expert in range(spec.num_experts)
            }

    def dispatch(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        out, rows = torch.zeros_like(x), rounded_rows(x.bfloat16())
        for expert in topk_ids.unique().tolist():
            gate, up, down = self._experts[layer, expert]
            token, choice = torch.nonzero(topk_ids == expert, as_tuple=True)
            act = silu(linear(rows[token], gate)) * linear(rows[token], up)
            row = linear(rounded_rows(act), down) * topk_weights[token, choice, None]
            out.index_add_(0, token, row)
        return _Answered(out)
