"""The request that the launcher prints for its user to paste."""

from __future__ import annotations

import shlex

import msgspec

from compose.processes import Endpoint

PROMPT = "Emma was not at all"


def curl_line(endpoint: Endpoint, model: str) -> str:
    """A shell line that asks for a completion and prints it as it comes."""
    body = msgspec.json.encode(
        {"model": model, "prompt": PROMPT, "max_tokens": 60, "temperature": 0.7, "seed": 7}
    ).decode()
    return (
        f"curl -s {endpoint.url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(body)}"
    )
