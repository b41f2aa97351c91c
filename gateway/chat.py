"""Chat messages to a prompt, by the checkpoint's own Jinja template.

The template comes with the checkpoint and runs in Jinja's immutable sandbox, as Hugging Face
renders it: the same options, filters and globals.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from gateway.errors import InvalidRequest
from gateway.text import TokenizerError

_TEXT_PARTS = ("text", "input_text")
_ROLES = ("system", "developer", "user", "assistant")


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 Jinja declares it an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateRefusedError(Exception):
    """The template called ``raise_exception``: the messages are not what it accepts."""


def _raise_exception(message: str) -> None:
    raise _TemplateRefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


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


class ChatTemplate:
    """A compiled chat template.

    ``config``: the parsed ``tokenizer_config.json``, whose ``*_token`` entries the template sees.
    """

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        """Compile ``source``; raises ``TokenizerError`` when it is no valid template."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"chat template, line {error.lineno}: {error.message}") from error
        self.source = source
        self._tokens = {
            key: value
            for key, value in config.items()
            if key.endswith("_token") and isinstance(value, str)
        }

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt for ``messages`` (from ``plain_messages``).

        ``variables``: what the client passes to the template besides. Raises ``InvalidRequest``
        when the template refuses the messages or fails on them.
        """
        names: dict[str, Any] = {"tools": None, "documents": None, **self._tokens, **variables}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(names)
        except _TemplateRefusedError as error:
            raise InvalidRequest(
                f"The model's chat template refuses this conversation: {error}", param="messages"
            ) from error
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise InvalidRequest(
                f"The model's chat template fails on this conversation: {error}", param="messages"
            ) from error


def find_template(path: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The chat template of the checkpoint at ``path``, or None if it has none.

    Looks where Hugging Face writes it: ``chat_template.jinja``, ``chat_template.json``,
    ``tokenizer_config.json`` (a template, or a list of named ones of which "default" is taken).
    Raises ``TokenizerError`` for one that cannot be used.
    """
    jinja_file = path / "chat_template.jinja"
    json_file = path / "chat_template.json"
    source: Any = config.get("chat_template")
    if jinja_file.is_file():
        try:
            source = jinja_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{jinja_file}: {error}") from error
    elif json_file.is_file():
        try:
            source = json.loads(json_file.read_text(encoding="utf-8"))["chat_template"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TokenizerError(f"{json_file}: no chat_template in it") from error
    if isinstance(source, list):
        try:
            named = {entry["name"]: entry["template"] for entry in source}
        except (KeyError, TypeError) as error:
            raise TokenizerError("chat_template: expected entries of name and template") from error
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise TokenizerError(f"chat_template: expected a string, found {type(source).__name__}")
    return ChatTemplate(source, config)


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check OpenAI messages and reduce each to ``role``, string ``content`` and ``name``.

    Text parts are joined by a newline. ``developer`` becomes ``system``, which it replaced in
    the API and which templates know. Raises ``InvalidRequest`` naming the place.
    """
    if not messages:
        raise InvalidRequest("messages must not be empty.", param="messages")
    plain = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role")
        if role not in _ROLES:
            raise InvalidRequest(
                f"{where}.role: expected one of {', '.join(_ROLES)}, got {role!r}.",
                param=f"{where}.role",
            )
        extra = [
            key
            for key, value in message.items()
            if key not in {"role", "content", "name"} and value not in (None, [])
        ]
        if extra:
            raise InvalidRequest(
                f"{where}.{extra[0]} is not supported by this server.",
                param=f"{where}.{extra[0]}",
            )
        reduced: dict[str, Any] = {
            "role": "system" if role == "developer" else role,
            "content": _text(message.get("content"), f"{where}.content"),
        }
        name = message.get("name")
        if name is not None:
            if not isinstance(name, str):
                raise InvalidRequest(f"{where}.name: expected a string.", param=f"{where}.name")
            reduced["name"] = name
        plain.append(reduced)
    return plain


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}: expected a string or a list of text parts.", param=where)
    texts = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise InvalidRequest(
                f"{place}.type: only text parts are supported, got {kind!r}.",
                param=f"{place}.type",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{place}.text: expected a string.", param=f"{place}.text")
        texts.append(text)
    return "\n".join(texts)
