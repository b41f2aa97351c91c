"""``Status`` as people read it (a table) and as programs do (one JSON object). Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from compose.console import STYLES
from mesh.messages import Load, Member, Placement, Status


def document(status: Status) -> dict[str, Any]:
    """One object with the members at its top level, every field present."""
    view = status.view
    return {
        "mesh": status.mesh,
        "model": status.model,
        "model_digest": view.model_digest,
        "ready": status.ready,
        "reason": status.reason,
        "epoch": status.epoch,
        "balancedness": status.balancedness,
        "tokens": status.tokens,
        "mode": status.mode,
        "phase": status.phase,
        "moving": status.moving,
        "moved": status.moved,
        "to_move": status.to_move,
        "alarms": list(status.alarms),
        "view_version": view.version,
        "members": [_member(member, view.placement) for member in view.members],
        "placement": None if view.placement is None else msgspec.to_builtins(view.placement),
    }


def render(status: Status) -> RenderableType:
    """A headline and a table with one row a member; ``slots`` is MoE layers x slots in each."""
    view = status.view
    headline = Text()
    headline.append(status.mesh, style="bold")
    headline.append(f"  {status.model}  ")
    if status.ready:
        headline.append("ready", style="green")
    else:
        headline.append(f"not ready: {status.reason}", style="yellow")
    headline.append(
        f"\nepoch {status.epoch}  balancedness {status.balancedness:.2f}  tokens {status.tokens}"
        f"  plans {status.mode}"
    )
    if status.moving:
        progress = f"{status.moving}, {status.moved} of {status.to_move} done"
        phase = f", {status.phase}" if status.phase else ""
        headline.append(f"  moving experts: {progress}{phase}", style="cyan")
    for alarm in status.alarms:
        headline.append(f"\nalarm: {alarm}", style="red")
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for title in ("member", "role", "pid"):
        table.add_column(title, no_wrap=True)
    table.add_column("state")
    for title in ("slots", "running", "waiting", "kv", "step", "memory"):
        table.add_column(title, no_wrap=True, justify="right")
    for member in view.members:
        load = member.load or Load()
        slots = slots_per_layer(member, view.placement)
        layers = len(view.placement.moe_layers) if view.placement is not None else 0
        is_router = member.role == "router"
        table.add_row(
            member.id,
            member.role,
            "\n".join(str(pid) for pid in (member.pid, *member.group)),
            _state(member),
            f"{layers}x{slots}" if slots else "",
            str(load.running) if is_router else "",
            str(load.waiting) if is_router else "",
            _kv_used(load),
            str(load.step) if load.step else "",
            f"{load.resident_bytes / 2**20:.0f} MiB" if load.resident_bytes else "",
        )
    return Group(headline, table)


def _state(member: Member) -> Text:
    text = Text(member.state, style=STYLES.get(member.state, ""))
    if member.state in {"joining", "loading"}:
        text.append(f" {member.progress:.0%}")
    if member.detail and member.state != "ready":
        text.append(f" ({member.detail})", style="dim")
    return text


def _kv_used(load: Load) -> str:
    total = load.kv_blocks_total
    return f"{(total - load.kv_blocks_free) / total:.0%}" if total else ""


def _member(member: Member, placement: Placement | None) -> dict[str, Any]:
    fields = {name: getattr(member, name) for name in Member.__struct_fields__ if name != "load"}
    load = member.load
    fields["load"] = (
        None if load is None else {name: getattr(load, name) for name in load.__struct_fields__}
    )
    slots = slots_per_layer(member, placement)
    fields["slots_per_layer"] = slots
    return fields


def slots_per_layer(member: Member, placement: Placement | None) -> int:
    """Physical slots that the placement gives this member in each MoE layer; 0 if none."""
    if placement is None or member.id not in placement.ranks:
        return 0
    return placement.slots_per_rank[placement.ranks.index(member.id)]
