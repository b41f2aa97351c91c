"""The planner's answers as tables for people. Pure."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mesh.messages import LoadDetail, PlanDetail, RecordDetail

VERDICT_STYLES = {"moved": "green", "moving": "cyan", "failed": "red"}


def plan_panel(plan: PlanDetail, now: float) -> RenderableType:
    """The latest plan and what became of it; ``now`` is Unix time."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("mode", f"{plan.mode}  (policy {plan.policy})")
    grid.add_row("epoch", str(plan.epoch))
    if plan.planned_at:
        age_s = max(now - plan.planned_at, 0.0)
        stamp = time.strftime("%H:%M:%S", time.localtime(plan.planned_at))
        grid.add_row("planned", f"{age_s:.0f} s ago ({stamp})")
        grid.add_row(
            "balancedness", f"{plan.balancedness_before:.3f} -> {plan.balancedness_after:.3f}"
        )
        grid.add_row("moves", str(plan.moves))
        grid.add_row("gain", f"{plan.gain_s:.3g} s of expert time over the horizon")
        grid.add_row("cost", f"{plan.cost_s:.3g} s of loading")
    else:
        grid.add_row("planned", "not yet")
    if plan.verdict:
        verdict = Text(plan.verdict, style=VERDICT_STYLES.get(plan.verdict, "yellow"))
        grid.add_row("verdict", verdict)
    if plan.reason:
        grid.add_row("reason", Text(plan.reason))
    if plan.phase:
        grid.add_row("moving", f"{plan.phase}, {plan.moved} of {plan.to_move} slots")
    if plan.retry_in_s:
        grid.add_row("retry", f"in {plan.retry_in_s:.0f} s")
    for pin in plan.pins:
        where = ", ".join(pin.ranks)
        grid.add_row("pin", Text(f"layer {pin.layer} expert {pin.expert} on {where}"))
    for fault in plan.faults:
        grid.add_row("fault", Text(fault, style="red"))
    return grid


def load_table(load: LoadDetail) -> RenderableType:
    """One row a MoE layer: real tokens, the hottest expert, and who was sent most and least."""
    table = _table()
    for title in ("layer", "prefill", "decode"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("hottest expert", "fullest", "least full"):
        table.add_column(title, no_wrap=True)
    for title in ("balance", "excess"):
        table.add_column(title, justify="right", no_wrap=True)
    for index, layer in enumerate(load.moe_layers):
        prefill, decode = load.prefill[index], load.decode[index]
        table.add_row(
            str(layer),
            str(sum(prefill)),
            str(sum(decode)),
            _hottest([a + b for a, b in zip(prefill, decode, strict=True)]),
            *_extremes(load, index),
            *_balance(load.balancedness[index] if load.balancedness else 0.0),
        )
    headline = (
        f"balancedness {load.overall:.3f} over the last {load.window_s:.0f} s; "
        "excess is (max - mean) / mean over ranks"
    )
    return Group(Text(headline), table)


def _hottest(experts: list[int]) -> str:
    """The expert with most tokens, and how many times the mean it has."""
    total = sum(experts)
    if not total:
        return ""
    hottest = max(range(len(experts)), key=experts.__getitem__)
    return f"{hottest} ({experts[hottest] * len(experts) / total:.2f} x mean)"


def record_table(record: RecordDetail) -> RenderableType:
    """One row a router."""
    table = _table()
    for title in ("router", "recording", "steps", "file"):
        table.add_column(title, no_wrap=title != "file")
    for router in record.routers:
        table.add_row(
            router.router,
            "yes" if router.recording else "no",
            str(router.steps),
            Text(router.error, style="red") if router.error else Text(router.path),
        )
    return table if record.routers else Text("no router answered")


def _extremes(load: LoadDetail, index: int) -> tuple[str, str]:
    """The ranks that were sent most and least."""
    if not load.rank_tokens:
        return "", ""
    ranks = sorted(zip(load.rank_tokens[index], load.ranks, strict=True))
    least, most = (f"{rank} {tokens}" for tokens, rank in (ranks[0], ranks[-1]))
    return most, least


def _balance(balancedness: float) -> tuple[str, str]:
    """Mean over ranks / max over ranks, and max / mean - 1; 0: not known."""
    if not balancedness:
        return "", ""
    return f"{balancedness:.3f}", f"{1 / balancedness - 1:.1%}"


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
