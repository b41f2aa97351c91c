"""Whatever bytes come: each decoder returns or raises what it promises, nothing else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.decoders import DECODERS

EXAMPLES = 60


def changed(seed: bytes, draw: random.Random) -> bytes:
    """``seed`` with a few bytes flipped, cut out, doubled or put in."""
    data = bytearray(seed)
    for _ in range(draw.randint(1, 4)):
        at = draw.randint(0, len(data))
        match draw.randint(0, 4):
            case 0 if at < len(data):
                data[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
            case 1:
                del data[at : at + draw.choice((1, 1, 4, len(data)))]
            case 2:
                data[at:at] = data[at : at + draw.randint(1, 16)]
            case _:
                junk = (b"null", b"-1", b"1e999", b'"', b"[" * 2000, b"\xff", b"NaN", b"9" * 400)
                data[at : at + draw.choice((0, 1, 2))] = draw.choice(junk)
    return bytes(data)


@pytest.mark.parametrize("name", DECODERS)
def test_seeds_are_accepted(name: str) -> None:
    decoder = DECODERS[name]
    for seed in decoder.seeds:
        decoder(seed)


@pytest.mark.parametrize("name", DECODERS)
def test_any_bytes_are_a_value_or_a_promised_error(name: str) -> None:
    decoder = DECODERS[name]

    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(data=st.binary(max_size=300), seed=st.sampled_from(decoder.seeds), draw=st.randoms())
    def run(data: bytes, seed: bytes, draw: random.Random) -> None:
        decoder(data)
        decoder(changed(seed, draw))

    run()
