"""Placements and loads in the formats of other systems, to start a mesh from.

API
    ``read_initial(source, shape) -> Initial``    sniffs the format; raises ``FormatError``
    ``Initial.placement(ranks, epoch)``           the same on the ranks of this mesh

``source`` is a file, JSON itself (it begins with ``{``), or ``trivial``. Formats:

    SGLang          JSON: ``physical_to_logical_map[layers][slots]``, or
                    ``logical_count[(steps,) layers][experts]``; one layer for each MoE layer or for
                    each layer of the model. ``trivial``: no placement, begin evenly
    TensorRT-LLM    YAML: ``num_slots``, ``initial_global_assignments: {layer: [expert a slot]}``
                    by the model's layer numbers; what lies beyond the model's last layer (its
                    layers for multi-token prediction) is read over
    vllm-ascend     JSON: ``moe_layer_count``, ``layer_list: [{layer_id, device_count,
                    device_list: [{device_id, device_expert: [expert a slot]}]}]``; ``layer_id``
                    counts MoE layers from 0, or is the model's number

SGLang's is written by ``mesh.placement_json``. Nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import yaml

from mesh.messages import Placement
from planner_svc.policies.problem import Loads

TRIVIAL = "trivial"
MAX_FILE_BYTES = 256 * 1024 * 1024
MAX_YAML_BYTES = 16 * 1024 * 1024
"""A YAML file is read some hundred times more slowly than JSON; a placement takes 100 kB."""
_PICKLES = (b"\x80", b"PK\x03\x04")
"""How pickles begin, bare and in torch's archives."""
T = TypeVar("T")


class FormatError(Exception):
    """What a file says cannot be used; the message names file, key, value and what was expected.

    Attributes: ``source`` and ``key``. Nothing has been changed.
    """

    def __init__(self, source: str, key: str, message: str) -> None:
        super().__init__(f"{source}: {key + ': ' if key else ''}{message}")
        self.source = source
        self.key = key


@dataclass(frozen=True, slots=True)
class Shape:
    """The model that a file must be about."""

    moe_layers: tuple[int, ...]
    """The model's numbers of its MoE layers."""
    num_layers: int
    """All layers."""
    num_experts: int


@dataclass(frozen=True, slots=True)
class Initial:
    """What a file says. Neither ``rows`` nor ``loads``: to begin evenly."""

    source: str
    """Where it came from, for messages."""
    shape: Shape
    rows: tuple[tuple[int, ...], ...] | None = None
    """``[moe layers][slots]`` logical experts, all of them in each layer."""
    slots_per_rank: tuple[int, ...] | None = None
    """``[ranks]``; None: equal shares on however many ranks there are."""
    loads: Loads | None = None
    """``[steps, moe layers, experts]`` tokens for a policy to plan from."""

    def placement(self, ranks: Sequence[str], epoch: int) -> Placement:
        """The rows on ``ranks``. Raises ``FormatError`` when they are for another number of ranks;
        call it only when there are ``rows``.
        """
        assert self.rows is not None
        slots = self.slots_per_rank
        total = len(self.rows[0]) if self.rows else 0
        if slots is None:
            each, over = divmod(total, max(len(ranks), 1))
            if over or not ranks:
                raise FormatError(
                    self.source, "", f"{total} slots a layer do not divide among {len(ranks)} ranks"
                )
            slots = (each,) * len(ranks)
        if len(slots) != len(ranks):
            raise FormatError(
                self.source, "", f"placement for {len(slots)} ranks, this mesh has {len(ranks)}"
            )
        return Placement(
            epoch=epoch,
            moe_layers=self.shape.moe_layers,
            num_experts=self.shape.num_experts,
            ranks=tuple(ranks),
            slots_per_rank=slots,
            physical_to_logical=self.rows,
        )


def read_initial(source: str, shape: Shape) -> Initial:
    """What ``source`` says about a model of ``shape``. Raises ``FormatError``."""
    if source.strip() == TRIVIAL:
        return Initial(TRIVIAL, shape)
    inline = source.lstrip().startswith("{")
    name = "inline JSON" if inline else source
    body = source.encode() if inline else _read(source)
    if body.startswith(_PICKLES):
        raise FormatError(name, "", "is a pickle, which is never read; expected JSON or YAML")
    if body.lstrip()[:1] == b"{":
        return _from_json(name, body, shape)
    return _from_tensorrt(name, _yaml(name, body), shape)


