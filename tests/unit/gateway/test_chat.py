import json
import re

import pytest

from gateway.chat import ChatTemplate, find_template, plain_messages
from gateway.errors import InvalidRequest
from gateway.text import TokenizerError

CHATML = """{{ bos_token }}{% for m in messages %}
<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def user(content):
    return {"role": "user", "content": content}


def render(source, messages, **variables):
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(messages, add_generation_prompt=True, variables=variables)


def test_template_sees_messages_and_special_tokens():
    assert render(CHATML, [user(" hi ")]) == "<s><|user|>hi<|assistant|>"


@pytest.mark.parametrize("failing", ["{{ 1 / n }}", "{{ n ** -1 }}", "{{ (2 ** 5000) / 1.5 }}"])
def test_arithmetic_that_fails_is_the_requests_fault(failing):
    with pytest.raises(InvalidRequest, match="fails on this conversation"):
        render(failing, [user("hi")], n=0)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert plain_messages([user(parts)]) == [user("one\ntwo")]


def test_developer_speaks_as_system():
    assert plain_messages([{"role": "developer", "content": "x"}])[0]["role"] == "system"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([user("x"), {"role": "user"}], "messages[1].content"),
        ([user([{"type": "image_url", "image_url": {}}])], "messages[0].content[0].type"),
        ([user([{"type": "text"}])], "messages[0].content[0].text"),
        ([user(["x"])], "messages[0].content[0].type"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}],
            "messages[0].tool_calls",
        ),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
    ],
)
def test_a_wrong_message_is_named(messages, param):
    with pytest.raises(InvalidRequest) as caught:
        plain_messages(messages)
    assert caught.value.param == param


def test_what_the_template_refuses_is_the_clients_error():
    with pytest.raises(InvalidRequest, match="must alternate"):
        render("{{ raise_exception('roles must alternate') }}", [user("x")])


def test_the_template_cannot_leave_its_sandbox():
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidRequest, match="unsafe"):
        render(source, [user("x")])
    with pytest.raises(InvalidRequest):
        render("{{ messages.append(1) }}", [user("x")])


def test_hugging_faces_helpers_are_there():
    source = (
        "{% generation %}{{ {'a': 'é'} | tojson }}{% endgeneration %}"
        "{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}{{ strftime_now('%Y') }}{{ flag }}"
    )
    text = render(source, [user("x")], flag="!")
    assert re.fullmatch(r'\{"a": "é"\}1\d{4}!', text)


def test_a_broken_template_names_its_line():
    with pytest.raises(TokenizerError, match="line 2"):
        ChatTemplate("ok\n{% if %}", {})


def test_templates_are_found_where_checkpoints_keep_them(tmp_path):
    assert find_template(tmp_path, {}) is None
    assert find_template(tmp_path, {"chat_template": "a"}).source == "a"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert find_template(tmp_path, {"chat_template": named}).source == "d"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert find_template(tmp_path, {"chat_template": "a"}).source == "j"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find_template(tmp_path, {"chat_template": "a"}).source == "file"


@pytest.mark.parametrize("listed", [["x"], [{"name": "default"}], [{"name": [], "template": ""}]])
def test_a_broken_list_of_templates_is_refused(tmp_path, listed):
    with pytest.raises(TokenizerError, match="chat_template"):
        find_template(tmp_path, {"chat_template": listed})


def test_a_template_that_is_no_text_is_named(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja"):
        find_template(tmp_path, {})
