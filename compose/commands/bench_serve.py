"""``moemesh bench serve``: latencies and throughput over the rate at which requests arrive."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from compose.commands.bench import ApiKey, running_mesh
from compose.console import standard_output
from compose.options import Source, UsageError
from compose.serving_load import Goal, Measured, Shape, as_vllm, run_rate
from compose.serving_plot import draw
from mesh.settings import Settings

_MOST_REQUESTS = 100_000


def serve(
    *,
    source: Source = Source(),  # noqa: B008 (frozen)
    request_rate: Annotated[
        str, Parameter(help="Requests a second, several by commas; inf: all at once.")
    ] = "1,2,4,8,inf",
    num_prompts: Annotated[int, Parameter(help="Requests at each rate.")] = 64,
    input_len: Annotated[int, Parameter(help="Tokens of a prompt.")] = 128,
    output_len: Annotated[int, Parameter(help="Tokens of an answer.")] = 64,
    spread: Annotated[
        float, Parameter(help="How far lengths go from these, as a share of them: below 1.")
    ] = 0.0,
    burstiness: Annotated[
        float, Parameter(help="1: Poisson arrivals; less: bursts; more: evenness.")
    ] = 1.0,
    max_concurrency: Annotated[
        int, Parameter(help="Most requests at once; more wait their turn. 0: no limit.")
    ] = 0,
    goodput: Annotated[
        str, Parameter(help="What a request must keep, in ms: ttft:500,tpot:50,e2el:5000.")
    ] = "",
    timeout: Annotated[float, Parameter(help="Seconds that a request may take.")] = 600.0,
    seed: Annotated[int, Parameter(help="Of arrivals, lengths and prompts.")] = 0,
    api_key: ApiKey = "",
    output: Annotated[Path | None, Parameter(help="File for the results, as JSON.")] = None,
    plot: Annotated[Path | None, Parameter(help="File for a plot, as SVG.")] = None,
) -> int:
    """Send requests at one rate after another and print what their clients saw.

    Prompts are random tokens, no two alike; answers have exactly their length. The JSON has the
    names of vLLM's serving benchmark. Exit code 1 when a request failed.
    """
    rates, goal = rates_of(request_rate), goal_of(goodput)
    shape = Shape(
        prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        spread=spread,
        burstiness=burstiness,
        concurrency=max_concurrency,
        seed=seed,
        timeout_s=timeout,
    )
    check(shape)
    settings = source.effective().settings
    for path in (output, plot):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"{path}: there is no directory {path.parent}")
    console = standard_output()
    results = asyncio.run(_sweep(settings, rates, shape, goal, api_key, console))
    console.print(_table(results))
    if output is not None:
        document = {
            "shape": shape,
            "goodput": goal,
            "results": [as_vllm(one) | {"errors": one.errors} for one in results],
        }
        output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    if plot is not None:
        title = f"{num_prompts} requests of {input_len} + {output_len} tokens at each rate"
        plot.write_text(draw(results, title))
    for one in results:
        for reason, count in one.errors.items():
            console.print(f"{count} failed at {_shown(one.request_rate)}: {reason}", markup=False)
    return 1 if any(one.failed for one in results) else 0


async def _sweep(
    settings: Settings,
    rates: list[float],
    shape: Shape,
    goal: Goal,
    key: str,
    console: Console,
) -> list[Measured]:
    mesh = await running_mesh(settings)
    warm_up = Shape(prompts=2, input_len=shape.input_len, output_len=4, timeout_s=shape.timeout_s)
    first = await run_rate(mesh.urls, mesh.model, mesh.vocab, math.inf, warm_up, Goal(), key)
    if first.failed:
        raise UsageError(f"{mesh.urls[0]} does not answer: {next(iter(first.errors))}", exit_code=1)
    results = []
    for rate in rates:
        with console.status(f"{shape.prompts} requests at {_shown(rate)}"):
            one = await run_rate(mesh.urls, mesh.model, mesh.vocab, rate, shape, goal, key)
        results.append(one)
    return results


def rates_of(text: str) -> list[float]:
    """Rates in ascending order. Raises ``UsageError``."""
    try:
        rates = sorted({float(part) for part in text.split(",")})
    except ValueError:
        rates = [math.nan]
    if not all(rate > 0 for rate in rates):  # false for NaN
        raise UsageError(f"--request-rate {text}: expected numbers above 0, or inf, by commas")
    return rates


def goal_of(text: str) -> Goal:
    """``ttft:500,tpot:50`` as a goal. Raises ``UsageError``."""
    bounds: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition(":")
        try:
            bounds[name] = float(value)
        except ValueError:
            bounds[name] = math.nan
        if name not in Goal.__struct_fields__ or not 0 < bounds[name] < math.inf:
            raise UsageError(
                f"--goodput {text}: expected {', '.join(Goal.__struct_fields__)}, each with "
                "milliseconds, such as ttft:500,tpot:50"
            )
    return Goal(**bounds)


def check(shape: Shape) -> None:
    """Raises ``UsageError`` for what cannot be asked for."""
    for flag, value, good, expected in (
        (
            "--num-prompts",
            shape.prompts,
            1 <= shape.prompts <= _MOST_REQUESTS,
            f"1 to {_MOST_REQUESTS}",
        ),
        ("--input-len", shape.input_len, shape.input_len >= 1, "at least 1"),
        ("--output-len", shape.output_len, shape.output_len >= 1, "at least 1"),
        ("--spread", shape.spread, 0 <= shape.spread < 1, "0 or more, and less than 1"),
        ("--burstiness", shape.burstiness, 0 < shape.burstiness < math.inf, "more than 0"),
        ("--max-concurrency", shape.concurrency, shape.concurrency >= 0, "0 or more"),
        ("--timeout", shape.timeout_s, 0 < shape.timeout_s < math.inf, "more than 0"),
    ):
        if not good:
            raise UsageError(f"{flag} {value}: expected {expected}")


def _table(results: list[Measured]) -> Table:
    """Latencies in milliseconds, median and 99th percentile."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    columns = ["offered", "req/s", "tok/s", "failed", "ttft", "tpot", "itl", "e2el"]
    if any(one.request_goodput is not None for one in results):
        columns.append("good/s")
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for one in results:
        cells = [_shown(one.request_rate), f"{one.request_throughput:.2f}"]
        cells += [f"{one.output_throughput:.1f}", str(one.failed)]
        for kind in ("ttft", "tpot", "itl", "e2el"):
            spread = one.latencies[kind]
            cells.append(f"{spread['p50']:.0f} {spread['p99']:.0f}" if spread else "-")
        if one.request_goodput is not None:
            cells.append(f"{one.request_goodput:.2f}")
        table.add_row(*cells)
    return table


def _shown(rate: float | None) -> str:
    return "at once" if rate is None or math.isinf(rate) else f"{rate:g}/s"
