"""What a family declares. Torch-free: gateways and planners read specs too."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_model.architecture import ModelSpec, RopeSpec, YarnSpec
from moe_model.config_json import JsonReader


@dataclass(frozen=True, slots=True)
class Family:
    """One model family: how to read its ``config.json`` and what it calls its tensors.

    ``names`` maps each role of ``moe_model.tensors`` to a tensor name with the placeholders
    ``{layer}`` and ``{expert}``.
    """

    name: str
    architectures: tuple[str, ...]
    parse: Callable[[JsonReader, CommonFields], ModelSpec]
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CommonFields:
    """Spec fields that every family spells alike, ready to be passed on with ``**``."""

    values: Mapping[str, Any]


def read_rope(
    config: JsonReader, dim: int, *, interleaved: bool, default_theta: float
) -> tuple[RopeSpec, float]:
    """The rotary embedding and the factor that its stretch puts on the softmax scale.

    Reads transformers 5's ``rope_parameters`` or the flat ``rope_theta`` / ``rope_scaling`` that
    published checkpoints carry. Raises ``BadConfig`` for kinds other than default and YaRN.
    """
    scaling = config.nested("rope_scaling") or config.nested("rope_parameters")
    flat_theta = config.number("rope_theta", default_theta)
    if scaling is None:
        return RopeSpec(dim=dim, theta=flat_theta, interleaved=interleaved), 1.0
    partial = scaling.number("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise scaling.bad("partial_rotary_factor", "1.0")
    theta = scaling.number("rope_theta", flat_theta)
    key = "rope_type" if scaling.values.get("rope_type") is not None else "type"
    if scaling.choice(key, "default", ("default", "yarn")) == "default":
        return RopeSpec(dim=dim, theta=theta, interleaved=interleaved), 1.0
    yarn, softmax_factor = _read_yarn(config, scaling)
    return RopeSpec(dim=dim, theta=theta, interleaved=interleaved, yarn=yarn), softmax_factor


def _read_yarn(config: JsonReader, scaling: JsonReader) -> tuple[YarnSpec, float]:
    context = config.integer("max_position_embeddings")
    original = config.optional_integer("original_max_position_embeddings", at_least=1)
    if original is None:
        original = scaling.integer("original_max_position_embeddings", context)
    factor = scaling.number("factor", context / original)
    mscale = scaling.optional_number("mscale")
    mscale_all = scaling.optional_number("mscale_all_dim")
    attention_factor = scaling.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = (
            _mscale(factor, mscale) / _mscale(factor, mscale_all)
            if mscale and mscale_all
            else _mscale(factor, 1.0)
        )
    yarn = YarnSpec(
        factor=factor,
        original_context=original,
        beta_fast=scaling.optional_number("beta_fast") or 32.0,
        beta_slow=scaling.optional_number("beta_slow") or 1.0,
        attention_factor=attention_factor,
        truncate=scaling.flag("truncate", True),
    )
    # DeepSeek puts the square of YaRN's temperature on the softmax rather than on q and k.
    return yarn, _mscale(factor, mscale_all) ** 2 if mscale_all else 1.0


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def refuse_unsupported(config: JsonReader) -> None:
    """Raises ``BadConfig`` for what no family can run: other activations."""
    config.choice("hidden_act", "silu", ("silu",))


def require_even(config: JsonReader, *keys: str) -> None:
    """Rotary arithmetic works on pairs of values, so these widths must be even."""
    for key in keys:
        value = config.values.get(key)
        if value is not None and value % 2:
            raise config.bad(key, "an even number")


def model_name(directory: Path) -> str:
    """Model id of a checkpoint directory: the directory's own name."""
    return directory.resolve().name
