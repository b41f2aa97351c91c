from __future__ import annotations

import pytest

from compose.load import LoadError, Stream, measure


def test_rates_count_tokens_however_many_a_chunk_carries() -> None:
    one = Stream(started=0.0, arrivals=[1.0, 2.0, 3.0, 4.0], tokens=8)
    two = Stream(started=0.0, arrivals=[2.0, 3.0, 4.0], tokens=6)
    level = measure([one, two])
    assert level.tokens == 14
    assert level.tokens_a_chunk == 2
    assert level.overall == pytest.approx(14 / 4)
    assert level.decode == pytest.approx(4 * 2 / 2)  # four chunks after both had begun, in 2 s
    assert level.steady == pytest.approx(2 * 2 / 1)
    assert level.ttft_ms == pytest.approx(1500)


def test_a_stream_without_a_token_is_an_error() -> None:
    with pytest.raises(LoadError, match="without a token"):
        measure([Stream(started=0.0)])
