from __future__ import annotations

import asyncio
import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from compose.commands.bench_serve import check, goal_of, rates_of
from compose.load import Stream
from compose.options import UsageError
from compose.serving_load import (
    Goal,
    Shape,
    arrivals,
    as_vllm,
    finished,
    lengths,
    percentile,
    run_rate,
    summarise,
)
from compose.serving_plot import draw

SHAPE = Shape(prompts=400, input_len=100, output_len=10)


def test_poisson_arrivals_come_at_the_rate_and_are_as_irregular_as_they_should() -> None:
    due = arrivals(8.0, SHAPE)
    assert due == sorted(due)
    assert due[0] == 0.0
    pauses = [later - sooner for sooner, later in pairwise(due)]
    mean = sum(pauses) / len(pauses)
    deviation = math.sqrt(sum((pause - mean) ** 2 for pause in pauses) / len(pauses))
    assert mean == pytest.approx(1 / 8, rel=0.15)
    assert deviation == pytest.approx(mean, rel=0.2)


def test_more_burstiness_is_more_even_and_the_seed_decides() -> None:
    even = Shape(prompts=400, input_len=1, output_len=1, burstiness=100.0)
    pauses = [b - a for a, b in pairwise(arrivals(1.0, even))]
    assert max(pauses) < 1.6
    assert arrivals(8.0, SHAPE) == arrivals(8.0, SHAPE)
    assert arrivals(math.inf, SHAPE) == [0.0] * 400


def test_lengths_stay_within_their_spread() -> None:
    exact = lengths(SHAPE)
    assert set(exact) == {(100, 10)}
    spread = Shape(prompts=400, input_len=100, output_len=10, spread=0.5)
    given = [size for size, _ in lengths(spread)]
    assert min(given) >= 50
    assert max(given) <= 150
    assert len(set(given)) > 50


def test_figures_of_streams_and_of_those_that_failed() -> None:
    results = [
        Stream(started=0.0, arrivals=[0.1, 0.2, 0.3], tokens=3),
        Stream(started=1.0, arrivals=[1.4, 1.5], tokens=2),
        "refused", "refused", Stream(started=0.0),
    ]  # fmt: skip
    measured = summarise(
        results, rate=2.0, shape=Shape(prompts=5, input_len=7, output_len=3),
        goal=Goal(ttft=200.0), duration=2.0, input_tokens=14, peak=3,
    )  # fmt: skip
    assert (measured.completed, measured.failed) == (2, 3)
    assert measured.errors == {"refused": 2, "the stream had no token": 1}
    assert measured.total_output_tokens == 5
    assert measured.output_throughput == pytest.approx(2.5)
    assert measured.request_goodput == pytest.approx(0.5)
    assert measured.latencies["ttft"]["p50"] == pytest.approx(250.0)
    assert measured.latencies["itl"]["mean"] == pytest.approx(100.0)
    flat = as_vllm(measured)
    assert flat["request_rate"] == 2.0
    assert flat["median_ttft_ms"] == pytest.approx(250.0)
    assert flat["p99_e2el_ms"] is not None


def test_a_goal_is_met_when_every_bound_is_kept() -> None:
    one = finished(Stream(started=0.0, arrivals=[0.1, 0.3], tokens=3))
    assert one.tpot == pytest.approx(100.0)
    assert Goal(ttft=100.1, tpot=100.1, e2el=300.1).is_met(one)
    assert not Goal(ttft=99.0).is_met(one)
    assert not Goal(tpot=99.0).is_met(one)
    assert not Goal(e2el=299.0).is_met(one)
    assert not Goal()


def test_percentiles_lie_between_the_two_nearest() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([5.0], 99) == 5.0
    assert percentile([0.0, 10.0], 90) == pytest.approx(9.0)


def test_a_server_that_is_not_there_is_a_failure_of_each_request() -> None:
    shape = Shape(prompts=3, input_len=2, output_len=2, concurrency=1, timeout_s=5.0)
    measured = asyncio.run(run_rate(["http://127.0.0.1:1"], "m", 500, math.inf, shape, Goal()))
    assert (measured.completed, measured.failed, measured.peak_concurrency) == (0, 3, 1)
    assert measured.latencies["ttft"] == {}
    ElementTree.fromstring(draw([measured], "nothing"))


def test_the_plot_has_every_rate_and_escapes_its_title() -> None:
    stream = Stream(started=0.0, arrivals=[0.1, 0.2], tokens=2)
    results = [
        summarise([stream], rate=rate, shape=SHAPE, goal=Goal(ttft=1.0), duration=1.0,
                  input_tokens=1, peak=1)
        for rate in (1.0, 2.5, math.inf)
    ]  # fmt: skip
    drawn = ElementTree.fromstring(draw(results, "a < b"))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("2.5") == 4
    assert texts.count("at once") == 4
    assert "a < b" in texts
    assert "within the goal" in texts


def test_rates_are_taken_in_order_and_nonsense_is_named() -> None:
    assert rates_of("4,inf,1") == [1.0, 4.0, math.inf]
    for text in ("", "0", "-1", "a", "1,,2", "nan"):
        with pytest.raises(UsageError, match="--request-rate"):
            rates_of(text)


def test_goals_are_named_bounds_in_milliseconds() -> None:
    assert goal_of("ttft:500,e2el:2000") == Goal(ttft=500.0, e2el=2000.0)
    assert goal_of("") == Goal()
    for text in ("ttft", "ttft:x", "ttft:-1", "itl:5", "ttft:inf"):
        with pytest.raises(UsageError, match="--goodput"):
            goal_of(text)


@pytest.mark.parametrize(("change", "flag"), [
    ({"prompts": 0}, "--num-prompts 0"),
    ({"prompts": 1_000_000}, "--num-prompts"),
    ({"input_len": 0}, "--input-len"),
    ({"output_len": -1}, "--output-len"),
    ({"spread": 1.0}, "--spread 1.0"),
    ({"burstiness": 0.0}, "--burstiness"),
    ({"concurrency": -1}, "--max-concurrency"),
    ({"timeout_s": math.inf}, "--timeout"),
])  # fmt: skip
def test_what_cannot_be_asked_for_is_refused_by_name(change: dict, flag: str) -> None:
    check(SHAPE)
    fields = {name: getattr(SHAPE, name) for name in Shape.__struct_fields__}
    with pytest.raises(UsageError, match=flag):
        check(Shape(**(fields | change)))
