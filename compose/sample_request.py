"""The request that the launcher prints for its user to paste."""

from __future__ import annotations

import shlex

import msgspec

from compose.processes import Endpoint

PROMPT = "Emma was not at all"


def curl_line(endpoint: Endpoint, model: str, *, needs_key: bool = False) -> str:
    """A shell line that asks for a completion and prints it as it comes.

    ``needs_key``: it takes the API key from the shell's variable KEY.
    """
    body = msgspec.json.encode(
        {"model": model, "prompt": PROMPT, "max_tokens": 60, "temperature": 0.7, "seed": 7}
    ).decode()
    insecure = "k" if endpoint.tls else ""  # the certificate names another host, or itself
    key = '  -H "Authorization: Bearer $KEY" \\\n' if needs_key else ""
    return (
        f"curl -s{insecure} {endpoint.url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f"{key}"
        f"  -d {shlex.quote(body)}"
    )
