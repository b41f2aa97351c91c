"""The documented settings file, made from ``mesh.settings``: every knob, its text and its default.

``compose/moemesh.toml`` is a copy of it that ships; a test holds them together.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from typing import Literal, get_args, get_origin

from mesh import settings
from mesh.config import knobs
from mesh.settings import Settings

_WIDTH = 100
_HEAD = """\
One mesh, described in one file: every knob, with its default.

  moemesh up --config moemesh.toml          the whole mesh on this host
  python -m router_svc --config moemesh.toml --id router-0     one service of it

Defaults < this file < environment (MOEMESH_SECTION_KEY) < flags (--set section.key=value). An
unknown key is an error. `moemesh config` prints what is in effect and where it came from;
`moemesh config --reference` prints this file.
"""


def reference() -> str:
    """The whole file."""
    texts = knob_texts()
    lines = [_comment(line) for line in _HEAD.splitlines()]
    section = ""
    for knob in knobs():
        head, name = knob.key.split(".")
        if head != section:
            section = head
            lines += ["", f"[{head}]"]
        text = texts[knob.key]
        lines += [_comment(line) for line in textwrap.wrap(text, _WIDTH - 2)]
        if get_origin(knob.type) is Literal:
            lines.append(
                _comment("One of " + ", ".join(toml(value) for value in get_args(knob.type)))
            )
        lines.append(f"{name} = {toml(getattr(getattr(Settings(), head), name))}")
    return "\n".join(lines) + "\n"


def knob_texts() -> dict[str, str]:
    """``section.key`` -> what its docstring says, as one paragraph of plain text; empty for a knob
    that shares the text of the one before it.
    """
    tree = ast.parse(inspect.getsource(settings))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    sections = {
        field.target.id: classes[field.annotation.id]
        for field in classes["Settings"].body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(field.annotation, ast.Name)
    }
    texts: dict[str, str] = {}
    for section, body in sections.items():
        pending: list[str] = []
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                key = f"{section}.{node.target.id}"
                texts[key] = ""
                pending.append(key)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and pending:
                # Knobs in a row share the text after the last; a file has it before the first.
                texts[pending[0]] = re.sub(r"\s+", " ", str(node.value.value).replace("``", "`"))
                pending = []
    return texts


def toml(value: object) -> str:
    """A value as TOML writes it: JSON's strings, booleans and finite numbers are TOML's too."""
    return json.dumps(value, ensure_ascii=False)


def _comment(line: str) -> str:
    return f"# {line}".rstrip()
