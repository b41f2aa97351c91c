"""The real ``openai`` client against real processes serving the shipped model."""

from __future__ import annotations

import json

import openai
import pytest

from tests.support.meshes import Mesh

PROMPT = "In the beginning God created"


@pytest.fixture(scope="module")
def client(demo_mesh: Mesh) -> openai.OpenAI:
    return openai.OpenAI(base_url=demo_mesh.url + "/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_models_are_listed_and_retrieved(client: openai.OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_completion_streamed_equals_whole(client: openai.OpenAI, model: str) -> None:
    settings = {"model": model, "prompt": PROMPT, "max_tokens": 48, "temperature": 0.7, "seed": 11}
    whole = client.completions.create(**settings)
    stream = client.completions.create(
        **settings, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.choices[0].finish_reason in {"length", "stop"}


def test_chat_streamed_equals_whole(client: openai.OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Emma was not"}]}]
    settings = {
        "model": model, "messages": messages, "max_completion_tokens": 32, "temperature": 0.7,
        "seed": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content


def test_n_choices_differ_and_repeat_with_the_seed(client: openai.OpenAI, model: str) -> None:
    settings = {
        "model": model, "prompt": PROMPT, "n": 3, "max_tokens": 24, "temperature": 1.0, "seed": 5,
    }  # fmt: skip
    first = [c.text for c in client.completions.create(**settings).choices]
    again = [c.text for c in client.completions.create(**settings).choices]
    assert first == again
    assert len(set(first)) == 3


def test_a_list_of_prompts_gives_a_choice_each(client: openai.OpenAI, model: str) -> None:
    one = client.completions.create(
        model=model, prompt=[PROMPT, PROMPT], max_tokens=8, temperature=0
    )
    assert one.choices[0].text == one.choices[1].text
    assert [c.index for c in one.choices] == [0, 1]


def test_token_id_prompts_equal_text_prompts(
    client: openai.OpenAI, model: str, demo_mesh: Mesh
) -> None:
    _, tokens = demo_mesh.post("/tokenize", {"prompt": PROMPT})
    by_ids = client.completions.create(
        model=model, prompt=[tokens["tokens"]], max_tokens=16, temperature=0
    )
    by_text = client.completions.create(model=model, prompt=PROMPT, max_tokens=16, temperature=0)
    assert by_ids.choices[0].text == by_text.choices[0].text
    _, text = demo_mesh.post("/detokenize", {"tokens": tokens["tokens"]})
    assert PROMPT in text["prompt"]


def test_stop_string_across_token_borders_is_cut(client: openai.OpenAI, model: str) -> None:
    free = client.completions.create(model=model, prompt=PROMPT, max_tokens=40, temperature=0)
    text = free.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 5]
    cut = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop]
    )
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == text[: text.index(stop)]


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=1, temperature=0, echo=True, logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith(PROMPT)
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    for token, value, top in zip(
        logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True
    ):
        assert top[token] == value


def test_chat_logprobs_carry_the_alternatives(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Emma"}], max_tokens=4, temperature=0,
        logprobs=True, top_logprobs=3,
    )  # fmt: skip
    for item in answer.choices[0].logprobs.content:
        assert len(item.top_logprobs) == 3
        assert item.logprob == item.top_logprobs[0].logprob


@pytest.mark.parametrize(("path", "body", "status"), [
    ("/v1/completions", b"{not json", 400),
    ("/v1/completions", {"model": "other", "prompt": "a"}, 404),
    ("/v1/completions", {"model": "MODEL", "prompt": "a", "temperature": -1}, 400),
    ("/v1/completions", {"model": "MODEL", "prompt": "a", "max_tokens": "many"}, 400),
    ("/v1/completions", {"model": "MODEL", "prompt": [1] * 5000}, 400),
    ("/v1/completions", {"model": "MODEL", "prompt": [999999]}, 400),
    ("/v1/completions", {"model": "MODEL", "prompt": "a", "nonsense": 1}, 400),
    ("/v1/chat/completions", {"model": "MODEL", "messages": []}, 400),
    ("/v1/chat/completions", {"model": "MODEL"}, 400),
])  # fmt: skip
def test_bad_requests_get_openai_error_objects(
    demo_mesh: Mesh, model: str, path: str, body: object, status: int
) -> None:
    if isinstance(body, dict):
        body = json.loads(json.dumps(body).replace("MODEL", model))
    got, answer = demo_mesh.post(path, body)
    assert got == status, answer
    assert set(answer["error"]) >= {"message", "type", "param", "code"}
    assert answer["error"]["message"]


def test_plain_endpoints(demo_mesh: Mesh) -> None:
    assert demo_mesh.get("/health")[0] == 200
    assert demo_mesh.get("/ready")[0] == 200
    assert demo_mesh.get("/version")[0] == 200
    status, metrics = demo_mesh.get("/metrics")
    assert status == 200
    assert "moemesh_" in metrics
