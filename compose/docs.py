"""The pages of docs/ that are made from the code: ``make docs``.

``configuration.md`` is made from the settings, ``metrics.md`` from what the processes of a mesh
serve, which is started for it. Tests hold both to what the code says now.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args, get_origin

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from compose.options import UsageError
from compose.probes import PlannerProbe, fetch_metrics
from compose.settings_file import knob_texts, toml
from mesh.config import Knob, knobs, load
from mesh.settings import Settings

_ANSWER_S = 5.0
_START_S = 120.0
_STOP_S = 30.0
_LOOK_S = 0.2
_ROLES = ("gateway", "router", "expert", "planner")
_MADE = "<!-- Made by `make docs`; a test compares it with the code. -->\n"
_OPEN_LABELS = frozenset({"endpoint", "status", "link", "peer", "layers"})
"""Labels whose values depend on the mesh."""

_CONFIGURATION = """\
# Configuration

{made}
Every setting of a mesh. Sources override each other in this order: defaults, the TOML file
(`--config`), the environment, flags (`--set section.key=value`, or a flag of its own). The variable
of a setting is `MOEMESH_SECTION_KEY`. An unknown key, or a value out of range, is an error that
names it and where it came from. `moemesh config` prints what is in effect and where each value came
from, `moemesh config --reference` a TOML file with every setting at its default.
"""

_METRICS = """\
# Metrics

{made}
Every process serves Prometheus metrics: the gateway at `/metrics`, the others at a port of their
own that `moemesh status --json` names. `GET /admin/targets` of a gateway lists them all in the form
of Prometheus' `http_sd_configs`, with the labels `role` and `member`;
[compose/monitoring](../compose/monitoring) has a scrape configuration that uses it, alerts and a
Grafana dashboard. Names and suffixes are vLLM's where vLLM has the figure.

Gateways and routers both show `num_requests_running`, `num_requests_waiting` and
`request_queue_time_seconds`: of the sequences in a gateway's hands and of those in a router's. They
are told apart by `role`; the time in both queues is the sum of the two.

Counters end in `_total` and histograms have `_bucket`, `_sum` and `_count`. Labels are few: no
request is ever one, nor a layer or an expert. What belongs to layers is summed up in at most four
groups of neighbours, labelled by their first and last (`layers="0-6"`).
"""


def configuration() -> str:
    """``docs/configuration.md``."""
    texts = knob_texts()
    lines = [_CONFIGURATION.format(made=_MADE)]
    for section, group in itertools.groupby(knobs(), lambda knob: knob.key.partition(".")[0]):
        lines += [f"## {section}\n", "| setting | default | |", "|---|---|---|"]
        lines += [_row(f"`{k.key}`", f"`{toml(k.default)}`", _text(k, texts)) for k in group]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _text(knob: Knob, texts: Mapping[str, str]) -> str:
    text = texts[knob.key]
    if not text:  # one text for several in a row stands at the first
        return "See above."
    if get_origin(knob.type) is Literal:
        values = ", ".join(f"`{value}`" for value in get_args(knob.type))
        text = f"One of {values}. {text}"
    return text


def metrics(pages: Mapping[str, str]) -> str:
    """``docs/metrics.md`` from a Prometheus page of each role."""
    families = {role: _families(pages[role]) for role in _ROLES}
    inner = set.intersection(*(set(families[role]) for role in _ROLES if role != "gateway"))
    lines = [_METRICS.format(made=_MADE)]
    common = inner & set(families["gateway"])
    lines += _table("Every process", families["gateway"], common)
    lines += _table("Every process but the gateway", families["router"], inner - common)
    for role, title in zip(_ROLES, ("Gateway", "Router", "Expert worker", "Planner"), strict=True):
        lines += _table(title, families[role], set(families[role]) - inner)
    return "\n".join(lines).rstrip() + "\n"


def _families(page: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(page)}


def _table(title: str, families: Mapping[str, Metric], names: Iterable[str]) -> list[str]:
    lines = [f"## {title}\n", "| metric | type | labels | |", "|---|---|---|---|"]
    for family in (families[name] for name in sorted(names)):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(_row(f"`{name}`", family.type, _labels(family), family.documentation))
    return [*lines, ""]


def _labels(family: Metric) -> str:
    """Names, with the values where these do not depend on the mesh."""
    values: dict[str, dict[str, None]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label not in {"le", "quantile"}:
                values.setdefault(label, {})[value] = None
    return "; ".join(
        f"`{label}`" if label in _OPEN_LABELS else f"`{label}`: {', '.join(found)}"
        for label, found in values.items()
    )


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


async def scrape(settings: Settings) -> dict[str, str]:
    """Role -> the metrics page of one of its processes in the mesh that runs.

    Raises ``UsageError`` when there is none.
    """
    async with PlannerProbe(settings) as planner:
        status = await planner.status(_ANSWER_S)
    if status is None:
        raise UsageError("no mesh answers here: start one with `moemesh up`", exit_code=1)
    pages: dict[str, str] = {}
    for member in status.view.members:
        if member.metrics and member.state == "ready" and member.role not in pages:
            try:
                pages[member.role] = await fetch_metrics(member.metrics, _ANSWER_S)
            except OSError as error:
                raise UsageError(f"{member.metrics}: {error}", exit_code=1) from None
    if missing := [role for role in _ROLES if role not in pages]:
        raise UsageError(f"no ready {' or '.join(missing)} with metrics.enabled", exit_code=1)
    return pages


@contextmanager
def fresh_mesh() -> Iterator[Settings]:
    """The settings of a mesh with the defaults, that runs until the block is left."""
    with tempfile.TemporaryDirectory(prefix="moemesh-docs-") as home:
        places = {"mesh.run_dir": f"{home}/run", "mesh.state_dir": f"{home}/state"}
        command = [
            sys.executable,
            "-c",
            "from compose.cli import main; main()",
            "up",
            "--port",
            "0",
        ]
        for key, value in places.items():
            command += ["--set", f"{key}={value}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as launcher:  # noqa: S603
            try:
                yield load(None, places, {}).settings
            finally:
                launcher.send_signal(signal.SIGINT)
                launcher.wait(_STOP_S)


async def scrape_when_ready(settings: Settings) -> dict[str, str]:
    """``scrape`` of a mesh that is starting. Raises ``UsageError`` when it takes too long."""
    end = time.monotonic() + _START_S
    while True:
        try:
            await scrape(settings)
            return await scrape(settings)  # the gateway has answered a request by now
        except UsageError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(_LOOK_S)


def main(folder: Path) -> None:
    """Write the pages into ``folder``. Raises ``UsageError`` when no mesh starts."""
    (folder / "configuration.md").write_text(configuration())
    with fresh_mesh() as settings:
        pages = asyncio.run(scrape_when_ready(settings))
    (folder / "metrics.md").write_text(metrics(pages))


if __name__ == "__main__":
    main(Path(__file__).resolve().parents[1] / "docs")
