"""The model that a mesh is to serve, looked at before any process starts."""

from __future__ import annotations

from pathlib import Path

from compose.options import UsageError
from mesh.config import Effective
from mesh.settings import Settings
from moe_model.errors import CheckpointError
from moe_model.fp8 import experts_fault, refuse_on_cpu, serves_fp8
from moe_model.inventory import Inventory
from moe_model.kv_size import kv_cache_fault
from moe_model.shard import shard_fault
from moe_model.shipped import checkpoint_dir, model_id
from moe_model.spec import ModelSpec, load_spec
from moe_model.tensors import TensorTable
from moe_model.text_files import check_text_files


def served_model(settings: Settings) -> tuple[str, ModelSpec]:
    """Checks all that can be known of the checkpoint without reading its weights: configuration,
    names, shapes and types of all tensors, tokenizer and chat template. Returns the model's id in
    the API, and the model.

    Raises ``UsageError`` for one that some service could not load.
    """
    try:
        path = checkpoint_dir(settings.model.path)
        spec = _checked(path)
        for setting, device in (
            ("router.device", settings.router.device),
            ("expert.device", settings.expert.device),
        ):
            if device == "cpu":
                refuse_on_cpu(spec, path, setting)
        return model_id(settings.model.name, settings.model.path), spec
    except CheckpointError as error:
        raise UsageError(f"model.path: {error}") from None
    except OSError as error:
        raise UsageError(f"model.path: {error.filename}: {error.strerror}") from None


def _checked(path: Path) -> ModelSpec:
    spec = load_spec(path)
    inventory = Inventory(path)
    table = TensorTable(spec)
    inventory.check(table.router())
    inventory.check(table.experts())
    check_text_files(path)
    return spec


def check_workers(effective: Effective, spec: ModelSpec) -> None:
    """Raises ``UsageError`` for more expert workers than the placement has slots a layer, since one
    without a slot only takes memory, and for fewer slots than experts.
    """
    settings = effective.settings
    redundant = settings.planner.redundant_slots
    most = spec.num_experts + redundant
    if settings.mesh.experts > most:
        raise UsageError(
            f"mesh.experts = {settings.mesh.experts} ({effective.origin['mesh.experts']}): "
            f"expected at most {most}, one slot each: {spec.num_experts} experts a layer + "
            f"planner.redundant_slots = {redundant}"
        )
    each, workers = settings.expert.slots_per_layer, settings.mesh.experts
    if each and each * workers < spec.num_experts:
        raise UsageError(
            f"expert.slots_per_layer = {each} ({effective.origin['expert.slots_per_layer']}): "
            f"{workers} expert workers with {each} slots each have {each * workers} a layer, "
            f"its {spec.num_experts} experts need as many"
        )


def check_cache(effective: Effective, spec: ModelSpec) -> None:
    """Raises ``UsageError`` for a KV cache in which no sequence of full length fits."""
    router = effective.settings.router
    if not router.kv_cache_bytes:
        return
    if fault := kv_cache_fault(spec, router.kv_cache_bytes, router.block_size, router.tp):
        raise UsageError(
            f"router.kv_cache_bytes = {router.kv_cache_bytes} "
            f"({effective.origin['router.kv_cache_bytes']}): {fault}"
        )


def check_groups(effective: Effective, spec: ModelSpec) -> None:
    """Raises ``UsageError`` for routers of more processes than can share the model."""
    tp = effective.settings.router.tp
    if fault := shard_fault(spec, tp):
        raise UsageError(f"router.tp = {tp} ({effective.origin['router.tp']}): {fault}")


def check_experts(effective: Effective, spec: ModelSpec) -> None:
    """Raises ``UsageError`` for experts that are to be FP8 and cannot."""
    expert = effective.settings.expert
    if expert.device == "cpu" or not serves_fp8(spec, expert.weights):
        return
    if fault := experts_fault(spec):
        raise UsageError(
            f"expert.weights = {expert.weights!r} ({effective.origin['expert.weights']}): {fault}; "
            "bf16 takes any"
        )
