"""Requests that arrive at a given rate, and what their clients saw: ``moemesh bench serve``.

Arrivals, requests and figures are those of vLLM's and SGLang's serving benchmarks, under the same
names, so that results can be laid beside each other: arrivals are a Poisson process (or a gamma
process, less or more bursty), a request's clock starts when it is sent, and with a largest
concurrency those beyond it wait their turn first.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from compose.load import LoadError, Stream, body, stream

_MOST_ERRORS = 5
"""Different errors that a result quotes."""
PERCENTILES = (50, 90, 95, 99)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for. Lengths are drawn evenly from ``len * (1 - spread) .. len * (1 + spread)``
    tokens; ``burstiness``: shape of the gamma distribution of the pauses, 1 for Poisson arrivals,
    less for bursts, more for evenness; ``concurrency``: most requests at once, 0 for no limit.
    """

    prompts: int
    input_len: int
    output_len: int
    spread: float = 0.0
    burstiness: float = 1.0
    concurrency: int = 0
    seed: int = 0
    timeout_s: float = 600.0


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must keep to count towards goodput; milliseconds, 0 for no bound."""

    ttft: float = 0.0
    tpot: float = 0.0
    e2el: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.ttft or self.tpot or self.e2el)

    def is_met(self, request: Finished) -> bool:
        """Whether a request kept every bound."""
        bounds = ((self.ttft, request.ttft), (self.tpot, request.tpot), (self.e2el, request.e2el))
        return all(not bound or value <= bound for bound, value in bounds)


@dataclass(frozen=True, slots=True)
class Finished:
    """One request that was answered: times in milliseconds from its sending."""

    ttft: float
    tpot: float
    """Mean time of a token after the first; 0 where there is one only."""
    itl: tuple[float, ...]
    """Between two chunks."""
    e2el: float
    tokens: int


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One request rate, in requests and tokens per second and milliseconds."""

    request_rate: float | None
    """None: all at once."""
    num_prompts: int
    max_concurrency: int
    completed: int
    failed: int
    errors: dict[str, int]
    duration: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    """None without a goal."""
    output_throughput: float
    total_token_throughput: float
    peak_concurrency: int
    latencies: dict[str, dict[str, float]]
    """``ttft``, ``tpot``, ``itl`` and ``e2el`` -> ``mean``, ``std``, ``p50`` ..."""


def arrivals(rate: float, shape: Shape) -> list[float]:
    """Seconds from the start at which requests are due; all 0 for an infinite rate."""
    if math.isinf(rate):
        return [0.0] * shape.prompts
    rng = random.Random(f"arrivals-{shape.seed}")  # noqa: S311 (a reproducible load)
    at, due = 0.0, []
    for _ in range(shape.prompts):
        due.append(at)
        at += rng.gammavariate(shape.burstiness, 1 / (rate * shape.burstiness))
    return due


def lengths(shape: Shape) -> list[tuple[int, int]]:
    """Tokens in and out of each request."""
    rng = random.Random(f"lengths-{shape.seed}")  # noqa: S311

    def draw(length: int) -> int:
        low, high = length * (1 - shape.spread), length * (1 + shape.spread)
        return rng.randint(max(1, round(low)), max(1, round(high)))

    return [(draw(shape.input_len), draw(shape.output_len)) for _ in range(shape.prompts)]


