"""The text side of a checkpoint: tokenizer, its configuration and the chat template. Torch-free.

Files are found and read as Hugging Face writes them. Nothing of a template runs here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from moe_model.config_json import read_json_object
from moe_model.errors import CorruptFile, MissingFile


def check_text_files(path: Path) -> None:
    """Raises ``MissingFile`` or ``CorruptFile`` for what keeps a gateway from serving ``path``."""
    read_tokenizer(path)
    source = read_chat_template(path, read_tokenizer_config(path))
    if source is None:
        return
    try:
        template_environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CorruptFile(path, f"chat template, line {error.lineno}: {error.message}") from None


def read_tokenizer(path: Path) -> Tokenizer:
    """``tokenizer.json``. Raises ``MissingFile`` and ``CorruptFile``."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise MissingFile(file, "a fast tokenizer file is needed")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 (the library raises no narrower type)
        raise CorruptFile(file, f"not a tokenizer: {error}") from None


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """``tokenizer_config.json``, special tokens reduced to strings; empty when there is none.

    Raises ``CorruptFile``.
    """
    file = path / "tokenizer_config.json"
    if not file.exists():
        return {}
    config = read_json_object(file, "it names the special tokens")
    for key, value in config.items():
        # Special tokens are strings or the dump of an AddedToken.
        if key.endswith("_token") and isinstance(value, Mapping):
            config[key] = value.get("content")
    return config


def read_chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The source of the chat template, or None if the checkpoint has none.

    Looks where Hugging Face writes it: ``chat_template.jinja``, ``chat_template.json``,
    ``tokenizer_config.json`` (a template, or a list of named ones of which "default" is taken),
    parsed in ``config``. Raises ``CorruptFile``.
    """
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CorruptFile(file, f"cannot be read: {error}") from None
    file = path / "chat_template.json"
    if file.is_file():
        source = read_json_object(file, "it holds the chat template").get("chat_template")
        if source is None:
            raise CorruptFile(file, "no chat_template in it")
    else:
        file = path / "tokenizer_config.json"
        source = config.get("chat_template")
    if isinstance(source, list):
        try:
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        except (TypeError, KeyError):
            raise CorruptFile(file, "chat_template: expected names and templates") from None
    if source is not None and not isinstance(source, str):
        found = type(source).__name__
        raise CorruptFile(file, f"chat_template: expected a string, found {found}")
    return source


def template_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Jinja as Hugging Face sets it up for chat templates, but for the functions of the caller's
    own: the same options, tags and ``tojson``, in the sandbox in which no value can be changed.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 Jinja declares it an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
