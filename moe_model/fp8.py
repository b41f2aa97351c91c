"""FP8 checkpoints as DeepSeek-V3 is published: what ``config.json`` says of them. Torch-free.

A matrix ``NAME`` of type F8_E4M3 has ``NAME_scale_inv`` beside it: a factor for each block of 128 x
128. Routers read such matrices dequantised; experts on a device serve them as they are.
"""

from __future__ import annotations

from pathlib import Path

from moe_model.architecture import ModelSpec
from moe_model.config_json import JsonReader, read_json_object

BLOCK = 128
"""Rows and columns that share a scale."""
SCALES_SUFFIX = "_scale_inv"

_RULE = {
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
}
_MAY_LACK = frozenset({"activation_scheme", "fmt"})


def read_fp8(config: JsonReader) -> bool:
    """Whether ``config.json`` is that of an FP8 checkpoint. Raises ``BadConfig`` for weights that
    are quantised in any other way.
    """
    quantised = config.nested("quantization_config")
    if quantised is None:
        return False
    for key, wanted in _RULE.items():
        value = quantised.values.get(key)
        if value != wanted and not (value is None and key in _MAY_LACK):
            rule = ", ".join(f"{name} {value!r}" for name, value in _RULE.items())
            raise config.bad("quantization_config", f"none, or DeepSeek-V3's FP8: {rule}")
    return True


def refuse_on_cpu(spec: ModelSpec, path: Path, setting: str) -> None:
    """Raises ``BadConfig`` for an FP8 checkpoint: CPUs do not serve them. ``setting``: the one by
    which a device is chosen.
    """
    if spec.fp8:
        file = path / "config.json"
        config = JsonReader(read_json_object(file, "it describes the model"), file)
        raise config.bad(
            "quantization_config",
            f"none where {setting} is cpu (choose a device, or convert the checkpoint to bf16)",
        )


def serves_fp8(spec: ModelSpec, weights: str) -> bool:
    """Whether experts on a device are FP8 by ``expert.weights``."""
    return weights == "fp8" or (weights == "auto" and spec.fp8)


def experts_fault(spec: ModelSpec) -> str:
    """Why the model's experts cannot be FP8, in words and numbers; empty when they can."""
    sizes = {"hidden": spec.hidden_size, "intermediate": spec.expert_intermediate}
    uneven = [f"{name} {size}" for name, size in sizes.items() if size % BLOCK]
    if not uneven:
        return ""
    return f"experts of {' and '.join(uneven)}, expected a multiple of {BLOCK} for FP8"