async def run_rate(
    urls: Sequence[str],
    model: str,
    vocab: int,
    rate: float,
    shape: Shape,
    goal: Goal,
    key: str = "",
) -> Measured:
    """Send all requests at ``rate`` a second, to ``urls`` in turn, and wait for the last answer.

    A request that fails is counted, with its reason, and the others go on.
    """
    rng = random.Random(f"tokens-{shape.seed}-{rate}")  # noqa: S311
    sizes = lengths(shape)
    bodies = [
        body(model, rng, prompt_tokens=given, tokens=made, vocab=vocab) for given, made in sizes
    ]
    room = asyncio.Semaphore(shape.concurrency or shape.prompts)
    begun = time.perf_counter()
    open_ = peak = 0

    async def one(index: int, due: float) -> Stream | str:
        nonlocal open_, peak
        await asyncio.sleep(max(0.0, begun + due - time.perf_counter()))
        async with room:
            open_ += 1
            peak = max(peak, open_)
            try:
                async with asyncio.timeout(shape.timeout_s):
                    return await stream(urls[index % len(urls)], bodies[index], key)
            except TimeoutError:
                return f"no whole answer within {shape.timeout_s:g} s"
            except (LoadError, OSError) as error:
                return str(error)
            finally:
                open_ -= 1

    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(one(index, due)) for index, due in enumerate(arrivals(rate, shape))
        ]
    duration = time.perf_counter() - begun
    results = [task.result() for task in running]
    given = sum(size for (size, _), r in zip(sizes, results, strict=True) if not isinstance(r, str))
    return summarise(
        results, rate=rate, shape=shape, goal=goal, duration=duration, input_tokens=given, peak=peak
    )


def summarise(
    results: Sequence[Stream | str],
    *,
    rate: float,
    shape: Shape,
    goal: Goal,
    duration: float,
    input_tokens: int,
    peak: int,
) -> Measured:
    """Figures of streams, and of the errors of those that failed. Pure."""
    errors = Counter(result for result in results if isinstance(result, str))
    ended = [result for result in results if not isinstance(result, str)]
    errors.update("the stream had no token" for one in ended if not one.arrivals)
    done = [finished(one) for one in ended if one.arrivals]
    made = sum(one.tokens for one in done)
    return Measured(
        request_rate=None if math.isinf(rate) else rate,
        num_prompts=shape.prompts,
        max_concurrency=shape.concurrency,
        completed=len(done),
        failed=sum(errors.values()),
        errors=dict(errors.most_common(_MOST_ERRORS)),
        duration=duration,
        total_input_tokens=input_tokens,
        total_output_tokens=made,
        request_throughput=len(done) / duration,
        request_goodput=sum(map(goal.is_met, done)) / duration if goal else None,
        output_throughput=made / duration,
        total_token_throughput=(made + input_tokens) / duration,
        peak_concurrency=peak,
        latencies={
            "ttft": _spread([one.ttft for one in done]),
            "tpot": _spread([one.tpot for one in done if one.tokens > 1]),
            "itl": _spread([gap for one in done for gap in one.itl]),
            "e2el": _spread([one.e2el for one in done]),
        },
    )


def finished(one: Stream) -> Finished:
    """A stream with a token, as its client saw it."""
    first, last = one.arrivals[0], one.arrivals[-1]
    return Finished(
        ttft=(first - one.started) * 1e3,
        tpot=(last - first) * 1e3 / max(1, one.tokens - 1),
        itl=tuple((later - sooner) * 1e3 for sooner, later in pairwise(one.arrivals)),
        e2el=(last - one.started) * 1e3,
        tokens=one.tokens,
    )


def _spread(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    found = {"mean": statistics.fmean(ordered), "std": statistics.pstdev(ordered)}
    return found | {f"p{p}": percentile(ordered, p) for p in PERCENTILES}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between the two nearest of the ordered values, as numpy does it."""
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def as_vllm(measured: Measured) -> dict[str, float | int | str | None]:
    """One flat object with the names of vLLM's ``benchmark_serving`` results."""
    flat: dict[str, float | int | str | None] = {
        "request_rate": "inf" if measured.request_rate is None else measured.request_rate,
        "max_concurrency": measured.max_concurrency or None,
        "request_goodput": measured.request_goodput,
    }
    for name in (
        *("num_prompts", "completed", "failed", "duration", "total_input_tokens"),
        *("total_output_tokens", "request_throughput", "output_throughput"),
        *("total_token_throughput", "peak_concurrency"),
    ):
        flat[name] = getattr(measured, name)
    for kind, spread in measured.latencies.items():
        for statistic, value in spread.items():
            flat[f"{'median' if statistic == 'p50' else statistic}_{kind}_ms"] = value
    return flat
