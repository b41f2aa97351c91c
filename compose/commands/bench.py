"""``moemesh bench``: measurements of a mesh that runs on this host."""

from __future__ import annotations

import asyncio
from typing import Annotated
from urllib.parse import urlsplit

import cyclopts
import msgspec
from cyclopts import Parameter
from rich.table import Table

from compose.console import standard_output
from compose.load import Level, LoadError, run_level
from compose.model import served_model
from compose.options import Source, UsageError
from compose.probes import PlannerProbe, fetch_metrics
from compose.processes import WILDCARD_HOSTS
from compose.step_profile import (
    KINDS,
    Profile,
    Reading,
    expert_profile,
    read,
    router_profile,
    service_profile,
)
from mesh.messages import Member
from mesh.settings import Settings
from moe_model.errors import CheckpointError
from moe_model.shipped import checkpoint_dir
from moe_model.spec import load_spec

app = cyclopts.App(name="bench", help="Measure a mesh that runs on this host.")

app.command("compose.commands.bench_serve:serve", name="serve")

_ANSWER_S = 5.0


ApiKey = Annotated[
    str,
    Parameter(
        env_var="OPENAI_API_KEY",
        show_default=False,
        help="API key to send, where the gateway wants one.",
    ),
]


class RunningMesh(msgspec.Struct, frozen=True, kw_only=True):
    """What a load needs to know of the mesh on this host. ``urls``: of its ready gateways."""

    urls: tuple[str, ...]
    model: str
    vocab: int
    members: tuple[Member, ...]


async def running_mesh(settings: Settings) -> RunningMesh:
    """The mesh that runs here. Raises ``UsageError`` where there is none, or no ready gateway."""
    try:
        vocab = load_spec(checkpoint_dir(settings.model.path)).vocab_size
    except CheckpointError as error:
        raise UsageError(f"model.path: {error}") from None
    async with PlannerProbe(settings) as planner:
        status = await planner.status(_ANSWER_S)
    if status is None:
        raise UsageError("no mesh answers here: start one with `moemesh up`", exit_code=1)
    members = status.view.members
    gateways = [m for m in members if m.role == "gateway" and m.state == "ready" and m.control]
    if not gateways:
        raise UsageError("the mesh has no ready gateway", exit_code=1)
    urls = tuple(map(_from_here, (member.control for member in gateways)))
    return RunningMesh(urls=urls, model=status.model, vocab=vocab, members=members)


def _from_here(url: str) -> str:
    """The address of a gateway of this host that listens everywhere."""
    parts = urlsplit(url)
    host = WILDCARD_HOSTS.get(parts.hostname or "")
    if host is None:
        return url
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{parts.port}"


@app.command
def step(
    *,
    source: Source = Source(),  # noqa: B008 (frozen)
    streams: Annotated[int, Parameter(help="Sequences that decode together.")] = 1,
    prompt_tokens: Annotated[int, Parameter(help="Tokens of each prompt.")] = 16,
    tokens: Annotated[int, Parameter(help="Tokens that each makes.")] = 128,
    api_key: ApiKey = "",
) -> int:
    """Decode with some streams and print where each process's time went, per router step."""
    for flag, value in (
        ("--streams", streams),
        ("--prompt-tokens", prompt_tokens),
        ("--tokens", tokens),
    ):
        if value < 1:
            raise UsageError(f"{flag} {value}: expected at least 1")
    settings = source.effective().settings
    served_model(settings)
    level, profiles = asyncio.run(_profile(settings, streams, prompt_tokens, tokens, api_key))
    console = standard_output()
    console.print(_table(profiles))
    for profile in profiles:
        if profile.outside_ms:
            console.print(
                f"{profile.member}: {profile.outside_share:.1%} of a step of "
                f"{profile.step_ms:.2f} ms passed outside tensor operations"
            )
    console.print(f"{level.decode:.1f} tokens/s with {level.streams} streams")
    return 0


async def _profile(
    settings: Settings, streams: int, prompt_tokens: int, tokens: int, key: str
) -> tuple[Level, list[Profile]]:
    found = await running_mesh(settings)
    members = {m.id: m for m in found.members if m.metrics and m.state == "ready"}

    async def load(count: int, seed: int) -> Level:
        return await run_level(
            found.urls[0],
            found.model,
            streams,
            prompt_tokens=prompt_tokens,
            tokens=count,
            vocab=found.vocab,
            seed=seed,
            key=key,
        )

    try:
        await load(8, 1)
        before = await _read_all(members)
        level = await load(tokens, 2)
        after = await _read_all(members)
    except (LoadError, OSError, ExceptionGroup) as error:
        raise UsageError(_why(error), exit_code=1) from None
    routers = [
        router_profile(name, before[name], after[name])
        for name, member in members.items()
        if member.role == "router"
    ]
    steps = sum(profile.steps for profile in routers) or 1.0
    experts = [
        expert_profile(name, steps, before[name], after[name])
        for name, member in members.items()
        if member.role == "expert"
    ]
    others = [
        service_profile(name, steps, before[name], after[name])
        for name, member in members.items()
        if member.role in {"gateway", "planner"}
    ]
    return level, [*routers, *experts, *others]


def _why(error: BaseException) -> str:
    """The first reason in a group of a load's errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


async def _read_all(members: dict[str, Member]) -> dict[str, Reading]:
    pages: dict[str, Reading] = {}
    for name, member in members.items():
        try:
            pages[name] = read(await fetch_metrics(member.metrics, _ANSWER_S))
        except OSError as error:
            raise UsageError(f"{name}: {member.metrics}: {error}", exit_code=1) from None
    return pages


def _table(profiles: list[Profile]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("ms a step")
    for title in (*KINDS, "total", "calls", "tokens"):
        table.add_column(title, justify="right")
    for profile in profiles:
        cells = [f"{profile.ms[kind]:.3f}" for kind in KINDS]
        cells += [f"{profile.step_ms:.3f}", f"{profile.steps:.0f}", f"{profile.tokens:.0f}"]
        table.add_row(profile.member, *cells)
    return table
