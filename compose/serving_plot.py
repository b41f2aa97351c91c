"""The plot of ``moemesh bench serve`` as an SVG: latencies and rates over the offered rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from compose.serving_load import Measured

_WIDTH, _HEIGHT = 880, 620
_PANEL_WIDTH, _PANEL_HEIGHT = 340, 210
_COLORS = ("#2068b0", "#d5811e", "#4f9d69")

_Line = tuple[str, Callable[[Measured], float | None]]


def draw(results: Sequence[Measured], title: str) -> str:
    """An SVG of ``results``, which are of ascending rates."""
    goodput: list[_Line] = []
    if any(one.request_goodput is not None for one in results):
        goodput = [("within the goal", lambda one: one.request_goodput)]
    panels: list[tuple[str, list[_Line]]] = [
        ("time to first token, ms", _latency("ttft")),
        ("time per output token, ms", _latency("tpot")),
        (
            "requests/s",
            [
                ("offered", lambda one: one.request_rate),
                ("answered", lambda one: one.request_throughput),
                *goodput,
            ],
        ),
        ("output tokens/s", [("made", lambda one: one.output_throughput)]),
    ]
    body = [f'<text x="60" y="24" font-size="15" font-weight="600">{escape(title)}</text>']
    for index, (name, lines) in enumerate(panels):
        left, top = 60 + index % 2 * 430, 66 + index // 2 * 285
        body += _panel(results, name, lines, left, top)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#333">\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _latency(kind: str) -> list[_Line]:
    def line(statistic: str) -> _Line:
        return statistic, lambda one: one.latencies[kind].get(statistic)

    return [line("p50"), line("p99")]


def _panel(
    results: Sequence[Measured], title: str, lines: list[_Line], left: int, top: int
) -> list[str]:
    values = [[read(one) for one in results] for _, read in lines]
    highest = max((v for line in values for v in line if v is not None), default=0.0)
    step = _step(highest)
    ceiling = step * max(1, math.ceil(highest / step))
    bottom = top + _PANEL_HEIGHT

    def x(index: int) -> float:
        return round(left + (index + 0.5) * _PANEL_WIDTH / len(results), 1)

    def y(value: float) -> float:
        return round(bottom - value / ceiling * _PANEL_HEIGHT, 1)

    parts = [_text(left, top - 12, title, 'font-weight="600"')]
    for tick in range(round(ceiling / step) + 1):
        at = y(tick * step)
        parts.append(f'<path d="M{left} {at}h{_PANEL_WIDTH}" stroke="#e4e4e4"/>')
        parts.append(_text(left - 6, at + 4, f"{tick * step:g}", 'text-anchor="end"'))
    for index, one in enumerate(results):
        label = "at once" if one.request_rate is None else f"{one.request_rate:g}"
        parts.append(_text(x(index), bottom + 18, label, 'text-anchor="middle"'))
    parts.append(
        _text(left + _PANEL_WIDTH / 2, bottom + 36, "requests/s offered", 'text-anchor="middle"')
    )
    for order, ((name, _), line) in enumerate(zip(lines, values, strict=True)):
        color = _COLORS[order]
        points = [(x(index), y(value)) for index, value in enumerate(line) if value is not None]
        path = " ".join(f"{a},{b}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{a}" cy="{b}" r="3" fill="{color}"/>' for a, b in points]
        # Curves rise to the right: there is room at the left.
        parts.append(
            _text(left + 10, top + 18 + 16 * order, name, f'fill="{color}" font-weight="600"')
        )
    return parts


def _step(highest: float) -> float:
    """A round distance of grid lines, so that there are about four."""
    if highest <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(highest / 4))
    return next(size * n for n in (1, 2, 5, 10) if size * n >= highest / 4)


def _text(x: float, y: float, text: str, more: str) -> str:
    return f'<text x="{x}" y="{y}" {more}>{escape(text)}</text>'
