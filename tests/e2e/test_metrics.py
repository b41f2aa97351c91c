"""What a running mesh shows to Prometheus, and what dashboard, alerts and docs say of it."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import compose
from compose.docs import metrics as metrics_document
from compose.docs import scrape
from mesh.config import load
from tests.support.meshes import Mesh

MONITORING = Path(compose.__file__).parent / "monitoring"
DOCS = Path(compose.__file__).parents[1] / "docs"
OF_VLLM = {
    "gateway": (
        "num_requests_running", "num_requests_waiting", "prompt_tokens_total",
        "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
    ),
    "router": (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
        "request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket",
    ),
}  # fmt: skip
LABELS = {
    "activity", "direction", "endpoint", "finished_reason", "kind", "layers", "le", "link",
    "member_role", "mode", "peer", "phase", "reason", "source", "state", "status", "verdict",
}  # fmt: skip
PROMETHEUS_OWN = {"up"}


class Scraped:
    """Samples by role: ``(name, labels) -> value``."""

    def __init__(self, pages: dict[str, str]) -> None:
        self.samples = {
            role: {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(page)
                for sample in family.samples
            }
            for role, page in pages.items()
        }

    def names(self) -> set[str]:
        return {name for samples in self.samples.values() for name, _ in samples}

    def sum(self, role: str, name: str, **labels: str) -> float:
        return sum(
            value
            for (found, having), value in self.samples[role].items()
            if found == f"moemesh_{name}" and labels.items() <= dict(having).items()
        )


def pages_of(mesh: Mesh) -> dict[str, str]:
    settings = load(None, {"mesh.run_dir": str(mesh.run_dir)}, {}).settings
    return asyncio.run(scrape(settings))


@pytest.fixture(scope="module")
def used(demo_mesh: Mesh) -> Mesh:
    """A mesh that has answered a request."""
    assert demo_mesh.post("/v1/completions", {"prompt": "Emma was", "max_tokens": 8})[0] == 200
    return demo_mesh


def test_a_request_shows_in_every_figure_that_it_should(used: Mesh) -> None:
    before = Scraped(pages_of(used))
    body = {"prompt": [5] * 20, "max_tokens": 12, "ignore_eos": True, "n": 2}
    status, answer = used.post("/v1/completions", body)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 24
    after = Scraped(pages_of(used))

    def grown(role: str, name: str, **labels: str) -> float:
        return after.sum(role, name, **labels) - before.sum(role, name, **labels)

    assert grown("gateway", "prompt_tokens_total") == 20
    assert grown("gateway", "generation_tokens_total") == 24
    assert grown("gateway", "request_success_total", finished_reason="length") == 2
    assert grown("gateway", "http_requests_total", endpoint="completions", status="200") == 1
    assert grown("gateway", "time_to_first_token_seconds_count") == 2
    assert grown("gateway", "inter_token_latency_seconds_count") == 22
    assert grown("gateway", "request_queue_time_seconds_count") == 2
    assert grown("gateway", "e2e_request_latency_seconds_count") == 1
    for phase in ("queue", "prefill", "decode"):
        assert grown("router", f"request_{phase}_time_seconds_count") == 2
        assert grown("router", f"request_{phase}_time_seconds_bucket", le="+Inf") == 2
    assert grown("router", "request_decode_time_seconds_sum") > 0
    assert grown("router", "prefix_cache_queries_total") == 40
    for peer in ("expert-0", "expert-1"):
        for direction in ("sent", "received"):
            assert grown("router", "router_lane_bytes_total", peer=peer, direction=direction) > 0
    # What is shown per group of layers is what is shown on the whole.
    for layers, whole in (("dispatch", "send"), ("wait", "wait"), ("combine", "combine")):
        assert grown("router", "router_layer_seconds_total", activity=layers) == pytest.approx(
            grown("router", "router_thread_seconds_total", activity=whole), rel=1e-6
        )
    assert grown("router", "router_layer_seconds_total", activity="compute") > 0
    assert grown("expert", "expert_layer_seconds_total") == pytest.approx(
        grown("expert", "expert_thread_seconds_total", activity="ffn"), rel=1e-6
    )
    assert after.sum("planner", "planner_members", member_role="expert", state="ready") == 2
    assert after.sum("planner", "planner_members", state="dead") == 0
    assert after.sum("planner", "rollout_phase", phase="idle") == 1
    assert after.sum("expert", "expert_slots", state="filled") > 0
    assert after.sum("expert", "expert_slots", state="loading") == 0
    assert 0 < after.sum("planner", "balancedness_ratio") <= 1


def test_the_figures_that_vllm_has_go_by_its_names(used: Mesh) -> None:
    samples = Scraped(pages_of(used)).samples
    for role, names in OF_VLLM.items():
        there = {name for name, _ in samples[role]}
        assert {f"moemesh_{name}" for name in names} <= there


def test_labels_are_few_and_name_no_request_layer_or_expert(used: Mesh) -> None:
    scraped = Scraped(pages_of(used))
    for samples in scraped.samples.values():
        for name, labels in samples:
            for label, value in labels:
                assert label in LABELS, f"{name} has a label {label}"
                if label != "le":
                    assert not re.search(r"cmpl-|\d{4,}", value), f"{name}: {value}"
        layers = {dict(labels)["layers"] for _, labels in samples if "layers" in dict(labels)}
        assert len(layers) <= 4
        assert len(samples) < 300


def test_the_page_of_metrics_is_what_the_mesh_serves(used: Mesh) -> None:
    # Made by: make docs
    assert (DOCS / "metrics.md").read_text() == metrics_document(pages_of(used))


def rules() -> list[tuple[str, str]]:
    document = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    return [
        (rule["alert"], rule["expr"]) for group in document["groups"] for rule in group["rules"]
    ]


def queries() -> list[tuple[str, str]]:
    document = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", "1m"))
        for panel in document["panels"]
        for target in panel.get("targets", ())
    ]


def test_the_dashboard_can_be_imported_as_it_is() -> None:
    document = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    assert document["uid"] == "moemesh"
    panels = document["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [v["name"] for v in document["templating"]["list"]] == ["datasource"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["targets"], panel["title"]


def selectors(node: Any) -> Iterator[Any]:
    """The vector selectors of a parsed PromQL expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    children = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    for child in [*children, *getattr(node, "args", ())]:
        if isinstance(child, promql_parser.Expr):
            yield from selectors(child)


