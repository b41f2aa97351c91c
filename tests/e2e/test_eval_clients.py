"""What lm-eval and guidellm send, sent again, and what they read from the answers.

``recorded/`` holds requests as lm-eval 0.4.13 (``local-completions`` with its three ways to
tokenize: multiple choice, generation and perplexity) and guidellm 0.8.1 (chat and completions,
streamed and not) sent them to a mesh with the shipped model.
"""

from __future__ import annotations

import json
import math
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.support.meshes import Mesh
from tests.support.oracle import Oracle

RECORDED = Path(__file__).parent / "recorded"
DEMO = Path(__file__).parents[2] / "demo" / "model"
TOLERANCE = 1e-4


def recorded(client: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDED / f"{client}.jsonl").read_text().splitlines()]


def of_path(client: str, path: str) -> list[Any]:
    return [
        pytest.param(request, id=f"{index}")
        for index, request in enumerate(recorded(client))
        if request["path"] == path
    ]


def send(mesh: Mesh, request: dict[str, Any]) -> bytes:
    body = None if request["body"] is None else json.dumps(request["body"]).encode()
    call = urllib.request.Request(
        mesh.url + request["path"], body, request["headers"], method=request["method"]
    )
    with urllib.request.urlopen(call, timeout=120) as answer:
        assert answer.status == 200
        return bytes(answer.read())


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(DEMO)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def prompts_of(body: dict[str, Any]) -> list[list[int]]:
    """The batch as token ids; texts are tokenized as the checkpoint says."""
    prompts = body["prompt"]
    return [p if isinstance(p, list) else tokenizer().encode(p).ids for p in prompts]


@pytest.mark.parametrize(
    "request_",
    [p for p in of_path("lm_eval", "/v1/completions") if p.values[0]["body"].get("echo")],
)
def test_log_likelihoods_are_the_reference_models(
    demo_mesh: Mesh, oracle: Oracle, request_: dict[str, Any]
) -> None:
    answer = json.loads(send(demo_mesh, request_))
    prompts = prompts_of(request_["body"])
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(prompts)
    for prompt, choice in zip(prompts, choices, strict=True):
        rows = oracle.logits(prompt).log_softmax(-1)  # [tokens, vocab]
        scored = choice["logprobs"]
        got, top = scored["token_logprobs"], scored["top_logprobs"]
        assert len(got) == len(top) == len(prompt) + 1  # and one token more
        assert got[0] is None
        for position in range(1, len(prompt)):
            row = rows[position - 1]
            want = float(row[prompt[position]])
            assert abs(got[position] - want) <= TOLERANCE
            # lm-eval calls a token greedy when its value is exactly the largest there.
            best = max(top[position].values())
            if (gap := float(row.max()) - want) > 2 * TOLERANCE:
                assert got[position] < best
            elif gap == 0:
                assert got[position] == best
        assert choice["finish_reason"] in {"length", "stop"}


@pytest.mark.parametrize(
    "request_",
    [p for p in of_path("lm_eval", "/v1/completions") if not p.values[0]["body"].get("echo")],
)
def test_generations_are_the_reference_models(
    demo_mesh: Mesh, oracle: Oracle, request_: dict[str, Any]
) -> None:
    body = request_["body"]
    answer = json.loads(send(demo_mesh, request_))
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for prompt, choice in zip(prompts_of(body), choices, strict=True):
        want = oracle.greedy(prompt, body["max_tokens"]).tokens
        text = tokenizer().decode(want, skip_special_tokens=True)
        assert choice["text"] == text.split(body["stop"][0])[0]


def test_the_remote_tokenizer_is_the_checkpoints(demo_mesh: Mesh) -> None:
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    for request in recorded("lm_eval"):
        if request["path"] == "/tokenizer_info":
            info = json.loads(send(demo_mesh, request))
            assert info["eos_token"] == config["eos_token"]
            assert info["bos_token"] == config["bos_token"]
        elif request["path"] == "/tokenize":
            body = request["body"]
            ids = tokenizer().encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
            assert json.loads(send(demo_mesh, request))["tokens"] == ids.ids


def test_every_kind_of_request_was_recorded() -> None:
    lm_eval = recorded("lm_eval")
    assert {type(r["body"]["prompt"][0]) for r in lm_eval if r["path"] == "/v1/completions"} == {
        str, list,
    }  # fmt: skip
    kinds = {(r["path"], (r["body"] or {}).get("stream", False)) for r in recorded("guidellm")}
    assert kinds == {
        ("/health", False), ("/v1/models", False), ("/v1/completions", True),
        ("/v1/chat/completions", True), ("/v1/chat/completions", False),
    }  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_streams_have_the_reference_models_text_and_usage_on_every_chunk(
    demo_mesh: Mesh, oracle: Oracle, path: str
) -> None:
    for request in recorded("guidellm"):
        if request["path"] != path or not request["body"].get("stream"):
            continue
        # The same with the most likely tokens, which the reference knows.
        body = request["body"] | {"temperature": 0}
        frames = send(demo_mesh, request | {"body": body}).decode().strip().split("\n\n")
        assert frames.pop() == "data: [DONE]"
        chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
        prompt = as_ids(body)
        most = body.get("max_tokens") or body["max_completion_tokens"]
        text = "".join(text_of(chunk) for chunk in chunks)
        want = oracle.greedy(prompt, most).tokens
        assert text == tokenizer().decode(want, skip_special_tokens=True)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == most
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {len(prompt)}
        assert chunks[-1]["choices"] == []
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"


def as_ids(body: dict[str, Any]) -> list[int]:
    if "prompt" in body:
        return tokenizer().encode(body["prompt"]).ids
    # The shipped template: the beginning of a document, then the messages' texts.
    (message,) = body["messages"]
    text = "".join(part["text"] for part in message["content"])
    return [0, *tokenizer().encode(text, add_special_tokens=False).ids]


def text_of(chunk: dict[str, Any]) -> str:
    if not chunk["choices"]:
        return ""
    choice = chunk["choices"][0]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


def test_what_is_not_streamed_has_its_usage_too(demo_mesh: Mesh) -> None:
    for request in recorded("guidellm"):
        if request["path"] == "/v1/chat/completions" and not request["body"].get("stream"):
            answer = json.loads(send(demo_mesh, request))
            assert answer["usage"]["completion_tokens"] == request["body"]["max_completion_tokens"]
            assert answer["choices"][0]["message"]["content"]
        elif request["path"] == "/v1/models":
            assert json.loads(send(demo_mesh, request))["data"][0]["id"] == "moemesh-demo"
        elif request["path"] == "/health":
            send(demo_mesh, request)


def test_a_whole_texts_likelihood_adds_up(demo_mesh: Mesh, oracle: Oracle) -> None:
    """The perplexity that lm-eval prints: one sum over all tokens after the first."""
    tokens = tokenizer().encode("In the beginning God created the heaven and the earth").ids
    body = {"prompt": tokens, "max_tokens": 0, "echo": True, "logprobs": 0}
    status, answer = demo_mesh.post("/v1/completions", body)
    assert status == 200
    got = sum(answer["choices"][0]["logprobs"]["token_logprobs"][1:])
    rows = oracle.logits(tokens).log_softmax(-1)
    want = float(rows[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).sum())
    assert math.isclose(got, want, abs_tol=len(tokens) * TOLERANCE)
