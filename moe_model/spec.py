"""Read what a checkpoint is without reading its weights. Torch-free.

``load_spec`` and ``serving_digest`` are all that a gateway or planner needs of a model.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from moe_model.architecture import (
    AttentionSpec,
    GateSpec,
    GqaSpec,
    MlaSpec,
    ModelSpec,
    RopeSpec,
    SamplingDefaults,
    YarnSpec,
)
from moe_model.config_json import JsonReader, read_json_object
from moe_model.errors import MissingFile, UnknownArchitecture
from moe_model.families import FAMILIES
from moe_model.families.base import CommonFields, model_name, refuse_unsupported
from moe_model.fp8 import read_fp8
from moe_model.safetensors_header import read_header, weight_files

__all__ = [
    "AttentionSpec",
    "GateSpec",
    "GqaSpec",
    "MlaSpec",
    "ModelSpec",
    "RopeSpec",
    "SamplingDefaults",
    "YarnSpec",
    "load_spec",
    "model_digest",
    "serving_digest",
]

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096


def load_spec(path: Path) -> ModelSpec:
    """The model in checkpoint directory ``path``, from ``config.json`` and, where present,
    ``generation_config.json``.

    Raises ``MissingFile``, ``CorruptFile``, ``BadConfig`` and ``UnknownArchitecture``.
    """
    config_path = path / "config.json"
    config = JsonReader(read_json_object(config_path, "it describes the model"), config_path)
    refuse_unsupported(config)
    architectures = config.values.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise config.bad("architectures", "a list with one name")
    known = {name: family for family in FAMILIES for name in family.architectures}
    architecture = architectures[0]
    if architecture not in known:
        raise UnknownArchitecture(config_path, [str(a) for a in architectures], list(known))
    family = known[architecture]
    generation = _read_generation_config(path)
    dtype_key = "dtype" if config.values.get("dtype") is not None else "torch_dtype"
    common = CommonFields(
        {
            "name": model_name(path),
            "architecture": architecture,
            "family": family.name,
            "vocab_size": config.integer("vocab_size"),
            "hidden_size": config.integer("hidden_size"),
            "num_layers": config.integer("num_hidden_layers"),
            "max_context": config.integer("max_position_embeddings"),
            "bos_token_id": config.optional_integer("bos_token_id"),
            "eos_token_ids": _merged(
                config.integers("eos_token_id"), generation.integers("eos_token_id")
            ),
            "sampling": _sampling(generation),
            "dtype": config.choice(dtype_key, "float32", ("float32", "float16", "bfloat16")),
            "tie_word_embeddings": config.flag("tie_word_embeddings", False),
            "fp8": read_fp8(config),
        }
    )
    return family.parse(config, common)


def model_digest(path: Path) -> str:
    """Hex digest that two members must share to serve one model together.

    Covers ``config.json``, ``tokenizer.json``, and of each weight file its size, its header and
    64 evenly spaced samples of 4 KiB, so that a fine-tuned copy of the same shape differs; a few
    milliseconds even for checkpoints of many gigabytes. Raises as ``load_spec`` does.
    """
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        file = path / name
        if not file.is_file():
            raise MissingFile(file, "part of every checkpoint")
        _add(digest, name.encode(), file.read_bytes())
    for file in weight_files(path):
        header, _ = read_header(file)
        size_bytes = file.stat().st_size
        _add(digest, file.name.encode(), header)
        _add(digest, str(size_bytes).encode(), _samples(file, size_bytes))
    return digest.hexdigest()


def serving_digest(path: Path, weights: str, exact: bool, tp: int) -> str:
    """What every member of a mesh must have in common, and lanes and ``Hello`` compare: the
    checkpoint, the ``model.weights`` format and ``model.exact``, as ``DIGEST weights=auto
    exact=false``, so that a refusal that quotes both strings shows which of them differs. Where
    bits count, so does the ``router.tp`` that they follow from: ``... exact=true tp=2``.

    Raises as ``load_spec`` does.
    """
    digest = f"{model_digest(path)} weights={weights} exact={'true' if exact else 'false'}"
    return f"{digest} tp={tp}" if exact and tp > 1 else digest


def _samples(file: Path, size_bytes: int) -> bytes:
    stride = max(size_bytes // _SAMPLES_PER_FILE, _SAMPLE_BYTES)
    pieces = []
    with file.open("rb") as stream:
        for start in range(0, size_bytes, stride):
            stream.seek(start)
            pieces.append(stream.read(_SAMPLE_BYTES))
    return b"".join(pieces)


def _add(digest: hashlib._Hash, label: bytes, data: bytes) -> None:
    # Lengths go in first, so that no two different lists of pieces feed the same bytes.
    digest.update(f"{len(label)} {len(data)} ".encode())
    digest.update(label)
    digest.update(data)


def _read_generation_config(path: Path) -> JsonReader:
    file = path / "generation_config.json"
    return JsonReader(read_json_object(file, "sampling defaults") if file.is_file() else {}, file)


def _merged(*lists: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(item for items in lists for item in items))


def _sampling(generation: JsonReader) -> SamplingDefaults:
    return SamplingDefaults(
        do_sample=generation.optional_flag("do_sample"),
        temperature=generation.optional_number("temperature"),
        top_p=generation.optional_number("top_p"),
        top_k=generation.optional_integer("top_k"),
        min_p=generation.optional_number("min_p"),
        repetition_penalty=generation.optional_number("repetition_penalty"),
        max_new_tokens=generation.optional_integer("max_new_tokens", at_least=1),
    )
