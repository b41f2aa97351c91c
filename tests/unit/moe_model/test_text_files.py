from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_model.errors import CorruptFile, MissingFile
from moe_model.text_files import (
    check_text_files,
    read_chat_template,
    read_tokenizer_config,
    template_environment,
)

from .conftest import DEMO


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    return tmp_path


def test_what_ships_is_accepted_and_what_may_lack_too(model: Path) -> None:
    check_text_files(DEMO)
    (model / "tokenizer_config.json").unlink()
    check_text_files(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(MissingFile, match=r"tokenizer\.json"):
        check_text_files(model)


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 3}', "expected a string, found int"),
        ("tokenizer_config.json", '{"chat_template": [3]}', "names and templates"),
        ("tokenizer_config.json", '{"chat_template": "{{ x"}', "chat template, line 1"),
        ("chat_template.json", "{}", "no chat_template in it"),
        ("chat_template.jinja", "a\n{% nonsense %}", "chat template, line 2"),
        ("chat_template.jinja", "{{ x | no_such_filter }}", "no_such_filter"),
    ],
)
def test_a_broken_file_is_named(model: Path, file: str, text: str, reason: str) -> None:
    (model / file).write_text(text)
    with pytest.raises(CorruptFile, match=reason):
        check_text_files(model)


def test_the_template_is_found_where_hugging_face_writes_it(model: Path) -> None:
    def found(config: object) -> str | None:
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        return read_chat_template(model, read_tokenizer_config(model))

    assert found({}) is None
    assert found({"chat_template": "one"}) == "one"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert found({"chat_template": named}) == "d"
    (model / "chat_template.json").write_text('{"chat_template": "json"}')
    assert found({"chat_template": "one"}) == "json"
    (model / "chat_template.jinja").write_text("jinja")
    assert found({"chat_template": "one"}) == "jinja"


def test_special_tokens_are_strings(model: Path) -> None:
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_tokenizer_config(model) == {"bos_token": "<s>", "eos_token": "</s>"}


def test_tags_and_filters_that_published_templates_use() -> None:
    source = (
        "{% generation %}{{ x | tojson }}{% endgeneration %}{% for i in x %}{% break %}{% endfor %}"
    )
    assert template_environment().from_string(source).render(x={"a": "ü"}) == '{"a": "ü"}'


def test_checking_needs_no_torch() -> None:
    code = "import sys, moe_model.inventory, moe_model.text_files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
