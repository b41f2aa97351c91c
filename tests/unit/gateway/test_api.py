"""Every endpoint through real HTTP, mostly by OpenAI's own client."""

import json
import re
import socket
import threading
import urllib.error
import urllib.request

import openai
import pytest

from mesh.messages import Rejected
from tests.unit.gateway.scripted_mesh import DEADLINE_S, MODEL, STORY, Script, wait_until

MESSAGES = [{"role": "user", "content": "Tell me a story."}]
CHAT = {"model": "tales", "messages": MESSAGES, "max_tokens": 200}
COMPLETION = {"model": "tales", "prompt": "Once", "max_tokens": 200}


@pytest.fixture
def client(mesh):
    with mesh.client() as client:
        yield client


def post(mesh, path, body, headers=None):
    """(status, headers, JSON) of a raw request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(mesh.url + path, data, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return response.status, response.headers, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read())


def get(mesh, path):
    with urllib.request.urlopen(mesh.url + path, timeout=DEADLINE_S) as response:
        return response.headers, response.read()


def submits(mesh):
    return mesh.routers["router-0"].submits


# ---------------------------------------------------------------- chat


def test_a_chat_answers(mesh, client):
    answer = client.chat.completions.create(**CHAT)
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", answer.id)
    assert answer.model == "tales"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == STORY
    assert choice.finish_reason == "stop"
    prompt = mesh.tokenizer.encode("<|bos|>Tell me a story.", add_special_tokens=False)
    assert submits(mesh)[0].prompt == tuple(prompt)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(mesh.story) + 1
    assert answer.usage.total_tokens == len(prompt) + len(mesh.story) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(client):
    chunks = list(client.chat.completions.create(**CHAT, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == STORY
    assert [chunk.choices[0].finish_reason for chunk in chunks][:-1] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert not any("\ufffd" in (chunk.choices[0].delta.content or "") for chunk in chunks)


def test_usage_comes_in_a_last_chunk_without_choices(mesh, client):
    chunks = list(
        client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(mesh.story) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_usage_comes_with_every_chunk_on_request(mesh, client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(mesh.story) + 1


def test_content_parts_as_guidellm_sends_them(mesh, client):
    answer = client.chat.completions.create(
        model="tales",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Tell me a story."}]}],
        max_completion_tokens=5,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5
    assert submits(mesh)[0].sampling.ignore_eos


def test_several_choices_stream_beside_each_other(mesh, client):
    chunks = list(client.chat.completions.create(**CHAT, n=3, seed=11, stream=True))
    texts = {0: "", 1: "", 2: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == dict.fromkeys(range(3), STORY)
    assert sorted(submit.sampling.seed for submit in submits(mesh)) == [11, 12, 13]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(mesh, client, stream):
    options = {**CHAT, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**options, stream=stream)
    if stream:
        parts = [chunk.choices[0].logprobs for chunk in answer]
        tokens = [token for part in parts if part for token in part.content or []]
    else:
        tokens = answer.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == mesh.tokenizer.decode(
        mesh.story[:6]
    )
    assert all(len(token.top_logprobs) == 2 for token in tokens)
    assert tokens[0].logprob == -0.25 - mesh.story[0] / 1000


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_ends_the_text_and_the_sequence(mesh, client, stream):
    mesh.answer = lambda _: Script(mesh.story, hold_after=len(mesh.story) - 1)
    answer = client.chat.completions.create(**CHAT, stop=["é, 10 €"], stream=stream)
    if stream:
        chunks = list(answer)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert text == STORY[: STORY.index("é, 10 €")]
    assert finish == "stop"
    wait_until(mesh.idle, "the router is told to stop")


def test_defaults_come_from_the_checkpoint(mesh, client):
    client.chat.completions.create(model="tales", messages=MESSAGES)
    sampling = submits(mesh)[0].sampling
    given = json.loads((MODEL / "generation_config.json").read_text())
    assert sampling.temperature == given["temperature"]
    assert sampling.top_p == given["top_p"]
    assert sampling.max_tokens == given["max_new_tokens"]


def test_absent_seeds_differ(mesh, client):
    for _ in range(2):
        client.chat.completions.create(**CHAT)
    seeds = {submit.sampling.seed for submit in submits(mesh)}
    assert len(seeds) == 2


def test_equal_prompts_have_seeds_of_their_own(mesh, client):
    client.completions.create(model="tales", prompt=[[5], [5]], n=2)
    assert len({submit.sampling.seed for submit in submits(mesh)}) == 4
    mesh.reset()
    client.completions.create(model="tales", prompt=[[5], [5]], seed=7)
    assert [submit.sampling.seed for submit in submits(mesh)] == [7, 7]


# ---------------------------------------------------------------- completions


def test_a_completion_answers(mesh, client):
    answer = client.completions.create(**COMPLETION)
    assert answer.choices[0].text == STORY
    assert answer.choices[0].finish_reason == "stop"
    assert submits(mesh)[0].prompt == tuple(mesh.tokenizer.encode("Once", add_special_tokens=True))


def test_a_streamed_completion(client):
    chunks = list(client.completions.create(**COMPLETION, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == STORY
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
    ],
)
def test_token_ids_are_taken_as_they_are(mesh, client, prompt, prompts):
    answer = client.completions.create(model="tales", prompt=prompt)
    assert [submit.prompt for submit in submits(mesh)] == prompts
    assert len(answer.choices) == len(prompts)
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == 16 * len(prompts)


def test_choices_are_numbered_prompt_by_prompt(mesh, client):
    mesh.answer = lambda submit: Script(
        mesh.story[:1] if submit.prompt == (5,) else mesh.story[1:2], stop_token=1
    )
    answer = client.completions.create(model="tales", prompt=[[5], [6]], n=2)
    first, second = (mesh.tokenizer.decode([token]) for token in mesh.story[:2])
    assert [choice.text for choice in answer.choices] == [first, first, second, second]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_legacy_logprobs(mesh, client):
    logprobs = (
        client.completions.create(**COMPLETION | {"max_tokens": 4}, logprobs=1).choices[0].logprobs
    )
    assert "".join(logprobs.tokens) == mesh.tokenizer.decode(mesh.story[:4])
    assert logprobs.text_offset[0] == 0
    for token, value, top, id_ in zip(
        logprobs.tokens,
        logprobs.token_logprobs,
        logprobs.top_logprobs,
        mesh.story,
        strict=False,
    ):
        assert top[token] == value == -0.25 - id_ / 1000
        assert (value == max(top.values())) == (id_ % 2 == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_log_likelihoods_as_lm_eval_asks_for_them(mesh, client, max_tokens, stream):
    ids = mesh.tokenizer.encode("A story is a lie.", add_special_tokens=True)
    answer = client.completions.create(
        model="tales",
        prompt=[ids],
        temperature=0,
        max_tokens=max_tokens,
        logprobs=1,
        echo=True,
        seed=1234,
        stream=stream,
    )
    if stream:
        found = [chunk.choices[0] for chunk in answer]
        text = "".join(choice.text for choice in found)
        values = [v for choice in found for v in choice.logprobs.token_logprobs]
        tops = [v for choice in found for v in choice.logprobs.top_logprobs]
    else:
        (choice,) = answer.choices
        text = choice.text
        values, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        assert choice.finish_reason == "length"
        assert answer.usage.completion_tokens == max_tokens
    assert text == "<|bos|>A story is a lie." + mesh.tokenizer.decode(mesh.story[:max_tokens])
    assert len(values) == len(tops) == len(ids) + max_tokens
    assert values[0] is None
    assert tops[0] is None
    assert [
        value == max(top.values()) for value, top in zip(values[1:], tops[1:], strict=True)
    ] == [id_ % 2 == 0 for id_ in [*ids[1:], *mesh.story[:max_tokens]]]


def test_a_prompt_that_fills_the_context_is_scored(mesh, client):
    ids = [5] * 1024
    answer = client.completions.create(
        model="tales", prompt=ids, max_tokens=0, echo=True, logprobs=0
    )
    assert submits(mesh)[0].sampling.max_tokens == 0
    assert len(answer.choices[0].logprobs.tokens) == 1024
    assert answer.choices[0].finish_reason == "length"


def test_echo_of_a_prompt_that_fills_the_context(mesh):
    body = {"prompt": [5] * 1024, "echo": True, "max_tokens": 0, "logprobs": 0}
    status, _, answer = post(mesh, "/v1/completions", body)
    assert status == 200
    assert answer["choices"][0]["text"] == mesh.tokenizer.decode([5] * 1024)
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 1024, "completion_tokens": 0}


def test_echo_of_a_text_has_no_special_tokens(mesh, client):
    answer = client.completions.create(**COMPLETION | {"echo": True, "max_tokens": 3})
    assert answer.choices[0].text == "Once" + mesh.tokenizer.decode(mesh.story[:3])


def test_best_of_keeps_the_likeliest(mesh, client):
    def answer(submit):
        # The higher the id, the less likely (see ``logprob``).
        return Script([100 - submit.sampling.seed], stop_token=1)

    mesh.answer = answer
    found = client.completions.create(
        model="tales", prompt="Once", n=2, best_of=4, seed=10, max_tokens=5
    )
    expected = [mesh.tokenizer.decode([100 - seed]) for seed in (13, 12)]
    assert [choice.text for choice in found.choices] == expected
    assert found.choices[0].logprobs is None
    assert found.usage.completion_tokens == 8


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/chat/completions", b"{", 400, "invalid_json", None),
        ("/v1/completions", {"prompt": "x", "model": "nope"}, 404, "model_not_found", "model"),
        ("/v1/completions", {"model": "tales"}, 400, "invalid_type", "prompt"),
        (
            "/v1/chat/completions",
            CHAT | {"temperature": -1},
            400,
            "invalid_value",
            "temperature",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"tools": [{}]},
            400,
            "unsupported_parameter",
            "tools",
        ),
        ("/v1/chat/completions", CHAT | {"colour": 1}, 400, "unknown_parameter", "colour"),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
        ("/v1/completions", {"prompt": [9999]}, 400, "invalid_value", "prompt"),
        ("/v1/completions", {"prompt": "x", "logprobs": 21}, 400, "invalid_value", "logprobs"),
        (
            "/v1/completions",
            {"prompt": "x", "n": 2, "best_of": 1},
            400,
            "invalid_value",
            "best_of",
        ),
        (
            "/v1/completions",
            {"prompt": [5] * 1024},
            400,
            "context_length_exceeded",
            "prompt",
        ),
        (
            "/v1/completions",
            {"prompt": [5] * 1000, "max_tokens": 25},
            400,
            "context_length_exceeded",
            "max_tokens",
        ),
        ("/v1/completions", {"prompt": "x", "n": 17}, 400, "invalid_value", None),
        ("/v1/completions", {"prompt": "x", "logprobs": 10**400}, 400, "invalid_value", "logprobs"),
        ("/v1/completions", {"prompt": "x", "best_of": 10**400}, 400, "invalid_value", "best_of"),
        ("/v1/completions", {"prompt": [10**400]}, 400, "invalid_value", "prompt"),
        (
            "/v1/completions",
            {"prompt": "x", "stop_token_ids": [10**400]},
            400,
            "invalid_value",
            "stop_token_ids",
        ),
        ("/v1/chat/completions", CHAT | {"seed": 10**400}, 400, "invalid_value", "seed"),
        (
            "/v1/chat/completions",
            CHAT | {"max_tokens": 10**400},
            400,
            "invalid_value",
            "max_tokens",
        ),
        ("/v1/chat/completions", {"messages": []}, 400, "invalid_value", "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "oracle", "content": "x"}]},
            400,
            "invalid_value",
            "messages[0].role",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": 1}]},
            400,
            "invalid_type",
            "messages[0].content",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "unsupported_parameter",
            "messages[0].content[0].type",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            400,
            "invalid_type",
            "messages[0].content[0].text",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x", "name": 1}]},
            400,
            "invalid_type",
            "messages[0].name",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]},
            400,
            "unsupported_parameter",
            "messages[0].tool_calls",
        ),
        ("/tokenize", {}, 400, "invalid_value", "prompt"),
        ("/v1/nothing", {}, 404, "not_found", None),
        ("/health", {}, 405, "method_not_allowed", None),
    ],
)
def test_errors_are_openais_objects(mesh, path, body, status, code, param):
    found, headers, answer = post(mesh, path, body)
    assert found == status
    assert headers["content-type"] == "application/json"
    error = answer["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert submits(mesh) == []


def test_the_client_library_raises_its_own_errors(client):
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.chat.completions.create(**CHAT | {"model": "nope"})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**CHAT, temperature=-1, stream=True)


def test_a_body_too_large_is_refused(mesh):
    status, _, answer = post(mesh, "/v1/completions", b" " * 5_000_000)
    assert status == 413
    assert answer["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a" * 100_000}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 100_000}]},
            "messages",
        ),
    ],
)
def test_a_text_that_cannot_fit_is_refused_by_its_length(mesh, path, body, param):
    status, _, answer = post(mesh, path, body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] == param
    assert re.search(r"1024 tokens; the prompt's \d+ characters", answer["error"]["message"])


def test_a_compressed_body_is_refused(mesh):
    encoded = {"Content-Encoding": "gzip"}
    status, _, answer = post(mesh, "/v1/completions", COMPLETION, encoded)
    assert (status, answer["error"]["code"]) == (415, "unsupported_encoding")
    assert post(mesh, "/v1/completions", COMPLETION, {"Content-Encoding": "identity"})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_router_makes_429(mesh, client, stream):
    mesh.answer = lambda _: Rejected(request="", reason="queue full", retry_after_s=7)
    with pytest.raises(openai.RateLimitError, match="queue full") as caught:
        client.chat.completions.create(**CHAT, stream=stream)
    assert caught.value.response.headers["retry-after"] == "7"


def test_a_full_gateway_makes_429(mesh, client):
    mesh.answer = lambda _: Script(mesh.story, hold_after=1)
    streams = [client.chat.completions.create(**CHAT, n=8, stream=True) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="16 of 16") as caught:
        client.chat.completions.create(**CHAT)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    for stream in streams:
        stream.close()
    wait_until(mesh.idle, "the closed streams are cancelled")
    mesh.answer = mesh.tell_story
    wait_until(
        lambda: post(mesh, "/v1/chat/completions", CHAT | {"n": 16})[0] == 200,
        "the room is given back",
    )


def test_an_error_before_the_first_token_has_its_own_status(mesh, client):
    mesh.answer = lambda _: Script([], error="expert 3 is gone")
    with pytest.raises(openai.InternalServerError, match="expert 3 is gone"):
        client.chat.completions.create(**CHAT, stream=True)


@pytest.mark.parametrize("stream", [False, True])
def test_missing_workers_make_503(mesh, client, stream):
    mesh.answer = lambda _: Script([], error="expert 3 is gone", error_kind="unavailable")
    with pytest.raises(openai.InternalServerError, match="expert 3 is gone") as caught:
        client.chat.completions.create(**CHAT, stream=stream)
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_an_error_in_a_stream_is_an_event_and_no_done_follows(mesh, client):
    mesh.answer = lambda _: Script(mesh.story[:3], error="expert 3 is gone")
    with client.chat.completions.with_streaming_response.create(**CHAT, stream=True) as response:
        events = [line for line in response.iter_lines() if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "expert 3 is gone"
    with pytest.raises(openai.APIError, match="expert 3 is gone"):
        list(client.chat.completions.create(**CHAT, stream=True))


# ---------------------------------------------------------------- leaving clients


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled_at_once(mesh, stream):
    mesh.answer = lambda _: Script(mesh.story, hold_after=2)
    body = json.dumps(CHAT | {"n": 2, "stream": stream}).encode()
    host, port = mesh.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as link:
        link.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: leaver\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        wait_until(lambda: len(submits(mesh)) == 2, "both sequences are submitted")
    wait_until(mesh.idle, "both are cancelled")
    assert sorted(mesh.routers["router-0"].cancelled) == sorted(
        submit.request for submit in submits(mesh)
    )
    assert {submit.trace for submit in submits(mesh)} == {"leaver"}


def test_many_clients_at_once_each_get_their_own(mesh, client):
    mesh.answer = lambda submit: Script([submit.prompt[0]] * 50)
    texts = {}

    def ask(id_):
        stream = client.completions.create(model="tales", prompt=[id_], max_tokens=50, stream=True)
        texts[id_] = "".join(chunk.choices[0].text for chunk in stream)

    threads = [threading.Thread(target=ask, args=(id_,)) for id_ in range(40, 56)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert texts == {id_: mesh.tokenizer.decode([id_] * 50) for id_ in range(40, 56)}


# ---------------------------------------------------------------- the other endpoints


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "tales"
    assert client.models.retrieve("tales").max_model_len == 1024
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_tokenize_and_back(mesh):
    _, _, answer = post(mesh, "/tokenize", {"prompt": "café 10 €", "add_special_tokens": False})
    assert answer["tokens"] == mesh.tokenizer.encode("café 10 €", add_special_tokens=False)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 1024
    _, _, back = post(mesh, "/detokenize", {"tokens": answer["tokens"]})
    assert back == {"prompt": "café 10 €"}


def test_tokenize_adds_special_tokens_to_prompts_and_leaves_chats_to_their_template(mesh):
    _, _, prompt = post(mesh, "/tokenize", {"prompt": "Hi", "return_token_strs": True})
    assert prompt["token_strs"][0] == "<|bos|>"
    _, _, chat = post(mesh, "/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})
    assert chat["tokens"] == prompt["tokens"]  # the template writes the token itself, once


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [2**40]}),
        ("/detokenize", {"tokens": "x"}),
    ],
)
def test_tokenizer_endpoints_refuse_nonsense(mesh, path, body):
    assert post(mesh, path, body)[0] == 400


def test_detokenize_names_the_id_that_is_in_no_vocabulary(mesh):
    status, _, answer = post(mesh, "/detokenize", {"tokens": [5, 9999]})
    assert status == 400
    error = answer["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "tokens")
    assert error["message"].startswith("tokens: token id 9999 is not in the vocabulary (0 to ")


def test_a_long_text_is_tokenized_too(mesh):
    text = "word " * 20_000
    _, _, answer = post(mesh, "/tokenize", {"prompt": text, "add_special_tokens": False})
    assert answer["tokens"] == mesh.tokenizer.encode(text, add_special_tokens=False)


def test_tokenizer_info_has_what_lm_eval_reads(mesh):
    info = json.loads(get(mesh, "/tokenizer_info")[1])
    assert info["eos_token"] == "<|eos|>"
    assert "messages" in info["chat_template"]


def test_health_version_ready(mesh):
    assert json.loads(get(mesh, "/health")[1]) == {"status": "ok"}
    assert re.match(r"\d+\.\d+", json.loads(get(mesh, "/version")[1])["version"])
    assert json.loads(get(mesh, "/ready")[1]) == {"status": "ready"}


def test_metrics_count_requests_and_tokens(mesh, client):
    def value(name):
        page = get(mesh, "/metrics")[1].decode()
        return float(re.search(rf"^moemesh_{name} (\S+)$", page, re.MULTILINE)[1])

    before = value("generation_tokens_total")
    count = value("time_to_first_token_seconds_count")
    client.chat.completions.create(**CHAT)
    assert value("generation_tokens_total") - before == len(mesh.story) + 1
    assert value("time_to_first_token_seconds_count") - count == 1
    assert value("num_requests_running") == 0
    wait_until(lambda: value("num_requests_admitted") == 0, "all room is given back")


def test_a_request_id_is_kept_and_logged(mesh):
    _, headers, _ = post(mesh, "/v1/completions", COMPLETION, {"X-Request-Id": "abc-123"})
    assert headers["x-request-id"] == "abc-123"
    assert submits(mesh)[0].trace == "abc-123"

    def lines():
        return [line for line in mesh.logs() if line.get("trace") == "abc-123"]

    wait_until(lines, "the answer is logged")
    (line,) = lines()
    assert line["event"] == "request.answered"
    assert line["completion_tokens"] == len(mesh.story) + 1


def test_a_request_id_is_made_when_absent_or_unfit(mesh):
    for given in ({}, {"X-Request-Id": "x" * 200}, {"X-Request-Id": "two words"}):
        _, headers, _ = post(mesh, "/v1/completions", COMPLETION, given)
        assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])


def test_prompts_and_answers_are_not_logged(mesh, client):
    client.chat.completions.create(
        model="tales", messages=[{"role": "user", "content": "xyzzy secret"}]
    )
    assert "xyzzy" not in mesh.log_path.read_text()
    assert "lighthouse" not in mesh.log_path.read_text()
