import json

import pytest

from gateway.api.prompts import check_ids, split_prompts
from gateway.api.requests import ChatRequest, CompletionRequest, TokenizeRequest, parse
from gateway.errors import InvalidJson, InvalidType, InvalidValue, UnknownField, UnsupportedField


def completion(**fields):
    return parse(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest)


def chat(**fields):
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return parse(json.dumps(body).encode(), ChatRequest)


def test_null_means_not_given():
    request = chat(temperature=None, stop=None, tools=None, stream_options=None)
    assert request.temperature is None
    assert request.stop is None


def test_harmless_fields_are_ignored():
    chat(user="me", metadata={"a": "b"}, store=True, service_tier="auto")


@pytest.mark.parametrize(
    "neutral",
    [
        {"tools": []},
        {"response_format": {"type": "text"}},
        {"tool_choice": "none"},
        {"suffix": ""},
        {"modalities": ["text"]},
    ],
)
def test_unsupported_fields_with_their_neutral_value_are_accepted(neutral):
    chat(**neutral)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"audio": {}}, "audio"),
    ],
)
def test_unsupported_fields_are_named(fields, param):
    with pytest.raises(UnsupportedField, match=param) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_unknown_fields_are_named():
    with pytest.raises(UnknownField, match="temprature") as caught:
        completion(temprature=1)
    assert caught.value.param == "temprature"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": True}, "n"),
        ({"stream": 1}, "stream"),
        ({"stop": [1]}, "stop[0]"),
        ({"logit_bias": {"4": 1, "5": "x"}}, "logit_bias.5"),
        ({"logit_bias": {"4": 1, "5": 10**400}}, "logit_bias.5"),
        ({"temperature": 10**400}, "temperature"),
        ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"stream_options": {"more": 3}}, "stream_options.more"),
        ({"prompt": 3}, "prompt"),
    ],
)
def test_a_wrong_type_is_named(fields, param):
    with pytest.raises(InvalidType) as caught:
        completion(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


def test_a_missing_field_is_named():
    with pytest.raises(InvalidType, match="messages") as caught:
        parse(b"{}", ChatRequest)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b'{"prompt": "\xff"}', b"[" * 100_000])
def test_what_is_no_json_object_is_refused(body):
    with pytest.raises(InvalidJson):
        parse(body, TokenizeRequest)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
        (b'{"prompt": [%b]}' % (b"9" * 5000), "prompt"),
    ],
)
def test_a_number_that_no_type_holds_is_named(body, param):
    with pytest.raises(InvalidValue, match=f"{param}: .*out of range") as caught:
        parse(body, CompletionRequest)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "split"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts_take_four_forms(prompt, split):
    assert split_prompts(prompt) == split


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt"),
        ([[1], "a"], "prompt[1]"),
        ([True], "prompt"),
        ([1.5], "prompt"),
        ([None], "prompt"),
    ],
)
def test_other_prompts_are_named(prompt, param):
    with pytest.raises((InvalidType, InvalidValue)) as caught:
        split_prompts(prompt)
    assert caught.value.param == param


def test_ids_must_be_in_the_vocabulary():
    check_ids([0, 9], 10, "prompt")
    for wrong in ([10], [-1, 3], [2**70]):
        with pytest.raises(InvalidValue, match=str(wrong[0])):
            check_ids(wrong, 10, "prompt")
    with pytest.raises(InvalidValue, match=r"\(4000 characters\)"):
        check_ids([10**3999], 10, "prompt")
