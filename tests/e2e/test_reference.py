"""``moemesh reference`` makes what a request to the mesh gets."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.meshes import MOEMESH, Mesh

PROMPT = "Emma was not at all"


@pytest.mark.parametrize(
    ("sampling", "flags"),
    [({}, ()), ({"temperature": 1.1, "top_p": 0.9}, ("--temperature", "1.1", "--top-p", "0.9"))],
    ids=["as-the-checkpoint-says", "as-the-request-says"],
)
def test_the_same_seed_draws_the_same_text(
    demo_mesh: Mesh, sampling: dict[str, float], flags: tuple[str, ...]
) -> None:
    status, answer = demo_mesh.post(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 40, "seed": -7, **sampling}
    )
    assert status == 200, answer
    done = subprocess.run(
        [MOEMESH, "reference", "--prompt", PROMPT, "--max-tokens", "40", "--seed", "-7", *flags],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == answer["choices"][0]["text"] + "\n"
