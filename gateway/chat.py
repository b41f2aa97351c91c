"""Chat messages to a prompt, by the checkpoint's own Jinja template.

The template comes with the checkpoint and runs in Jinja's immutable sandbox, as Hugging Face
renders it: the same options, filters and globals.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from gateway.errors import InvalidType, InvalidValue, UnsupportedField
from gateway.text import TokenizerError
from moe_model.errors import CheckpointError
from moe_model.text_files import read_chat_template, template_environment

TEXT_PARTS = ("text", "input_text")
ROLES = ("system", "developer", "user", "assistant")


class _TemplateRefusedError(Exception):
    """The template called ``raise_exception``: the messages are not what it accepts."""


def _raise_exception(message: str) -> None:
    raise _TemplateRefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


class ChatTemplate:
    """A compiled chat template.

    ``config``: the parsed ``tokenizer_config.json``, whose ``*_token`` entries the template sees.
    """

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        """Compile ``source``; raises ``TokenizerError`` when it is no valid template."""
        environment = template_environment()
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
            raise InvalidValue(
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
            raise InvalidValue(
                f"The model's chat template fails on this conversation: {error}", param="messages"
            ) from error


def find_template(path: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The chat template of the checkpoint at ``path``, or None if it has none.

    ``config``: as ``Tokenizer.config``. Raises ``TokenizerError`` for one that cannot be used.
    """
    try:
        source = read_chat_template(path, config)
    except CheckpointError as error:
        raise TokenizerError(str(error)) from error
    return None if source is None else ChatTemplate(source, config)


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check OpenAI messages and reduce each to ``role``, string ``content`` and ``name``.

    Text parts are joined by a newline. ``developer`` becomes ``system``, which it replaced in
    the API and which templates know. Raises ``InvalidRequest`` naming the place.
    """
    if not messages:
        raise InvalidValue("messages must not be empty.", param="messages")
    plain = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role")
        if role not in ROLES:
            raise InvalidValue(
                f"{where}.role: expected one of {', '.join(ROLES)}, got {role!r}.",
                param=f"{where}.role",
            )
        extra = [
            key
            for key, value in message.items()
            if key not in {"role", "content", "name"} and value not in (None, [])
        ]
        if extra:
            raise UnsupportedField(
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
                raise InvalidType(f"{where}.name: expected a string.", param=f"{where}.name")
            reduced["name"] = name
        plain.append(reduced)
    return plain


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidType(f"{where}: expected a string or a list of text parts.", param=where)
    texts = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXT_PARTS:
            raise UnsupportedField(
                f"{place}.type: only text parts are supported, got {kind!r}.",
                param=f"{place}.type",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidType(f"{place}.text: expected a string.", param=f"{place}.text")
        texts.append(text)
    return "\n".join(texts)
