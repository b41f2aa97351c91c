"""The plot of ``drift.py`` as an SVG: topics, balancedness and throughput over time."""

from __future__ import annotations

import statistics
from typing import Any
from xml.sax.saxutils import escape

from topics import TOPICS, mix, switches

WIDTH, LEFT, RIGHT = 860, 62, 110
PANELS = {"topics": (34, 90), "balance": (160, 200), "rate": (408, 150)}  # top, height
HEIGHT = 600
POLICY_COLORS = {"off": "#8a8a8a", "global": "#d5811e", "mesh": "#2068b0"}
TOPIC_COLORS = ("#c9a227", "#b5658a", "#4f9d69", "#6a7fb5", "#7d5ba6")
STEPS = 240


def draw(result: dict[str, Any]) -> str:
    """``result``: what ``drift.py`` writes. Rounds of a policy are averaged."""
    seconds = result["settings"]["seconds"]
    policies = list(dict.fromkeys(run["policy"] for run in result["runs"]))
    balance = {policy: _balance(result, policy) for policy in policies}
    rates = {policy: _rates(result, policy) for policy in policies}
    lowest = min(value for line in balance.values() for _, value in line)
    highest = max(value for line in rates.values() for _, value in line)
    body = [
        *_topics(),
        *_lines("balance", balance, seconds, int(lowest * 20) / 20, 1.0, 0.05,
                "balancedness (mean / max tokens of a rank)"),
        *_lines("rate", rates, seconds, 0.0, (int(highest / 200) + 1) * 200.0, 200.0, "tokens/s"),
        *_moves(result, policies, seconds),
        *_time_axis(seconds),
    ]  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#333">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


Line = list[tuple[float, float]]


def _balance(result: dict[str, Any], policy: str) -> Line:
    runs = [run["samples"] for run in result["runs"] if run["policy"] == policy]
    return [
        (row[0]["at"], statistics.fmean(sample["balancedness"] for sample in row))
        for row in zip(*runs, strict=False)
        if row[0]["at"] >= result["settings"]["window"] / 2
    ]


def _rates(result: dict[str, Any], policy: str) -> Line:
    runs = [run["tokens_per_s"] for run in result["runs"] if run["policy"] == policy]
    bin_s = result["settings"]["seconds"] / len(runs[0])
    return [
        ((index + 0.5) * bin_s, statistics.fmean(row))
        for index, row in enumerate(zip(*runs, strict=False))
    ]


def _x(share: float) -> float:
    return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


def _y(panel: str, share: float) -> float:
    """``share`` 0 is the panel's bottom, 1 its top."""
    top, height = PANELS[panel]
    return round(top + (1 - share) * height, 1)


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{escape(text)}</text>'


def _topics() -> list[str]:
    """The shares of the topics, one above the other."""
    moments = sorted({step / STEPS for step in range(STEPS + 1)} | set(switches()))
    parts = [_text(LEFT, _y("topics", 1) - 8, "topics of the requests", 'font-weight="600"')]
    for topic, (name, color) in enumerate(zip(TOPICS, TOPIC_COLORS, strict=True)):
        upper = [(at, sum(mix(at)[: topic + 1])) for at in moments]
        lower = [(at, sum(mix(at)[:topic])) for at in moments]
        points = " ".join(f"{_x(at)},{_y('topics', share)}" for at, share in upper + lower[::-1])
        parts.append(f'<polygon points="{points}" fill="{color}" opacity="0.75"/>')
        label = _y("topics", (topic + 0.4) / len(TOPICS))
        parts.append(_text(_x(1) + 8, label, name, f'fill="{color}"'))
    return parts


def _lines(
    panel: str, lines: dict[str, Line], seconds: float, low: float, high: float, tick: float,
    title: str,
) -> list[str]:  # fmt: skip
    parts = [_text(LEFT, _y(panel, 1) - 8, title, 'font-weight="600"')]
    value = low
    while value <= high + tick / 2:
        y = _y(panel, (value - low) / (high - low))
        parts.append(f'<path d="M{LEFT} {y}H{_x(1)}" stroke="#e4e4e4"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{value:g}", 'text-anchor="end"'))
        value = round(value + tick, 6)
    for row, (policy, line) in enumerate(lines.items()):
        color = POLICY_COLORS.get(policy, "#333")
        points = " ".join(
            f"{_x(at / seconds)},{_y(panel, (max(value, low) - low) / (high - low))}"
            for at, value in line
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2" '
            'stroke-linejoin="round"/>'
        )
        mean = statistics.fmean(value for _, value in line)
        label = f"{policy}  {mean:.3f}" if high <= 1 else f"{policy}  {mean:.0f}"
        where = _y(panel, 1) + 14 + 17 * row
        parts.append(_text(_x(1) + 8, where, label, f'fill="{color}" font-weight="600"'))
    return parts


def _moves(result: dict[str, Any], policies: list[str], seconds: float) -> list[str]:
    """A tick for each moment at which experts had come to another rank, in the first round."""
    parts: list[str] = []
    bottom = _y("balance", 0)
    for row, policy in enumerate(policy for policy in policies if policy != "off"):
        samples = next(run["samples"] for run in result["runs"] if run["policy"] == policy)
        y = bottom + 5 + 7 * row
        marks = "".join(f"M{_x(s['at'] / seconds)} {y}v5" for s in samples if s["loaded"])
        color = POLICY_COLORS.get(policy, "#333")
        parts.append(f'<path d="{marks}" stroke="{color}" stroke-width="2"/>')
    parts.append(_text(_x(1) + 8, bottom + 14, "experts moved", 'font-size="11"'))
    return parts


def _time_axis(seconds: float) -> list[str]:
    bottom = _y("rate", 0)
    return [
        _text(_x(at / seconds), bottom + 18, f"{at} s", 'text-anchor="middle"')
        for at in range(0, int(seconds) + 1, 30 if seconds <= 300 else 60)
    ]