def _read(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            body = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise FormatError(
            path,
            "",
            f"cannot be read ({error.strerror}); expected a file, JSON that begins with {{, or "
            f"{TRIVIAL}",
        ) from None
    except ValueError as error:  # a zero byte in the name
        raise FormatError(repr(path), "", f"is no file name ({error})") from None
    if len(body) > MAX_FILE_BYTES:
        raise FormatError(path, "", f"has more than {MAX_FILE_BYTES} bytes")
    return body


def _yaml(name: str, body: bytes) -> Any:
    if len(body) > MAX_YAML_BYTES:
        raise FormatError(name, "", f"has {len(body)} bytes, at most {MAX_YAML_BYTES} of YAML")
    try:
        return yaml.safe_load(body)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        where = " ".join(str(error).split())
        raise FormatError(name, "", f"is neither JSON nor YAML: {where}") from None
    except RecursionError:
        raise FormatError(name, "", "is nested too deeply") from None


# ---------------------------------------------------------------- JSON: SGLang, vllm-ascend


class _Device(msgspec.Struct, frozen=True):
    device_expert: tuple[int, ...]
    device_id: int | None = None


class _Layer(msgspec.Struct, frozen=True):
    device_list: tuple[_Device, ...]
    layer_id: int | None = None
    device_count: int | None = None


class _Document(msgspec.Struct, frozen=True):
    """Fields of all formats; recordings bring others besides, which are read over."""

    physical_to_logical_map: tuple[tuple[int, ...], ...] | None = None
    logical_count: msgspec.Raw = msgspec.Raw()
    layer_list: tuple[_Layer, ...] | None = None
    moe_layer_count: int | None = None


def _from_json(name: str, body: bytes, shape: Shape) -> Initial:
    document = _decode(name, "", body, _Document)
    counts = bytes(document.logical_count)
    present = {
        "physical_to_logical_map": document.physical_to_logical_map is not None,
        "logical_count": counts not in {b"", b"null"},
        "layer_list": document.layer_list is not None,
    }
    given = [key for key, is_there in present.items() if is_there]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise FormatError(name, "", f"expected one of the keys {', '.join(present)}; found {found}")
    if document.physical_to_logical_map is not None:
        key = "physical_to_logical_map"
        rows = _moe_layers(name, key, document.physical_to_logical_map, shape)
        return Initial(name, shape, _sound(name, key, rows, shape))
    if present["logical_count"]:
        return Initial(name, shape, loads=_counts(name, counts, shape))
    return _from_ascend(name, document, shape)


def _decode(name: str, key: str, body: bytes, type_: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FormatError(name, key, str(error)) from None
    except RecursionError:
        raise FormatError(name, key, "is nested too deeply") from None


def _moe_layers(name: str, key: str, layers: Sequence[T], shape: Shape) -> list[T]:
    """Of a list by layer, those of the MoE layers."""
    if len(layers) == len(shape.moe_layers):
        return list(layers)
    if len(layers) == shape.num_layers:
        return [layers[layer] for layer in shape.moe_layers]
    raise FormatError(
        name,
        key,
        f"{len(layers)} layers; expected {len(shape.moe_layers)} (the MoE layers) or "
        f"{shape.num_layers} (all layers)",
    )


def _counts(name: str, body: bytes, shape: Shape) -> Loads:
    key = "logical_count"
    depth = len(body) - len(body.lstrip(b"[ \t\r\n"))
    opened = body[:depth].count(b"[")
    steps: Sequence[Sequence[Sequence[float]]]
    if opened == 2:
        steps = [_decode(name, key, body, list[list[float]])]
    else:
        steps = _decode(name, key, body, list[list[list[float]]])
    if not steps:
        raise FormatError(name, key, "has no step")
    chosen = [_moe_layers(name, key, layers, shape) for layers in steps]
    for layers in chosen:
        for layer, row in zip(shape.moe_layers, layers, strict=True):
            if len(row) != shape.num_experts:
                raise FormatError(
                    name,
                    key,
                    f"layer {layer} has counts of {len(row)} experts, expected {shape.num_experts}",
                )
    return np.array(chosen, dtype=np.float64)


def _from_ascend(name: str, document: _Document, shape: Shape) -> Initial:
    key = "layer_list"
    layers = document.layer_list or ()
    if document.moe_layer_count not in {None, len(layers)}:
        raise FormatError(
            name, "moe_layer_count", f"{document.moe_layer_count}, but {len(layers)} layers follow"
        )
    if len(layers) != len(shape.moe_layers):
        raise FormatError(
            name, key, f"{len(layers)} layers, the model has {len(shape.moe_layers)} MoE layers"
        )
    ids = [position if l.layer_id is None else l.layer_id for position, l in enumerate(layers)]
    by_id = dict(zip(ids, layers, strict=True))
    ordinals = range(len(layers))
    for numbers in (ordinals, shape.moe_layers):
        if by_id.keys() == set(numbers):
            ordered = [by_id[number] for number in numbers]
            break
    else:
        raise FormatError(
            name,
            f"{key}.layer_id",
            f"{sorted(ids)}; expected 0 to {len(layers) - 1} each once, or {shape.moe_layers}",
        )
    slots: tuple[int, ...] | None = None
    rows: list[tuple[int, ...]] = []
    for layer, entry in zip(shape.moe_layers, ordered, strict=True):
        held = _devices(name, f"{key}, layer {layer}", entry)
        mine = tuple(len(experts) for experts in held)
        if slots not in {None, mine}:
            raise FormatError(
                name,
                f"{key}, layer {layer}",
                f"devices of {mine} slots, of {slots} in the layers before; expected the same",
            )
        slots = mine
        rows.append(tuple(expert for experts in held for expert in experts))
    return Initial(name, shape, _sound(name, key, rows, shape), slots)


def _devices(name: str, key: str, layer: _Layer) -> list[tuple[int, ...]]:
    """Experts of each device, in the order of their numbers."""
    devices = layer.device_list
    if layer.device_count not in {None, len(devices)}:
        raise FormatError(
            name, key, f"device_count {layer.device_count}, but {len(devices)} devices follow"
        )
    by_id = {
        position if device.device_id is None else device.device_id: device.device_expert
        for position, device in enumerate(devices)
    }
    if by_id.keys() != set(range(len(devices))):
        raise FormatError(
            name, key, f"device_id {sorted(by_id)}; expected 0 to {len(devices) - 1} each once"
        )
    return [by_id[number] for number in range(len(devices))]


# ---------------------------------------------------------------- YAML: TensorRT-LLM


class _TensorRt(msgspec.Struct, frozen=True):
    initial_global_assignments: dict[int, tuple[int, ...]]
    num_slots: int | None = None


def _from_tensorrt(name: str, data: Any, shape: Shape) -> Initial:
    key = "initial_global_assignments"
    if not isinstance(data, Mapping) or key not in data:
        raise FormatError(name, "", f"expected YAML with {key}: {{layer: [expert of each slot]}}")
    try:
        document = msgspec.convert(data, _TensorRt)
    except (msgspec.ValidationError, RecursionError) as error:
        raise FormatError(name, key, str(error)) from None
    layers = document.initial_global_assignments
    missing = [layer for layer in shape.moe_layers if layer not in layers]
    strange = [
        layer for layer in layers if layer not in shape.moe_layers and not layer >= shape.num_layers
    ]
    if missing or strange:
        raise FormatError(
            name,
            key,
            f"layers {_some(layers)}; expected the model's MoE layers {_some(shape.moe_layers)}",
        )
    rows = _sound(name, key, [layers[layer] for layer in shape.moe_layers], shape)
    if document.num_slots not in {None, len(rows[0]) if rows else 0}:
        raise FormatError(
            name, "num_slots", f"{document.num_slots}, but the layers have {len(rows[0])} slots"
        )
    return Initial(name, shape, rows)


def _some(numbers: Iterable[int]) -> str:
    shown = sorted(numbers)
    text = ", ".join(map(str, shown[:4]))
    return f"{text} ... {shown[-1]} ({len(shown)})" if len(shown) > 4 else text or "none"


# ---------------------------------------------------------------- all formats


def _sound(
    name: str, key: str, rows: Sequence[tuple[int, ...]], shape: Shape
) -> tuple[tuple[int, ...], ...]:
    """``rows``, checked: equally long, of experts that the model has, and none of them missing."""
    for layer, row in zip(shape.moe_layers, rows, strict=True):
        where = f"{key}, layer {layer}"
        if len(row) != len(rows[0]):
            raise FormatError(name, where, f"{len(row)} slots, {len(rows[0])} in the layers before")
        wrong = next((slot for slot, e in enumerate(row) if not 0 <= e < shape.num_experts), None)
        if wrong is not None:
            raise FormatError(
                name,
                where,
                f"slot {wrong} holds expert {row[wrong]}; expected 0 to {shape.num_experts - 1}",
            )
        if lost := sorted(set(range(shape.num_experts)).difference(row)):
            raise FormatError(
                name, where, f"no slot for expert {_some(lost)}; expected one or more for each"
            )
    return tuple(rows)