@pytest.mark.parametrize("source", [rules, queries])
def test_every_expression_asks_for_what_a_mesh_serves(used: Mesh, source: Any) -> None:
    scraped = Scraped(pages_of(used))
    label_names: dict[str, set[str]] = {}
    for samples in scraped.samples.values():
        for name, labels in samples:
            label_names.setdefault(name, {"role", "instance", "member"}).update(dict(labels))
    seen = 0
    for title, expression in source():
        found = list(selectors(promql_parser.parse(expression)))
        assert found, f"{title} asks for nothing: {expression}"
        for selector in found:
            if selector.name in PROMETHEUS_OWN:
                continue
            assert selector.name in label_names, f"{title}: no process serves {selector.name}"
            for matcher in selector.matchers.matchers:
                assert matcher.name in label_names[selector.name], f"{title}: {matcher.name}"
            seen += 1
    assert seen > 10


def test_every_figure_that_a_page_or_an_alert_names_is_served(used: Mesh) -> None:
    names = Scraped(pages_of(used)).names()
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in names}
    texts = [MONITORING / "alerts.yml", DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
    seen = set()
    for path in texts:
        for name in re.findall(r"(?<![\w/])moemesh_[a-z0-9_]+", path.read_text()):
            assert name in names | families, f"{path.name}: no process serves {name}"
            seen.add(name)
    assert len(seen) > 50


def test_the_gateway_lists_where_prometheus_finds_every_process(used: Mesh) -> None:
    status, body = used.get("/admin/targets")
    assert status == 200
    found = json.loads(body)
    assert {target["labels"]["member"] for target in found} == {
        "planner", "gateway-0", "router-0", "expert-0", "expert-1",
    }  # fmt: skip
    for target in found:
        labels = target["labels"]
        url = f"{labels['__scheme__']}://{target['targets'][0]}{labels['__metrics_path__']}"
        with urllib.request.urlopen(url, timeout=10) as page:
            assert b"moemesh_process_start_time_seconds" in page.read()


def test_the_scrape_configuration_asks_the_gateway_and_reads_the_alerts() -> None:
    document = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    (job,) = document["scrape_configs"]
    assert job["http_sd_configs"][0]["url"].endswith("/admin/targets")
    assert document["rule_files"] == ["alerts.yml"]
    assert (MONITORING / "alerts.yml").is_file()
    assert 'job="moemesh"' in dict(rules())["ProcessNotScraped"]
    assert job["job_name"] == "moemesh"
